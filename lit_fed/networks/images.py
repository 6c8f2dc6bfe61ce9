"""Shared parts of the convolutional networks: the image's shape, strides for small images, batch norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError


def image_size(network: str, in_channels: int, input_shape: Sequence[int], smallest: int) -> tuple[int, int]:
    """Height and width of a network's images.

    Args:
        network: Name for the error message.
        in_channels: Channels of the images.
        input_shape: Channels, height and width of the images.
        smallest: Least height and width, in pixels.
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"{network}.input_shape is {shape}; it must be (channels, height, width), at least {smallest}×{smallest}"
        )
    check_range(f"{network}.in_channels", in_channels, least=1)
    if shape[0] != in_channels:
        raise ConfigError(f"{network}.in_channels is {in_channels}; it must be {shape[0]}, as in input_shape {shape}")
    return shape[1], shape[2]


def halved(size: tuple[int, int], smallest: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The stride that halves a map, and the size (height, width) of the map after it, rounded up.

    Args:
        size: Height and width of the map.
        smallest: A side of at most this length keeps it, with stride 1.
    """
    stride = (2 if size[0] > smallest else 1, 2 if size[1] > smallest else 1)
    return stride, (-(-size[0] // stride[0]), -(-size[1] // stride[1]))


def batch_norm(channels: int, batch_stats: bool) -> nn.BatchNorm2d:
    """Batch normalisation (Ioffe and Szegedy 2015) of maps (B, channels, H, W).

    Args:
        channels: Channels of the maps.
        batch_stats: Normalise by the statistics of the current batch, also in eval mode, without buffers: there are no
            running statistics that differ between clients or need aggregation.
    """
    return nn.BatchNorm2d(channels, track_running_stats=not batch_stats)
