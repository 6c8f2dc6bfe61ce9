"""Networks by name: lit_fed's, and all of timm."""

from lit_fed.networks.adapters import (
    Adapter,
    AdapterNames,
    LoRALinear,
    LoRAWeight,
    adapt_network,
    adapters_of,
    merge_adapters,
)
from lit_fed.networks.basic import (
    MLP,
    VGG11,
    ClassificationNetwork,
    Logistic,
    McMahanCNN,
    MobileNet,
    ResNet18Cifar,
    SmallCNN,
    WindowCNN,
)
from lit_fed.networks.etf import (
    CosineHead,
    ProjectedETFHead,
    class_cosines,
    orthonormal_classes,
    simplex_etf,
)
from lit_fed.networks.generators import Generator, ImageGenerator, LatentGenerator
from lit_fed.networks.registry import (
    NETWORKS,
    TEXT_NETWORKS,
    WINDOW_NETWORKS,
    build_network,
    classifier,
    features,
)
from lit_fed.networks.text import BertTiny, EmbeddingBag
from lit_fed.networks.weights import hash_of_weights, load_weights

__all__ = [
    "MLP",
    "NETWORKS",
    "TEXT_NETWORKS",
    "VGG11",
    "WINDOW_NETWORKS",
    "Adapter",
    "AdapterNames",
    "BertTiny",
    "ClassificationNetwork",
    "CosineHead",
    "EmbeddingBag",
    "Generator",
    "ImageGenerator",
    "LatentGenerator",
    "LoRALinear",
    "LoRAWeight",
    "Logistic",
    "McMahanCNN",
    "MobileNet",
    "ProjectedETFHead",
    "ResNet18Cifar",
    "SmallCNN",
    "WindowCNN",
    "adapt_network",
    "adapters_of",
    "build_network",
    "class_cosines",
    "classifier",
    "features",
    "hash_of_weights",
    "load_weights",
    "merge_adapters",
    "orthonormal_classes",
    "simplex_etf",
]
