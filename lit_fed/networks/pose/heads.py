"""Heads from a feature map to heatmaps."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError


class DeconvolutionHead(nn.Sequential):
    """The classic head: deconvolutions that double the map, each with a norm and ReLU, then a 1×1 convolution.

    Xiao, Wu, Wei: "Simple Baselines for Human Pose Estimation and Tracking", ECCV 2018. Kernel 4, stride 2, padding 1.

    Args:
        channels: Channels of the feature map.
        num_joints: Heatmaps K.
        upsample: Size of a heatmap over that of the feature map, a power of two.
        width: Channels of the deconvolutions.
        norm: ``batch``, or ``group`` for group norm of 32 groups, which has no buffers.
    """

    def __init__(
        self, channels: int, num_joints: int, upsample: int = 4, width: int = 256, norm: str = "batch"
    ) -> None:
        if upsample < 1 or upsample & (upsample - 1):
            raise ConfigError(
                f"DeconvolutionHead.upsample is {upsample}; it must be a power of two, else set head: shuffle"
            )
        check_choice("DeconvolutionHead.norm", norm, ("batch", "group"))
        layers: list[nn.Module] = []
        for _ in range(int(math.log2(upsample))):
            deconvolution = nn.ConvTranspose2d(channels, width, kernel_size=4, stride=2, padding=1, bias=False)
            nn.init.normal_(deconvolution.weight, std=0.001)
            layers += [deconvolution, nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(32, width), nn.ReLU()]
            channels = width
        super().__init__(*layers, _final(channels, num_joints))


class ShuffleHead(nn.Sequential):
    """A 1×1 convolution whose channels become pixels: small, and exact for any enlargement.

    Shi et al.: "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural
    Network", CVPR 2016.

    Args:
        channels: Channels of the feature map.
        num_joints: Heatmaps K.
        upsample: Size of a heatmap over that of the feature map.
    """

    def __init__(self, channels: int, num_joints: int, upsample: int = 4) -> None:
        super().__init__(_final(channels, num_joints * upsample**2), nn.PixelShuffle(upsample))


def make_head(kind: str, channels: int, num_joints: int, upsample: int, norm: str) -> nn.Module:
    """A head by name: ``deconvolution`` or ``shuffle``."""
    check_range("num_joints", num_joints, least=1)
    check_choice("head", kind, ("deconvolution", "shuffle"))
    if kind == "deconvolution":
        return DeconvolutionHead(channels, num_joints, upsample, norm=norm)
    return ShuffleHead(channels, num_joints, upsample)


def check_grid(network: str, image: Tensor, in_channels: int, cell: int) -> None:
    """Refuse images that a network cannot cut into a grid.

    Args:
        network: Name for the error message.
        image: (B, in_channels, H, W).
        in_channels: Channels of the network's input.
        cell: Pixels that the height and the width must be multiples of.
    """
    if image.ndim != 4 or image.shape[1] != in_channels:
        raise ConfigError(f"network {network} takes images (B, {in_channels}, H, W) and got {tuple(image.shape)}")
    height, width = image.shape[2:]
    if min(height, width) < cell:
        raise ConfigError(f"network {network}: an image of {height}×{width} pixels is smaller than a patch of {cell}")
    if height % cell or width % cell:
        raise ConfigError(
            f"network {network}: an image of {height}×{width} pixels cannot be cut into patches of {cell}; choose "
            f"resolutions that are multiples of {cell}"
        )


def _final(channels: int, maps: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, maps, kernel_size=1)
    nn.init.normal_(conv.weight, std=0.001)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
