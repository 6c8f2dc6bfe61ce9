"""Networks that output maps: a heatmap for every joint of a person, or scores of every class."""

from collections.abc import Callable

from torch import nn

from lit_fed.poses.networks.convolutional import PoseCNN, PoseResNet
from lit_fed.poses.networks.fcn import FCN
from lit_fed.poses.networks.vit import (
    DeconvolutionHead,
    GlobalPositions,
    LocalAttention,
    PoseViT,
    ShuffleHead,
    pose_vit_tiny,
)

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "pose_vit_small": PoseViT,
    "pose_vit_tiny": pose_vit_tiny,
    "pose_cnn": PoseCNN,
    "pose_resnet": PoseResNet,
    "fcn_resnet50": FCN,
}
"""The names of `lit_fed.poses.POSE_NETWORKS`."""

__all__ = [
    "FCN",
    "NETWORKS",
    "DeconvolutionHead",
    "GlobalPositions",
    "LocalAttention",
    "PoseCNN",
    "PoseResNet",
    "PoseViT",
    "ShuffleHead",
]
