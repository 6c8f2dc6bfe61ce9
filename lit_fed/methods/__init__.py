"""One paper, one file, both halves."""

from lit_fed.methods.ditto import Ditto
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.feddyn import FedDyn, FedDynServer
from lit_fed.methods.fedntd import FedNTD
from lit_fed.methods.fedper import FedPer
from lit_fed.methods.fedprox import FedProx
from lit_fed.methods.fedrep import FedRep
from lit_fed.methods.local_only import LocalOnly
from lit_fed.methods.moon import Moon
from lit_fed.methods.per_fedavg import PerFedAvg
from lit_fed.methods.scaffold import Scaffold, ScaffoldServer

__all__ = [
    "Ditto",
    "FedAvg",
    "FedDyn",
    "FedDynServer",
    "FedNTD",
    "FedPer",
    "FedProx",
    "FedRep",
    "LocalOnly",
    "Moon",
    "PerFedAvg",
    "Scaffold",
    "ScaffoldServer",
]
