"""FedFrozen: simulations of federated linear attention whose kernel freezes, and the table of costs."""

from lit_fed.studies.papers.fedfrozen.attention_shares import AttentionShares
from lit_fed.studies.papers.fedfrozen.freezing import Proposition1
from lit_fed.studies.papers.fedfrozen.local_optima import LocalOptima
from lit_fed.studies.papers.fedfrozen.panels import Figure1, Figure2, Figure3
from lit_fed.studies.papers.fedfrozen.pooled_kernel import PooledKernel

__all__ = ["AttentionShares", "Figure1", "Figure2", "Figure3", "LocalOptima", "PooledKernel", "Proposition1"]
