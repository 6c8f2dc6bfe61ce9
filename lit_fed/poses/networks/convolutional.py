"""Convolutional baselines for poses."""

from __future__ import annotations

from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn

from lit_fed.checks import check_choice
from lit_fed.errors import ConfigError
from lit_fed.networks.registry import create_timm
from lit_fed.poses.networks.vit import check_grid, make_head


class _Convolutional(nn.Module):
    """A body that yields a feature map, and a head that turns it into heatmaps."""

    body: nn.Module
    head: nn.Module
    in_channels: int
    cell: int

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse images of a shape (channels, height, width)."""
        check_grid(type(self).__name__, torch.empty(0, *shape), self.in_channels, self.cell)

    def forward_features(self, x: Tensor) -> Tensor:
        """The feature map: (B, in_channels, H, W) to (B, C, h, w)."""
        check_grid(type(self).__name__, x, self.in_channels, self.cell)
        feature_map: Tensor = self.body(x)
        return feature_map

    def forward(self, x: Tensor) -> Tensor:
        """Heatmaps of a batch: (B, in_channels, H, W) to (B, K, H/stride, W/stride)."""
        heatmaps: Tensor = self.head(self.forward_features(x))
        return heatmaps


class PoseCNN(_Convolutional):
    """A small network for a CPU: two convolutions of stride 2, residual blocks, and a shuffle head.

    Uses group norm, which does not depend on the batch and has no buffers. Height and width must be multiples of 4.

    Args:
        num_classes: Joints K, each with a heatmap.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the largest images.
        width: Channels, a multiple of 8.
        depth: Residual blocks of two 3×3 convolutions.
        upsample: Size of a heatmap over that of the feature map; 4 gives the size of the image.
    """

    def __init__(
        self,
        num_classes: int = 16,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 64, 48),
        width: int = 64,
        depth: int = 4,
        upsample: int = 4,
    ) -> None:
        super().__init__()
        if width < 8 or width % 8:
            raise ConfigError(f"PoseCNN.width is {width}; it must be a multiple of 8")
        check_choice("PoseCNN.upsample", upsample, (1, 2, 4))
        self.in_channels, self.cell, self.stride = in_channels, 4, 4 // upsample
        _check_shape("PoseCNN", input_shape, in_channels)
        layers: list[nn.Module] = []
        for before, after in ((in_channels, width // 2), (width // 2, width)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(after // 4, after), nn.ReLU()]
        self.body = nn.Sequential(*layers, *(_Residual(width) for _ in range(depth)))
        self.head = make_head("shuffle", width, num_classes, upsample, "group")


class PoseResNet(_Convolutional):
    """The simple baseline: a backbone of timm, three deconvolutions, heatmaps of a quarter of the image.

    Xiao, Wu, Wei: "Simple Baselines for Human Pose Estimation and Tracking", ECCV 2018.

    Args:
        num_classes: Joints K, each with a heatmap.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the largest images.
        backbone: Name of a model of timm that yields feature maps.
        pretrained: Download timm's weights.
        norm: Norm of the deconvolutions: ``batch`` or ``group``.
    """

    def __init__(
        self,
        num_classes: int = 16,
        in_channels: int = 3,
        input_shape: Sequence[int] = (3, 256, 192),
        backbone: str = "resnet50",
        pretrained: bool = False,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        _check_shape("PoseResNet", input_shape, in_channels)
        if not timm.is_model(backbone):
            raise ConfigError(f"PoseResNet.backbone is {backbone!r}; it must be a model of timm")
        try:
            self.body = _LastMap(create_timm(backbone, pretrained=pretrained, features_only=True, in_chans=in_channels))
        except (RuntimeError, AttributeError, TypeError) as error:
            raise ConfigError(f"PoseResNet.backbone is {backbone!r}; it must give feature maps ({error})") from error
        self.in_channels, self.cell, self.stride = in_channels, self.body.reduction, 4
        self.head = make_head("deconvolution", self.body.channels, num_classes, self.cell // 4, norm)


class _LastMap(nn.Module):
    """The last of the feature maps of a model of timm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.channels: int = model.feature_info.channels()[-1]  # type: ignore[union-attr, operator]  # timm's
        self.reduction: int = model.feature_info.reduction()[-1]  # type: ignore[union-attr, operator]  # timm's

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.model(x)[-1]
        return last


class _Residual(nn.Module):
    """relu(x + F(x)), F two 3×3 convolutions with group norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(width // 4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(width // 4, width),
        )  # fmt: skip
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.relu(x + self.change(x))
        return summed


def _check_shape(network: str, input_shape: Sequence[int], in_channels: int) -> None:
    if len(input_shape) != 3 or input_shape[0] != in_channels:
        raise ConfigError(
            f"{network}.input_shape is {tuple(input_shape)}; it must be (channels, height, width) with in_channels = "
            f"{in_channels}"
        )
