"""Populations of clients: data sets, the partitions that cut them, and the loaders that feed the clients."""

from lit_fed.data.array_file import ArrayFile
from lit_fed.data.base import FederatedDataModule, Subset
from lit_fed.data.client_arrays import ClientArrays
from lit_fed.data.client_folders import ClientFolders
from lit_fed.data.csr import CSR, ClientIndices
from lit_fed.data.csv_text import CSVText
from lit_fed.data.cut import Strata
from lit_fed.data.dataset_module import DatasetModule, Datasets
from lit_fed.data.diabetes import Diabetes
from lit_fed.data.digits import DigitPairs, Digits
from lit_fed.data.feature_skew import Brightness, FeatureSkew, NoiseLevels, Rotations
from lit_fed.data.in_memory import Arrays, ImageDataModule, TensorDataModule
from lit_fed.data.label_skew import ClassesPerClient, Dirichlet, Shards
from lit_fed.data.listed import Listed
from lit_fed.data.partition import IID, LogNormal, Natural, Partition, Quantity, Samples, UnequalSizes
from lit_fed.data.pose import CocoKeypoints, Mpii, PhotoPose, PoseAugmentation, PoseDataModule, Puppets, Skeleton
from lit_fed.data.sensors import PAMAP2, UCIHAR
from lit_fed.data.table import Table
from lit_fed.data.targets import quantile_strata
from lit_fed.data.tensor_loader import Loader, TensorLoader
from lit_fed.data.tiny_imagenet import TinyImageNet
from lit_fed.data.torchvision_sets import CIFAR10, CIFAR100, FashionMNIST
from lit_fed.data.transforms import (
    Augmentation,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomTransform,
    Resize,
)
from lit_fed.data.views import View
from lit_fed.data.wrapped import Wrapped

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CSR",
    "IID",
    "PAMAP2",
    "UCIHAR",
    "ArrayFile",
    "Arrays",
    "Augmentation",
    "Brightness",
    "CSVText",
    "ClassesPerClient",
    "ClientArrays",
    "ClientFolders",
    "ClientIndices",
    "CocoKeypoints",
    "DatasetModule",
    "Datasets",
    "Diabetes",
    "DigitPairs",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FeatureSkew",
    "FederatedDataModule",
    "ImageDataModule",
    "Listed",
    "Loader",
    "LogNormal",
    "Mpii",
    "Natural",
    "NoiseLevels",
    "Normalize",
    "Partition",
    "PhotoPose",
    "PoseAugmentation",
    "PoseDataModule",
    "Puppets",
    "Quantity",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomTransform",
    "Resize",
    "Rotations",
    "Samples",
    "Shards",
    "Skeleton",
    "Strata",
    "Subset",
    "Table",
    "TensorDataModule",
    "TensorLoader",
    "TinyImageNet",
    "UnequalSizes",
    "View",
    "Wrapped",
    "quantile_strata",
]
