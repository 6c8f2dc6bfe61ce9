"""Generators of samples of a class from noise: features for a classifier, or images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError


class Generator(nn.Module):
    """Makes samples from noise and labels.

    Args:
        noise_size: Length of the noise.
        num_classes: Classes C; the input is the noise and a one-hot vector.

    Raises:
        ConfigError: For sizes below 1.
    """

    def __init__(self, noise_size: int, num_classes: int) -> None:
        super().__init__()
        self.noise_size = check_range(f"{type(self).__name__}.noise_size", noise_size, least=1)
        self.num_classes = check_range(f"{type(self).__name__}.num_classes", num_classes, least=1)

    def join(self, noise: Tensor, labels: Tensor) -> Tensor:
        """The input: noise (B, noise_size) and labels (B,) to (B, noise_size + C)."""
        return torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise.dtype)], dim=1)


class LatentGenerator(Generator):
    """Features of a class: a hidden layer with batch norm and ReLU, then a linear one.

    Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

    Args:
        num_features: Length d of the features.
        num_classes: Classes C.
        noise_size: Length of the noise.
        hidden: Units of the hidden layer.

    Raises:
        ConfigError: For sizes below 1.
    """

    def __init__(self, num_features: int, num_classes: int, noise_size: int = 32, hidden: int = 128) -> None:
        super().__init__(noise_size, num_classes)
        check_range("LatentGenerator.num_features", num_features, least=1)
        check_range("LatentGenerator.hidden", hidden, least=1)
        self.body = nn.Sequential(
            nn.Linear(noise_size + num_classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_features),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Features (B, d) from noise (B, noise_size) and labels (B,)."""
        made: Tensor = self.body(self.join(noise, labels))
        return made


class _Enlarge(nn.Module):
    """Resize maps to the nearest pixel, each channel as a separate image.

    On a CPU, `torch.nn.Upsample` of four channels or more copies maps to channels-last and back, which takes longer
    than resizing. Values and gradients are the same bits.

    Args:
        size: Height and width of the output.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, h, w) to (B, C, height, width)."""
        return F.interpolate(x.flatten(0, 1).unsqueeze(1), size=self.size).view(*x.shape[:2], *self.size)


class ImageGenerator(Generator):
    """Images of a class: a linear layer to a map of a quarter of the size, then two convolutions that each double it.

    Like the generator of DENSE (Zhang et al.: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022), which
    follows DCGAN. A batch norm without parameters ends it, as images come normalised.

    Args:
        input_shape: Channels, height and width of the images; height and width at least 4.
        num_classes: Classes C.
        noise_size: Length of the noise.
        width: Channels of the last hidden map; the first has ``2 * width``.

    Raises:
        ConfigError: For another shape, or sizes below 1.

    Note:
        For a side that is not a multiple of 4, the last doubling resizes the map to it. The label as input follows
        FedGen; DENSE's generator does not see the labels.
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int, noise_size: int = 64, width: int = 32) -> None:
        super().__init__(noise_size, num_classes)
        shape = tuple(input_shape)
        if len(shape) != 3 or min(shape[1:]) < 4 or shape[0] < 1:
            raise ConfigError(
                f"ImageGenerator.input_shape is {shape}; it must be (channels, height, width), at least 4×4; generate "
                "features for other data"
            )
        check_range("ImageGenerator.width", width, least=1)
        channels, height, breadth = shape
        self.first = nn.Sequential(
            nn.Linear(noise_size + num_classes, 2 * width * (height // 4) * (breadth // 4)),
            nn.Unflatten(1, (2 * width, height // 4, breadth // 4)),
            nn.BatchNorm2d(2 * width),
        )
        self.body = nn.Sequential(
            _Enlarge((height // 2, breadth // 2)),
            nn.Conv2d(2 * width, 2 * width, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            _Enlarge((height, breadth)),
            nn.Conv2d(2 * width, width, kernel_size=3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images (B, channels, height, width) from noise (B, noise_size) and labels (B,)."""
        made: Tensor = self.body(self.first(self.join(noise, labels)))
        return made
