"""One paper, one file, both halves."""

from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedntd import FedNTD
from lit_fed.methods.fedprox import FedProx

__all__ = ["FedAvg", "FedNTD", "FedProx"]
