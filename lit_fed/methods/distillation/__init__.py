"""Federated distillation: clients exchange predictions on a public set."""

from lit_fed.methods.distillation.exchange import PredictionExchange
from lit_fed.methods.distillation.feddf import FedDF
from lit_fed.methods.distillation.federated_distillation import FederatedDistillation
from lit_fed.methods.distillation.fedmd import FedMD
from lit_fed.methods.distillation.teacher_error import TeacherError
from lit_fed.methods.distillation.uwa import UWA

__all__ = ["UWA", "FedDF", "FedMD", "FederatedDistillation", "PredictionExchange", "TeacherError"]
