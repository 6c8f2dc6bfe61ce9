"""Populations of clients: data sets, the partitions that cut them, and the loaders that feed the clients."""

from lit_fed.data.formats.archives import ArrayFile, ClientArrays
from lit_fed.data.formats.client_folders import ClassFolders, ClientFolders
from lit_fed.data.formats.csv_text import CSVText
from lit_fed.data.formats.domains import Domains
from lit_fed.data.formats.heart_disease import HeartDisease
from lit_fed.data.formats.hugging_face import HuggingFace
from lit_fed.data.formats.leaf import LEAF
from lit_fed.data.formats.table import Table
from lit_fed.data.formats.wrapped import Wrapped
from lit_fed.data.loaders.tensor_loader import Loader, TensorLoader
from lit_fed.data.loaders.transforms import (
    Augmentation,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomTransform,
    Resize,
)
from lit_fed.data.partitions.csr import CSR, ClientIndices
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.label_skew import (
    ClassesPerClient,
    Dirichlet,
    ExtendedDirichlet,
    InnerDirichlet,
    Pathological,
    Shards,
)
from lit_fed.data.partitions.partition import (
    IID,
    Grouped,
    Listed,
    LogNormal,
    Natural,
    Partition,
    Quantity,
    Samples,
    SizeLaw,
    UnequalSizes,
)
from lit_fed.data.partitions.target_skew import Continuous
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.dataset_module import DatasetModule, Datasets
from lit_fed.data.population.hooks import Batches, Subset
from lit_fed.data.population.in_memory import Arrays, ImageDataModule, TensorDataModule
from lit_fed.data.population.source import Categorical, Columns, Source, TensorSource
from lit_fed.data.population.targets import quantile_strata
from lit_fed.data.population.views import Brightness, FeatureSkew, NoiseLevels, Rotations, View
from lit_fed.data.sets.scikit import Diabetes, DigitPairs, Digits
from lit_fed.data.sets.sensors import PAMAP2, UCIHAR
from lit_fed.data.sets.tiny_imagenet import TinyImageNet
from lit_fed.data.sets.torchvision_sets import CIFAR10, CIFAR100, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CSR",
    "IID",
    "LEAF",
    "PAMAP2",
    "UCIHAR",
    "ArrayFile",
    "Arrays",
    "Augmentation",
    "Batches",
    "Brightness",
    "CSVText",
    "Categorical",
    "ClassFolders",
    "ClassesPerClient",
    "ClientArrays",
    "ClientFolders",
    "ClientIndices",
    "Columns",
    "Continuous",
    "DatasetModule",
    "Datasets",
    "Diabetes",
    "DigitPairs",
    "Digits",
    "Dirichlet",
    "Domains",
    "ExtendedDirichlet",
    "FashionMNIST",
    "FeatureSkew",
    "FederatedDataModule",
    "Grouped",
    "HeartDisease",
    "HuggingFace",
    "ImageDataModule",
    "InnerDirichlet",
    "Listed",
    "Loader",
    "LogNormal",
    "Natural",
    "NoiseLevels",
    "Normalize",
    "Part",
    "Partition",
    "Parts",
    "Pathological",
    "Quantity",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomTransform",
    "Resize",
    "Rotations",
    "Samples",
    "Shards",
    "SizeLaw",
    "Source",
    "Subset",
    "Table",
    "TensorDataModule",
    "TensorLoader",
    "TensorSource",
    "TinyImageNet",
    "UnequalSizes",
    "View",
    "Wrapped",
    "quantile_strata",
]
