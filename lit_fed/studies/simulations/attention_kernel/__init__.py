"""FedFrozen's simulations: federated linear attention whose kernel freezes after a warm-up."""

from lit_fed.studies.simulations.attention_kernel.freezing import Proposition1
from lit_fed.studies.simulations.attention_kernel.local_optima import LocalOptima
from lit_fed.studies.simulations.attention_kernel.panels import Figure1, Figure2, Figure3
from lit_fed.studies.simulations.attention_kernel.pooled_kernel import PooledKernel

__all__ = ["Figure1", "Figure2", "Figure3", "LocalOptima", "PooledKernel", "Proposition1"]
