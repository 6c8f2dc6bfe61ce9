"""Data that fit into memory: one tensor, on the device, cut into batches there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.data.loaders.image_files import collate_images
from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.data.loaders.transforms import (
    Augmentation,
    InTurn,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomTransform,
    Resize,
    Step,
)
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Strata
from lit_fed.data.population.base import FederatedDataModule, Subset
from lit_fed.data.population.new_inputs import Images, NewInputs, image_files, is_arrays, read_x
from lit_fed.data.population.targets import check_finite, checked_targets, native
from lit_fed.data.population.views import viewed
from lit_fed.errors import ConfigError


@dataclass(frozen=True)
class Arrays:
    """A data set as arrays.

    Args:
        x_train: Inputs in the model's layout, shape (n, *input_shape before any resizing), uint8, integer or floating.
        y_train: Their classes, integers of shape (n,), or targets, floating-point numbers of shape (n,) or (n, k).
        x_test: Inputs, shape (m, …).
        y_test: The same of the test samples.
        client_train: The data set's own client of each training sample, counted from 0, shape (n,).
        client_test: The same for the test samples.
        source: Where the arrays are from, for error messages.
        strata_train: Where targets are no classes: what partitions such as `Dirichlet` cut by, counted from 0, shape
            (n,); `quantile_strata` makes them of targets.
        strata_test: The same for the test samples, shape (m,).
    """

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    client_train: IntArray | None = None
    client_test: IntArray | None = None
    source: str = "the data set"
    strata_train: IntArray | None = None
    strata_test: IntArray | None = None


class TensorDataModule(FederatedDataModule):
    """A data set that is kept in memory as one tensor per part, training and test.

    To bring your own, implement `load_arrays` and `input_shape`, and give `num_classes` where targets are classes, or
    `output_shape` where they are k numbers per sample; override `normalization` where the stored values are not what
    the model should see, and `augmentation` for random transforms.

    Args:
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._x: dict[Subset, Tensor] = {}
        self._y: dict[Subset, Tensor] = {}
        self._kept_rows: dict[Subset, IntArray] = {}  # the samples that were kept, where not all were
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

    def preprocessing(self) -> list[Step] | None:
        """The steps of `normalization`: none where it is None, unknown where it is code of its own."""
        normalization = self._pipeline[1]
        return [] if normalization is None else getattr(normalization, "steps", None)

    def stored_like(self) -> tuple[tuple[int, ...], str] | None:
        """See `DescribedPopulation.stored_like`: what the arrays hold, or what code of its own makes of that."""
        x = next((x for x in self._x.values() if len(x)), None)
        if x is None:
            return None
        normalization = self._pipeline[1]
        if normalization is not None and self.preprocessing() is None:
            x = normalization(x[:1])
        return tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")

    def read_strata(self) -> Strata:
        """See `FederatedDataModule.read_strata`."""
        arrays = self.load_arrays()
        for subset, x, y in (
            ("train", arrays.x_train, arrays.y_train),
            ("test", arrays.x_test, arrays.y_test),
        ):
            if np.ndim(x) == 0 or np.ndim(y) == 0:
                raise ConfigError(f"{arrays.source}: {subset} samples or labels are a single number: give one each")
            if len(x) != len(y):
                raise ConfigError(f"{arrays.source}: {len(x)} {subset} samples but {len(y)} labels: they must match")
        sizes, clients = (len(arrays.y_train), len(arrays.y_test)), (arrays.client_train, arrays.client_test)
        if self.num_classes is None:
            shape = self.output_shape
            train = checked_targets(arrays.y_train, shape, f"training targets of {arrays.source}")
            test = checked_targets(arrays.y_test, shape, f"test targets of {arrays.source}")
            self.hold(replace(arrays, y_train=train, y_test=test))
            return Strata(arrays.strata_train, arrays.strata_test, *sizes, *clients, arrays.source)
        if arrays.strata_train is not None or arrays.strata_test is not None:
            raise ConfigError(f"{arrays.source}: strata are for targets that are no classes, leave them out")
        labels = Strata(arrays.y_train, arrays.y_test, *sizes, *clients, arrays.source).checked(self.num_classes)
        assert labels.train is not None
        assert labels.test is not None
        self.hold(replace(arrays, y_train=labels.train, y_test=labels.test))
        return labels

    def hold(self, arrays: Arrays) -> None:
        """Keep arrays as tensors.

        Args:
            arrays: With targets as they are to be: classes in int64, or float32.

        Raises:
            ConfigError: An input is no number, or not finite.
        """
        self._x = {
            "train": _inputs(arrays.x_train, f"training inputs of {arrays.source}", self._device),
            "test": _inputs(arrays.x_test, f"test inputs of {arrays.source}", self._device),
        }
        self._y = {"train": _tensor(arrays.y_train, self._device), "test": _tensor(arrays.y_test, self._device)}

    def stored(self, subset: Subset, indices: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        """Samples as they are stored, with their targets.

        Args:
            subset: Which part of the data set the indices count in.
            indices: The samples, shape (n,).
        """
        chosen = self._positions(subset, indices)
        x, y = (tensors[subset].index_select(0, chosen).cpu().numpy() for tensors in (self._x, self._y))
        return x, y

    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All targets and, as they are stored, all inputs; see `DescribedPopulation.read_contents`."""
        for tensors in (self._y, self._x):
            for subset in ("train", "test"):
                yield tensors[subset].cpu().numpy()

    def keep(self, train: IntArray, test: IntArray) -> None:
        """Forget all other samples, so that they take no memory."""
        kept: tuple[tuple[Subset, IntArray], ...] = (("train", train), ("test", test))
        for subset, rows in kept:
            if len(rows) < len(self._x[subset]):
                chosen = torch.from_numpy(rows).to(self._device)
                self._x[subset] = self._x[subset].index_select(0, chosen)
                self._y[subset] = self._y[subset].index_select(0, chosen)
                self._kept_rows[subset] = rows

    def target_values(self, indices: IntArray) -> NDArray[np.float32] | None:
        """See `DescribedPopulation.target_values`."""
        if self.num_classes is not None:
            return None
        values: NDArray[np.float32] = self._y["train"].index_select(0, self._positions("train", indices)).cpu().numpy()
        return values

    def move_to(self, device: torch.device) -> None:
        """Move the tensors to a device."""
        self._device = torch.device(device)
        self._x = {subset: x.to(device) for subset, x in self._x.items()}
        self._y = {subset: y.to(device) for subset, y in self._y.items()}
        self._public = None

    def make_loader(
        self,
        subset: Subset,
        indices: IntArray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        training: bool = False,
    ) -> TensorLoader:
        """See `FederatedDataModule.make_loader`."""
        augmentation, normalize = self._pipeline
        return TensorLoader(
            self._x[subset],
            self._y[subset],
            torch.from_numpy(self._stored(subset, indices)),
            batch_size,
            generator,
            augmentation if training else None,
            normalize,
            training and self.drop_last,
            math.prod(self.input_shape),
            training and self.fresh_batches,
        )

    def make_public_loader(
        self, indices: IntArray, *, batch_size: int, generator: torch.Generator | None
    ) -> TensorLoader:
        """See `FederatedDataModule.make_public_loader`; the loader holds a copy of the inputs, and no labels."""
        if self._public is None:
            chosen = self._positions("train", indices)
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

    def pixels(self, images: Tensor) -> Tensor | None:
        """Images of bytes, (n, channels, H, W), as they would be stored; None where inputs are no images."""
        del images
        return None

    def new_inputs(self, path: Path) -> NewInputs:
        """Arrays ``x`` as they are stored, or images of any size; see `FederatedDataModule.new_inputs`."""
        stored = next(x for x in self._x.values() if len(x))
        shape, files = tuple(stored.shape[1:]), None
        if is_arrays(path):
            x = torch.from_numpy(read_x(path, shape, stored[:0].cpu().numpy().dtype))
        else:
            paths = image_files(path)
            x, files = self._decoded(paths, shape, stored.dtype), [str(one) for one in paths]
        return NewInputs(viewed(self._loader_of(x, torch.zeros(len(x))), lambda batch: batch[0]), files)

    def _loader_of(self, x: Tensor, y: Tensor) -> TensorLoader:
        """All of some tensors, as what is tested on."""
        size, values = self.test_batch_size, math.prod(self.input_shape)
        x, y = x.to(self._device), y.to(self._device)
        return TensorLoader(x, y, torch.arange(len(x)), size, normalize=self._pipeline[1], values_per_sample=values)

    def _decoded(self, paths: Sequence[Path], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Images in files, as they would be stored.

        Raises:
            ConfigError: What is stored is no square image of 1 or 3 channels, or a file cannot be decoded.
        """
        found = None
        if len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]:
            images = Images(paths, shape[1], shape[0] == 1)
            found = self.pixels(collate_images([images[index] for index in range(len(paths))]))
        if found is None:
            raise ConfigError(f"{type(self).__name__} reads no images from files: name an .npz file with --inputs")
        return found.to(dtype) if dtype.is_floating_point else found.round().to(dtype)

    def _stored(self, subset: Subset, indices: IntArray) -> IntArray:
        """Where samples stand in the tensors."""
        rows = self._kept_rows.get(subset)
        return indices if rows is None else np.searchsorted(rows, indices)

    def _positions(self, subset: Subset, indices: IntArray) -> Tensor:
        return torch.from_numpy(self._stored(subset, indices)).to(self._device)

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

    def pixels(self, images: Tensor) -> Tensor:
        """Scaled so that white is `max_value`."""
        return images if self.max_value == 255 else images.float() * (self.max_value / 255)

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
        return InTurn(normalize, resize)


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


def _inputs(array: NDArray[Any], what: str, device: torch.device) -> Tensor:
    found = _tensor(native(np.asarray(array), what), device)
    check_finite(found, what)
    return found


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
