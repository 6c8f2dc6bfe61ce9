"""One paper, one file, both halves."""

from lit_fed.methods.ditto import Ditto
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedavgm import FedAvgM
from lit_fed.methods.fedbabu import FedBABU
from lit_fed.methods.feddf import FedDF, FedDFServer
from lit_fed.methods.feddr_plus import DotRegression, FedDrPlus
from lit_fed.methods.feddyn import FedDyn, FedDynServer
from lit_fed.methods.federated_distillation import DistillationServer, FederatedDistillation
from lit_fed.methods.fedetf import FedETF
from lit_fed.methods.fedexp import FedExP
from lit_fed.methods.fedfrozen import FedFrozen
from lit_fed.methods.fedmd import FedMD, FedMDServer
from lit_fed.methods.fednova import CountsSteps, FedNova, FedNovaServer
from lit_fed.methods.fedntd import FedNTD
from lit_fed.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from lit_fed.methods.fedper import FedPer
from lit_fed.methods.fedprox import FedProx
from lit_fed.methods.fedrep import FedRep
from lit_fed.methods.local_only import LocalOnly
from lit_fed.methods.moon import Moon
from lit_fed.methods.per_fedavg import PerFedAvg
from lit_fed.methods.scaffold import Scaffold, ScaffoldServer
from lit_fed.methods.server import ServerOptimizer
from lit_fed.methods.spherefed import CalibratedTest, SphereFed
from lit_fed.methods.uwa import UWA, UWAServer

__all__ = [
    "UWA",
    "CalibratedTest",
    "CountsSteps",
    "DistillationServer",
    "Ditto",
    "DotRegression",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedDF",
    "FedDFServer",
    "FedDrPlus",
    "FedDyn",
    "FedDynServer",
    "FedETF",
    "FedExP",
    "FedFrozen",
    "FedMD",
    "FedMDServer",
    "FedNTD",
    "FedNova",
    "FedNovaServer",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedYogi",
    "FederatedDistillation",
    "LocalOnly",
    "Moon",
    "PerFedAvg",
    "Scaffold",
    "ScaffoldServer",
    "ServerOptimizer",
    "SphereFed",
    "UWAServer",
]
