"""The names of ``from lit_fed import …``, which the package imports on first use."""

from lit_fed.algorithm import (
    Algorithm,
    Client,
    ClientUpdate,
    Cohort,
    Model,
    Pass,
    Payload,
    Phase,
    Regularizer,
    Split,
    Update,
    objective_of,
)
from lit_fed.data import Arrays, DatasetModule, FederatedDataModule, ImageDataModule, TensorDataModule
from lit_fed.handover.export import Exported, export_network
from lit_fed.load import DeployedNetwork, load_network
from lit_fed.tasks import Classifier, Regressor
from lit_fed.trainer import FederatedTrainer

__all__ = [
    "Algorithm",
    "Arrays",
    "Classifier",
    "Client",
    "ClientUpdate",
    "Cohort",
    "DatasetModule",
    "DeployedNetwork",
    "Exported",
    "FederatedDataModule",
    "FederatedTrainer",
    "ImageDataModule",
    "Model",
    "Pass",
    "Payload",
    "Phase",
    "Regressor",
    "Regularizer",
    "Split",
    "TensorDataModule",
    "Update",
    "export_network",
    "load_network",
    "objective_of",
]
