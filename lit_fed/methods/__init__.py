"""Methods, one file or package per paper."""

from lit_fed.methods.afl import AFL
from lit_fed.methods.apfl import APFL
from lit_fed.methods.attention_freezing import FedFrozen
from lit_fed.methods.client_momentum import ClientMomentum
from lit_fed.methods.data_free import FedGen, HFedCKD, PseudoMap, PseudoTest
from lit_fed.methods.distillation import UWA, FedDF, FederatedDistillation, FedMD, TeacherError
from lit_fed.methods.ditto import Ditto
from lit_fed.methods.fedala import FedALA
from lit_fed.methods.fedamp import FedAMP
from lit_fed.methods.fedasync import FedAsync
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedavgm import FedAvgM
from lit_fed.methods.fedbn import FedBN
from lit_fed.methods.fedbuff import FedBuff
from lit_fed.methods.fedcross import FedCross
from lit_fed.methods.feddecorr import FedDecorr
from lit_fed.methods.feddyn import FedDyn
from lit_fed.methods.fedexp import FedExP
from lit_fed.methods.fedfomo import FedFomo
from lit_fed.methods.fedlc import FedLC
from lit_fed.methods.fednova import FedNova
from lit_fed.methods.fedntd import FedNTD
from lit_fed.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from lit_fed.methods.fedpac import FedPAC
from lit_fed.methods.fedper import FedPer
from lit_fed.methods.fedproto import FedProto
from lit_fed.methods.fedprox import FedProx
from lit_fed.methods.fedrep import FedRep
from lit_fed.methods.fedrod import FedROD
from lit_fed.methods.fedrs import FedRS
from lit_fed.methods.fedsam import FedSAM, MoFedSAM
from lit_fed.methods.fedsmoo import FedSMOO
from lit_fed.methods.fedspeed import FedSpeed
from lit_fed.methods.fedtgp import FedTGP
from lit_fed.methods.frozen_heads import (
    Alignment,
    CalibratedTest,
    DotRegression,
    FedBABU,
    FedDrPlus,
    FedETF,
    SphereFed,
)
from lit_fed.methods.ifca import IFCA
from lit_fed.methods.lg_fedavg import LGFedAvg
from lit_fed.methods.local_only import LocalOnly
from lit_fed.methods.low_rank import FedExLoRA, FedIT, FedSALoRA, FFALoRA, FLoRA, HetLoRA
from lit_fed.methods.moon import Moon
from lit_fed.methods.per_fedavg import PerFedAvg
from lit_fed.methods.pfedhn import PFedHN
from lit_fed.methods.pfedme import PFedMe
from lit_fed.methods.qfedavg import QFedAvg
from lit_fed.methods.raf import RAF, ClusterTest, FedRAF
from lit_fed.methods.regularizers import FD, KD, LD, NTD, Prox
from lit_fed.methods.scaffold import Scaffold
from lit_fed.methods.server import ServerOptimizer

SCAFFOLD, MOON = Scaffold, Moon  # the names in the papers

__all__ = [
    "AFL",
    "APFL",
    "FD",
    "IFCA",
    "KD",
    "LD",
    "NTD",
    "RAF",
    "ClientMomentum",
    "ClusterTest",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedBuff",
    "FedCross",
    "FedDecorr",
    "FedDyn",
    "FedExP",
    "FedFomo",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRAF",
    "FedROD",
    "FedRS",
    "FedRep",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "FedTGP",
    "FedYogi",
    "LGFedAvg",
    "LocalOnly",
    "MoFedSAM",
    "Moon",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "Prox",
    "QFedAvg",
    "Scaffold",
    "ServerOptimizer",
]
__all__ += ["FedGen", "HFedCKD", "PseudoMap", "PseudoTest"]
__all__ += ["UWA", "FedDF", "FedMD", "FederatedDistillation", "TeacherError"]
__all__ += ["Alignment", "CalibratedTest", "DotRegression", "FedBABU", "FedDrPlus", "FedETF", "FedFrozen", "SphereFed"]
__all__ += ["FFALoRA", "FLoRA", "FedExLoRA", "FedIT", "FedSALoRA", "HetLoRA"]
