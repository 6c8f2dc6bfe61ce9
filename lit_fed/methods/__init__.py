"""Methods, a paper each: both halves in one file."""

from lit_fed.methods.attention_freezing import FedFrozen
from lit_fed.methods.distillation import UWA, FedDF, FederatedDistillation, FedMD, TeacherError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedprox import FedProx
from lit_fed.methods.frozen_heads import (
    Alignment,
    CalibratedTest,
    DotRegression,
    FedBABU,
    FedDrPlus,
    FedETF,
    SphereFed,
)
from lit_fed.methods.regularizers import FD, KD, LD, NTD, Prox
from lit_fed.methods.scaffold import Scaffold

__all__ = ["FD", "KD", "LD", "NTD", "FedAvg", "FedProx", "Prox", "Scaffold"]
__all__ += ["UWA", "FedDF", "FedMD", "FederatedDistillation", "TeacherError"]
__all__ += ["Alignment", "CalibratedTest", "DotRegression", "FedBABU", "FedDrPlus", "FedETF", "FedFrozen", "SphereFed"]
