"""What ``from lit_fed import …`` gives; the package itself imports it only when something is asked for."""

from lit_fed.engine.algorithm import Algorithm, Cohort, Regularizer
from lit_fed.engine.alone import objective_of
from lit_fed.engine.client import Client, Pass, Phase, Update
from lit_fed.engine.model import Model, Split
from lit_fed.engine.payload import ClientUpdate, Payload
from lit_fed.handover.export import Exported, export_network
from lit_fed.load import DeployedNetwork, load_network
from lit_fed.tasks import Classifier, KeypointEstimator, Regressor
from lit_fed.trainer import FederatedTrainer

__all__ = [
    "Algorithm",
    "Classifier",
    "Client",
    "ClientUpdate",
    "Cohort",
    "DeployedNetwork",
    "Exported",
    "FederatedTrainer",
    "KeypointEstimator",
    "Model",
    "Pass",
    "Payload",
    "Phase",
    "Regressor",
    "Regularizer",
    "Split",
    "Update",
    "export_network",
    "load_network",
    "objective_of",
]
