"""Data that fit into memory: one tensor, on the device, cut into batches there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.data.base import FederatedDataModule, Population, Split
from lit_fed.data.csr import IntArray
from lit_fed.data.tensor_loader import TensorLoader
from lit_fed.data.transforms import (
    Augmentation,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomTransform,
    Resize,
)
from lit_fed.errors import ConfigError


@dataclass(frozen=True)
class Arrays:
    """A data set as arrays.

    Args:
        x_train: Inputs in the model's layout, shape (n, *input_shape before any resizing), uint8, integer or floating.
        y_train: Their classes, shape (n,).
        x_test: Inputs, shape (m, …).
        y_test: Their classes, shape (m,).
        client_train: The data set's own client of each training sample, counted from 0, shape (n,).
        client_test: The same for the test samples.
        source: Where the arrays are from, for error messages.
    """

    x_train: NDArray[Any]
    y_train: IntArray
    x_test: NDArray[Any]
    y_test: IntArray
    client_train: IntArray | None = None
    client_test: IntArray | None = None
    source: str = "the data set"


class TensorDataModule(FederatedDataModule):
    """A data set that is kept in memory as one tensor per split.

    To bring your own, implement `load_arrays`, `num_classes` and `input_shape`; override `normalization` where the
    stored values are not what the model should see, and `augmentation` for random transforms.

    Args:
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._x: dict[Split, Tensor] = {}
        self._y: dict[Split, Tensor] = {}
        self._public: tuple[Tensor, Tensor] | None = None  # inputs and their positions
        self._transforms: tuple[RandomTransform | None, Callable[[Tensor], Tensor] | None] | None = None
        self._device = torch.device("cpu")

    @abstractmethod
    def load_arrays(self) -> Arrays:
        """Read the data set; called once."""

    def normalization(self) -> Callable[[Tensor], Tensor] | None:
        """What turns a batch of stored values into what the model sees; None leaves them as they are."""
        return None

    def augmentation(self) -> RandomTransform | None:
        """Random transform of training batches, applied to the stored values."""
        return None

    def population(self) -> Population:
        """See `FederatedDataModule.population`."""
        arrays = self.load_arrays()
        for split, x, y in (
            ("train", arrays.x_train, arrays.y_train),
            ("test", arrays.x_test, arrays.y_test),
        ):
            if len(x) != len(y):
                raise ConfigError(f"{arrays.source}: {len(x)} {split} samples but {len(y)} labels: they must match")
        self._x = {"train": _tensor(arrays.x_train, self._device), "test": _tensor(arrays.x_test, self._device)}
        labels = (np.asarray(arrays.y_train), np.asarray(arrays.y_test))
        self._y = {"train": _tensor(labels[0], self._device).long(), "test": _tensor(labels[1], self._device).long()}
        return Population(*labels, arrays.client_train, arrays.client_test, arrays.source)

    def move_to(self, device: torch.device) -> None:
        """Move the tensors to a device."""
        self._device = torch.device(device)
        self._x = {split: x.to(device) for split, x in self._x.items()}
        self._y = {split: y.to(device) for split, y in self._y.items()}
        self._public = None

    def make_loader(
        self,
        split: Split,
        indices: IntArray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        training: bool = False,
    ) -> TensorLoader:
        """See `FederatedDataModule.make_loader`."""
        augmentation, normalize = self._pipeline
        return TensorLoader(
            self._x[split],
            self._y[split],
            torch.from_numpy(indices),
            batch_size,
            generator,
            augmentation if training else None,
            normalize,
            training and self.drop_last,
            math.prod(self.input_shape),
        )

    def make_public_loader(
        self, indices: IntArray, *, batch_size: int, generator: torch.Generator | None
    ) -> TensorLoader:
        """See `FederatedDataModule.make_public_loader`; the loader holds a copy of the inputs, and no labels."""
        if self._public is None:
            chosen = torch.from_numpy(indices).to(self._device)
            positions = torch.arange(len(indices), device=self._device)
            self._public = (self._x["train"].index_select(0, chosen), positions)
        return TensorLoader(
            *self._public,
            torch.arange(len(indices)),
            batch_size,
            generator,
            None,
            self._pipeline[1],
            values_per_sample=math.prod(self.input_shape),
        )

    @property
    def _pipeline(self) -> tuple[RandomTransform | None, Callable[[Tensor], Tensor] | None]:
        if self._transforms is None:
            self._transforms = (self.augmentation(), self.normalization())
        return self._transforms


class ImageDataModule(TensorDataModule):
    """Images in memory, bytes or floating point, shape (n, channels, height, width).

    Args:
        crop_padding: Train on random crops after padding with so many zeros on every side; 0 for none.
        horizontal_flip: Train on randomly mirrored images.
        image_size: Scale images to this many pixels a side, on the device; none given keeps their size.
        mean: Per channel, of values scaled to [0, 1].
        std: Per channel.
        max_value: What stands for 1 in the stored images.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    def __init__(
        self,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_value: float = 255.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (mean is None) != (std is None):
            raise ConfigError("data.mean and data.std belong together: give both or neither")
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._mean_std = (tuple(mean or (0.0,)), tuple(std or (1.0,)))
        self._max_value = max_value
        Normalize(*self._mean_std, max_value)  # says at once what is wrong with them
        self._resize = None if image_size is None else Resize(image_size)

    @property
    @abstractmethod
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one input as it is stored: (channels, height, width)."""

    @property
    def max_value(self) -> float:
        """What stands for 1 in the stored values."""
        return self._max_value

    @property
    def input_shape(self) -> tuple[int, ...]:
        """See `FederatedDataModule.input_shape`."""
        shape = self.stored_shape
        return shape if self._resize is None else (shape[0], self._resize.size, self._resize.size)

    def augmentation(self) -> RandomTransform | None:
        """Crops and mirrors, as the settings say."""
        return self._augmentation

    def normalization(self) -> Callable[[Tensor], Tensor]:
        """Normalise, then resize."""
        normalize, resize = Normalize(*self._mean_std, self.max_value), self._resize
        channels = self.stored_shape[0]
        if normalize.num_channels not in (1, channels):
            raise ConfigError(
                f"data.mean has {normalize.num_channels} values, but inputs have {channels} channels: "
                "give one value, or one per channel"
            )
        if resize is None:
            return normalize
        return lambda batch: resize(normalize(batch))


def image_augmentation(crop_padding: int, horizontal_flip: bool) -> Augmentation | None:
    """The random transforms that two settings stand for."""
    transforms: list[RandomTransform] = []
    if crop_padding:
        transforms.append(RandomCrop(crop_padding))
    if horizontal_flip:
        transforms.append(RandomHorizontalFlip())
    return Augmentation(transforms) if transforms else None


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """(n, H, W) to (n, 1, H, W) and (n, H, W, C) to (n, C, H, W)."""
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
