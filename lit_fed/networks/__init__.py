"""Networks by name: lit_fed's, and all of timm."""

from lit_fed.networks.basic import MLP, ClassificationNetwork, Logistic, SmallCNN, WindowCNN
from lit_fed.networks.etf import (
    CosineHead,
    ProjectedETFHead,
    class_cosines,
    orthonormal_classes,
    simplex_etf,
)
from lit_fed.networks.generators import Generator, ImageGenerator, LatentGenerator
from lit_fed.networks.mcmahan import McMahanCNN
from lit_fed.networks.mobilenet import MobileNet
from lit_fed.networks.registry import (
    NETWORKS,
    POSE_NETWORKS,
    TEXT_NETWORKS,
    WINDOW_NETWORKS,
    build_network,
    classifier,
    features,
)
from lit_fed.networks.resnet import ResNet18Cifar
from lit_fed.networks.text import BertTiny, EmbeddingBag
from lit_fed.networks.vgg import VGG11

__all__ = [
    "MLP",
    "NETWORKS",
    "POSE_NETWORKS",
    "TEXT_NETWORKS",
    "VGG11",
    "WINDOW_NETWORKS",
    "BertTiny",
    "ClassificationNetwork",
    "CosineHead",
    "EmbeddingBag",
    "Generator",
    "ImageGenerator",
    "LatentGenerator",
    "Logistic",
    "McMahanCNN",
    "MobileNet",
    "ProjectedETFHead",
    "ResNet18Cifar",
    "SmallCNN",
    "WindowCNN",
    "build_network",
    "class_cosines",
    "classifier",
    "features",
    "orthonormal_classes",
    "simplex_etf",
]
