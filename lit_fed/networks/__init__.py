"""Networks by name: a few small ones of our own, and everything timm has."""

from lit_fed.networks.basic import MLP, ClassificationNetwork, Logistic, SmallCNN
from lit_fed.networks.outputs import Outputs, run, run_with
from lit_fed.networks.registry import NETWORKS, build_network, classifier, features

__all__ = [
    "MLP",
    "NETWORKS",
    "ClassificationNetwork",
    "Logistic",
    "Outputs",
    "SmallCNN",
    "build_network",
    "classifier",
    "features",
    "run",
    "run_with",
]
