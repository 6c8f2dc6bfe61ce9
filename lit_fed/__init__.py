"""Federated learning for PyTorch Lightning."""

from lit_fed.algorithm import Algorithm
from lit_fed.checkpoint import load_network
from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, ClientModule, Phase, Split
from lit_fed.payload import ClientUpdate, Payload
from lit_fed.trainer import FederatedTrainer

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Classifier",
    "ClientContext",
    "ClientModule",
    "ClientUpdate",
    "FederatedTrainer",
    "Payload",
    "Phase",
    "Split",
    "load_network",
]
