"""Preprocessing and batched image transforms on the data's device: one operation per batch.

Preprocessing travels with the network: a checkpoint holds its *steps*, mappings of primitives from `Normalize` and
`Resize`; `rebuild` makes a module of them that needs neither the data nor their files, and works with ``torch.export``.
Random transforms separate `draw`, which takes a whole epoch's numbers from a CPU generator, from `apply`. The numbers
move to the device once per epoch, so that no step waits for the host, and pictures are the same on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError


def rebuild(steps: Sequence[Step]) -> nn.Sequential:
    """Steps as one module; no steps are the identity.

    Raises:
        TypeError: A step is unknown or malformed; also KeyError, ValueError and ConfigError.
    """
    kinds: dict[str, type[nn.Module]] = {"normalize": Normalize, "resize": Resize, "encode": Encode}
    modules = list[nn.Module]()
    for step in steps:
        if step["step"] not in kinds:
            raise ValueError(f"unknown step {step['step']!r}")
        modules.append(kinds[step["step"]](**{key: value for key, value in step.items() if key != "step"}))
    return nn.Sequential(*modules)


WIDE = (torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64)
_FAR = 2.0**8  # standard deviations from 0 to the mean, of which float32's 24 bits leave 16 for the values

Step = dict[str, Any]
"""A deterministic transform and its settings in primitives, as kept in checkpoints."""


class RandomTransform(Checked, ABC):
    """A random change of a batch of images, shape and dtype preserved."""

    num_draws: int
    """Random integers per image."""

    @abstractmethod
    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """Draw the integers of some images, int64 of shape (num_draws, num_images), from a CPU generator."""

    @abstractmethod
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform images (B, C, H, W) of any dtype by the drawn integers (num_draws, B), on their device."""


class RandomCrop(RandomTransform):
    """Pad with zeros on all sides and cut out a random window of the original size.

    Args:
        padding: Pixels on each side; offsets are uniform on 0 … 2·padding in each direction.
    """

    num_draws = 2

    def __init__(self, padding: int = 4) -> None:
        check_range("RandomCrop.padding", padding, least=0, why=" pixels")
        self.padding = padding

    @override
    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """Offsets from the top and from the left, shape (2, num_images)."""
        return torch.randint(2 * self.padding + 1, (2, num_images), generator=generator)

    @override
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        return crop_and_flip(images, self.padding, draws[0], draws[1], None)


class RandomHorizontalFlip(RandomTransform):
    """Mirror left and right with probability one half."""

    num_draws = 1

    @override
    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """1 to mirror the image, else 0, shape (1, num_images)."""
        return torch.randint(2, (1, num_images), generator=generator)

    @override
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        zero = torch.zeros_like(draws[0])
        return crop_and_flip(images, 0, zero, zero, draws[0])


class Augmentation(RandomTransform):
    """A sequence of random transforms; a crop followed by a flip takes one pass.

    Args:
        transforms: The transforms, in order.
    """

    def __init__(self, transforms: Sequence[RandomTransform]) -> None:
        self.transforms = tuple(transforms)
        self.num_draws = sum(transform.num_draws for transform in self.transforms)

    @override
    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """The draws of all transforms, stacked, shape (num_draws, num_images)."""
        return torch.cat([transform.draw(num_images, generator) for transform in self.transforms])

    @override
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        match self.transforms:
            case (RandomCrop() as crop, RandomHorizontalFlip()):
                return crop_and_flip(images, crop.padding, draws[0], draws[1], draws[2])
        start = 0
        for transform in self.transforms:
            images = transform.apply(images, draws[start : start + transform.num_draws])
            start += transform.num_draws
        return images


class Normalize(nn.Module):
    """Values to [0, 1] by dividing by `max_value`, then (value − mean)/std per channel; the result is float32.

    Values of more than 24 bits are shifted and scaled in float64, and so are all values where float32 could lose more
    than 2⁻¹⁶ of a standard deviation: 1e9 + 1 and 1e9 stay apart.

    Args:
        mean: Per channel, or one number for all.
        std: Per channel, or one number for all, above 0.
        max_value: Stored value that stands for 1: 255 for bytes, 1 for values in use as they are.
    """

    scale: Tensor

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), max_value: float = 255.0) -> None:
        super().__init__()
        if any(not value > 0 for value in std):
            raise ConfigError(f"Normalize.std is {list(std)}; every value must be above 0")
        if len(mean) != len(std):
            raise ConfigError(f"Normalize.mean has {len(mean)} values and std has {len(std)}; give equally many")
        check_range("Normalize.max_value", max_value, above=0)
        self.num_channels = len(mean)
        self.steps: list[Step] = [{"step": "normalize", "mean": [*mean], "std": [*std], "max_value": max_value}]
        # On the CPU also while a network is made without values.
        wide_mean, wide_std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (mean, std))
        self._identity = max_value == 1.0 and set(mean) == {0.0} and set(std) == {1.0}
        wide = {"factor": 1.0 / (wide_std * max_value), "centre": wide_mean * max_value}
        narrow = {"scale": wide["factor"].float(), "shift": (-wide_mean / wide_std).float()}
        for name, constant in (narrow | wide).items():
            self.register_buffer(name, constant)
        self._is_far = any(abs(one) > _FAR * by for one, by in zip(mean, std, strict=True))

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Whether values of a type are shifted and scaled in float64."""
        return dtype in WIDE or self._is_far

    @override
    def forward(self, batch: Tensor) -> Tensor:
        """(B, C, …), uint8 or floating point, to float32 of the same shape."""
        if self._identity:
            return batch.float()
        if self.scale.device != batch.device:
            self.to(batch.device)
        names = ("factor", "centre") if self.is_wide(batch.dtype) else ("scale", "shift")
        shape = (-1,) + (1,) * (batch.dim() - 2)
        return scale_and_shift(batch, *(self.get_buffer(name).reshape(shape) for name in names))


class Resize(nn.Module):
    """Scale images to a square of another size, bilinear with antialiasing.

    Args:
        size: Pixels per side.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        check_range("Resize.size", size, least=1, why=" pixels")
        self.size = size
        self.steps: list[Step] = [{"step": "resize", "size": size}]

    @override
    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) floating point to (B, C, size, size)."""
        if images.shape[-2:] == (self.size, self.size):
            return images
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)


class Encode(nn.Module):
    """A table's rows as inputs: the numbers in their order, then in the columns' order indicators and categories.

    A number with a `fill` has an indicator: 1 where it is missing (NaN), else 0. A category's cell is the position of
    its level, or any other number; its inputs are 1 or 0 for each level and, last, for everything else.

    Args:
        features: Names of the stored columns, in order.
        fill: By feature, the number in place of a missing one; null keeps NaN.
        levels: By feature, the levels of a category; null of a number.
    """

    def __init__(
        self, features: Sequence[str], fill: Sequence[float | None], levels: Sequence[Sequence[str] | None]
    ) -> None:
        super().__init__()
        self.steps: list[Step] = [{"step": "encode", "features": features, "fill": fill, "levels": levels}]
        self._columns = list(zip(fill, levels, strict=True))
        marks = (fill is not None if names is None else len(names) + 1 for fill, names in self._columns)
        self.width = sum(names is None for names in levels) + sum(marks)

    @override
    def forward(self, batch: Tensor) -> Tensor:
        """(B, features), floating point, to float64 of shape (B, width)."""
        numbers, marks = list[Tensor](), list[Tensor]()
        for column, (fill, names) in zip(batch.double().split(1, dim=1), self._columns, strict=True):
            if names is not None:
                is_level = column == torch.arange(len(names), device=batch.device)
                marks += [is_level, ~is_level.any(dim=1, keepdim=True)]
                continue
            numbers.append(column if fill is None else column.masked_fill(column.isnan(), fill))
            marks += [] if fill is None else [column.isnan()]
        return torch.cat([*numbers, *(mark.double() for mark in marks)], dim=1)


class InTurn(nn.Sequential):
    """A sequence of deterministic transforms.

    Args:
        transforms: The transforms, in order, each with its ``steps``.
    """

    def __init__(self, *transforms: Normalize | Resize | Encode) -> None:
        super().__init__(*transforms)
        self.steps = [step for transform in transforms for step in transform.steps]


def scale_and_shift(batch: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A batch times one tensor plus another, in float32; or less a tensor of float64, then times the other.

    The batch is unchanged, and the result is float32.
    """
    if scale.dtype == torch.float64:
        return (batch.double() - shift).mul_(scale).float()
    if batch.dtype == torch.float32:  # float() would not copy
        return torch.addcmul(shift, batch, scale)
    return batch.float().mul_(scale).add_(shift)


def crop_and_flip(images: Tensor, padding: int, top: Tensor, left: Tensor, flip: Tensor | None) -> Tensor:
    """Shift every image by its own offsets within a border of zeros, then mirror some images.

    A single index_select over a strided view of a flat buffer copies the windows row by row; a mirrored window is a
    window of the mirrored image. On a CPU this is about four times as fast as gathering pixels.

    Args:
        images: (B, C, H, W).
        padding: Zeros on every side, in pixels.
        top: Window offsets from the top of the padded image, 0 … 2·padding, int64, shape (B,).
        left: Window offsets from its left, shape (B,).
        flip: Not 0 to mirror the window left-right, shape (B,); None mirrors none.

    Returns:
        (B, C, H, W).
    """
    batch, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4) if padding else images.contiguous()
    tall, wide = height + 2 * padding, width + 2 * padding
    if flip is not None:
        padded = torch.cat([padded, padded.flip(3)])
        left = torch.where(flip != 0, batch * channels * tall * wide + 2 * padding - left, left)
    every = torch.arange(batch, device=images.device) * (channels * tall * wide)
    planes = torch.arange(channels, device=images.device) * (tall * wide)
    rows = torch.arange(height, device=images.device) * wide
    starts = (every + top * wide + left).view(-1, 1, 1) + planes.view(-1, 1) + rows
    windows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, starts.flatten()).view(images.shape)
