"""Small classification networks for quick runs, tests and baselines.

All networks split in the same way, which methods that distil features or treat the head separately rely on:
``forward(x) == head(forward_features(x))``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.networks.images import image_size

_MOST_BLOCKS = 8  # whose image is at least 256 pixels wide


class ClassificationNetwork(nn.Module, ABC):
    """A body that yields flat features and a linear head.

    Args:
        num_features: Length d of the feature vector.
        num_classes: Length of the output, at least 1.
        head_bias: Whether the head adds a bias to its logits.

    Raises:
        ConfigError: For no features or no classes.
    """

    def __init__(self, num_features: int, num_classes: int, head_bias: bool = True) -> None:
        super().__init__()
        if num_classes < 1 or num_features < 1:
            raise ConfigError(
                f"network {type(self).__name__} has {num_classes} classes and {num_features} features; it must have at "
                "least 1 of each, and an input_shape without zeros"
            )
        self.num_features = num_features
        self.head = nn.Linear(num_features, num_classes, bias=head_bias)

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch: (B, *input_shape) to (B, num_classes)."""
        logits: Tensor = self.head(self.forward_features(x))
        return logits


class SmallCNN(ClassificationNetwork):
    """Blocks of a 3×3 convolution, ReLU and 2×2 max pooling, then a linear head; for images of 8×8 to 64×64.

    The convolutions have ``width``, ``2 * width``, ``4 * width``, … channels. The features are the last flattened map,
    with two blocks ``d = 2 * width * (H // 4) * (W // 4)``, or with `num_features` the output of a linear layer with
    ReLU on it, so that networks of different width have features of one length.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.
        width: Channels of the first convolution.
        input_shape: Channels, height and width of the images; height and width at least ``2 ** blocks`` pixels.
        head_bias: Whether the head has a bias.
        num_features: d; None for the flattened map.
        blocks: Convolutions; each halves height and width, so that a third suits images of 64×64.

    Raises:
        ConfigError: If the image is too small or its channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 1,
        width: int = 16,
        input_shape: Sequence[int] = (1, 8, 8),
        head_bias: bool = True,
        num_features: int | None = None,
        blocks: int = 2,
    ) -> None:
        check_range("SmallCNN.width", width, least=1)
        check_range("SmallCNN.blocks", blocks, least=1, most=_MOST_BLOCKS)
        pixels = image_size(type(self).__name__, in_channels, input_shape, smallest=2**blocks)
        channels = [in_channels, *(width * 2**block for block in range(blocks))]
        flat = channels[-1] * (pixels[0] // 2**blocks) * (pixels[1] // 2**blocks)
        super().__init__(flat if num_features is None else num_features, num_classes, head_bias)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), *projection(flat, num_features)]
        self.body = nn.Sequential(*layers)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, H, W) to (B, d)."""
        flat: Tensor = self.body(x)
        return flat


class WindowCNN(ClassificationNetwork):
    """Blocks of a convolution along time, ReLU and max pooling by 2, then a linear head; for windows of sensors.

    The convolutions have ``width``, ``2 * width``, … channels. The features are the last map's means over time, so
    ``d = 2 ** (blocks - 1) * width``, or with `num_features` the output of a linear layer with ReLU on them, so that
    networks of different width have features of one length.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the windows, one per sensor axis.
        input_shape: Channels and time steps of a window; at least ``2 ** blocks`` steps.
        width: Channels of the first convolution.
        kernel_size: Steps that a convolution sees, an odd number.
        blocks: Convolutions.
        head_bias: Whether the head has a bias.
        num_features: d; None for the means.

    Raises:
        ConfigError: If the input is not a window, too short, or its channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        input_shape: Sequence[int],
        width: int = 16,
        kernel_size: int = 5,
        blocks: int = 3,
        head_bias: bool = True,
        num_features: int | None = None,
    ) -> None:
        shape = tuple(input_shape)
        check_range("WindowCNN.width", width, least=1)
        check_range("WindowCNN.blocks", blocks, least=1, most=_MOST_BLOCKS)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ConfigError(f"WindowCNN.kernel_size is {kernel_size}; it must be odd, such as 5")
        if len(shape) != 2 or shape[0] != in_channels or shape[0] < 1 or shape[1] < 2**blocks:
            raise ConfigError(
                f"WindowCNN.input_shape is {shape}; it must be (channels, steps) with in_channels = {in_channels} and "
                f"at least {2**blocks} steps for {blocks} blocks"
            )
        channels = [in_channels, *(width * 2**block for block in range(blocks))]
        super().__init__(channels[-1] if num_features is None else num_features, num_classes, head_bias)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv1d(before, after, kernel_size, padding=kernel_size // 2), nn.ReLU(), nn.MaxPool1d(2)]
        layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten(), *projection(channels[-1], num_features)]
        self.body = nn.Sequential(*layers)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, in_channels, steps) to (B, d)."""
        flat: Tensor = self.body(x)
        return flat


class MLP(ClassificationNetwork):
    """Fully connected hidden layers with ReLU on the flattened input, then a linear head.

    Args:
        num_classes: Length of the output.
        in_channels: First entry of an input shape (channels, height, width).
        input_shape: Shape of one example, of any number of dimensions.
        hidden: Widths of the hidden layers; the last one is the feature length d.
        head_bias: Whether the head has a bias.
        batch_norm: Normalise each layer before its ReLU by the statistics of the current batch, also in eval mode, as
            `MobileNet` does with its ``batch_stats``; there are no buffers, and a batch needs at least two examples.

    Raises:
        ConfigError: If a layer has no units or the input's channels are not `in_channels`.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        input_shape: Sequence[int],
        hidden: Sequence[int] = (64,),
        head_bias: bool = True,
        batch_norm: bool = False,
    ) -> None:
        widths = [_flat_size(type(self).__name__, in_channels, input_shape), *hidden]
        if min(widths) < 1:
            raise ConfigError(f"{type(self).__name__}.hidden is {tuple(hidden)}; it must hold widths of at least 1")
        super().__init__(widths[-1], num_classes, head_bias)
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise(widths):
            norm = [nn.BatchNorm1d(width_out, track_running_stats=False)] if batch_norm else []
            layers += [nn.Linear(width_in, width_out), *norm, nn.ReLU()]
        self.body = nn.Sequential(*layers)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""
        flat: Tensor = self.body(x)
        return flat


class Logistic(ClassificationNetwork):
    """Multinomial logistic regression: the features are the flattened input.

    Args:
        num_classes: Length of the output.
        in_channels: First entry of an input shape (channels, height, width).
        input_shape: Shape of one example, of any number of dimensions.
        head_bias: Whether the head has a bias.

    Raises:
        ConfigError: If the input's channels are not `in_channels`.
    """

    def __init__(self, num_classes: int, in_channels: int, input_shape: Sequence[int], head_bias: bool = True) -> None:
        super().__init__(_flat_size(type(self).__name__, in_channels, input_shape), num_classes, head_bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features of a batch: (B, *input_shape) to (B, d)."""
        return x.flatten(1)


def projection(size: int, num_features: int | None) -> list[nn.Module]:
    """The layers from a flat map to features of a given length; empty for None."""
    return [] if num_features is None else [nn.Linear(size, num_features), nn.ReLU()]


def _flat_size(network: str, in_channels: int, input_shape: Sequence[int]) -> int:
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise ConfigError(f"{network}.input_shape is {shape}; it must be the shape of one example")
    if len(shape) == 3 and shape[0] != in_channels:  # only an image's first dimension is its channels
        raise ConfigError(f"{network}.in_channels is {in_channels}; it must be {shape[0]}, as in input_shape {shape}")
    return math.prod(shape)
