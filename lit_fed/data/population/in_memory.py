"""Data that fit into memory: tensors on the device, batched there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_fed.data.loaders.image_files import ImageFiles, collate_images
from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.data.loaders.transforms import (
    WIDE,
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
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.figures import check_channels, figures_instead_of
from lit_fed.data.population.files import NewInputs, image_files, is_arrays, read_x
from lit_fed.data.population.hooks import SUBSETS, Batches, Subset
from lit_fed.data.population.targets import check_finite, checked_targets, native, remark_merged
from lit_fed.data.population.views import viewed
from lit_fed.errors import ConfigError


class Arrays(Parts):
    """A data set as arrays, see `Part`.

    Args:
        x_train: Inputs.
        y_train: Classes or numerical targets.
        x_test: Test inputs.
        y_test: Their classes or targets.
        client_train: The data set's own client of each training sample.
        client_test: The data set's own client of each test sample.
        source: The arrays' origin, for errors.
        strata_train: Of numerical targets, the strata that partitions such as `Dirichlet` cut by.
        strata_test: Strata of the test samples.
    """

    def __init__(
        self,
        x_train: NDArray[Any],
        y_train: NDArray[Any],
        x_test: NDArray[Any],
        y_test: NDArray[Any],
        client_train: IntArray | None = None,
        client_test: IntArray | None = None,
        source: str = "the data set",
        strata_train: IntArray | None = None,
        strata_test: IntArray | None = None,
    ) -> None:
        train = Part(x_train, y_train, client_train, strata_train)
        super().__init__(train, Part(x_test, y_test, client_test, strata_test), source=source)


class TensorDataModule(FederatedDataModule):
    """A data set in memory, one tensor for training and one for testing.

    To bring your own, implement `load_arrays` and `input_shape`, and give `num_classes` for classes or `output_shape`
    for k numbers per sample; override `normalization` if the model should not see the stored values, and `augmentation`
    for random transforms.

    Args:
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._x: dict[Subset, Tensor] = {}
        self._y: dict[Subset, Tensor] = {}
        self._kept_rows: dict[Subset, IntArray] = {}  # the samples still here, if some were freed
        self._public: tuple[Tensor, Tensor] | None = None  # inputs and their positions
        self._transforms: tuple[RandomTransform | None, Callable[[Tensor], Tensor] | None] | None = None
        self._device = torch.device("cpu")

    @abstractmethod
    def load_arrays(self) -> Parts:
        """Read the data set; called once."""

    def normalization(self) -> Callable[[Tensor], Tensor] | None:
        """Map a batch of stored values to the model's inputs; None for the identity."""
        return None

    def augmentation(self) -> RandomTransform | None:
        """Random transform of training batches of stored values; None for none."""
        return None

    @override
    def preprocessing(self) -> list[Step] | None:
        """The steps of `normalization`; None if it is custom code."""
        normalization = self._pipeline[1]
        return [] if normalization is None else getattr(normalization, "steps", None)

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str] | None:
        """Like the arrays' inputs, or like the outputs of a custom `normalization`."""
        x = next((x for x in self._x.values() if len(x)), None)
        if x is None:
            return None
        normalization = self._pipeline[1]
        if normalization is not None and self.preprocessing() is None:
            x = normalization(x[:1])
        return tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")

    @override
    def read_parts(self) -> Parts:
        parts = Parts.cast(self.load_arrays(), f"load_arrays of {type(self).__name__}", "lit_fed.data.Arrays")
        source = parts.source
        for name, part in (("train", parts.train), ("test", parts.test)):
            if np.ndim(part.x) == 0 or np.ndim(part.y) == 0:
                raise ConfigError(f"{source}: {name} samples or labels are a single number; give one each")
            if len(part.x) != len(part):
                raise ConfigError(f"{source}: {len(part.x)} {name} samples but {len(part)} labels; give one each")
        if self.num_classes is not None:
            if parts.train.strata is not None or parts.test.strata is not None:
                raise ConfigError(f"{source}: strata and classes exclude each other; leave out the strata")
            parts = parts.checked(self.num_classes)
        else:
            named = (("training", parts.train), ("test", parts.test))
            shape = self.output_shape
            train, test = (
                replace(part, y=checked_targets(part.y, shape, f"{name} targets of {source}")) for name, part in named
            )
            parts = Parts(train, test, source=source)
        self.hold(parts)
        return parts

    def hold(self, parts: Parts) -> None:
        """Keep arrays as tensors, with all bits of numbers; classes are int64.

        Raises:
            ConfigError: An input is not a finite number.
        """
        for subset, name, part in zip(SUBSETS, ("training", "test"), (parts.train, parts.test), strict=True):
            y = part.y if self.num_classes is None else part.strata
            may_be_missing = self.keeps_missing or self.fills_missing
            self._x[subset] = _inputs(part.x, f"{name} inputs of {parts.source}", self._device, may_be_missing)
            self._y[subset] = _tensor(np.asarray(y), self._device)
        x, y, normalize = self._x["train"], self._y["train"], self._pipeline[1]
        if not self.keeps_missing and normalize is not None and x.dtype in WIDE and x.ndim > 1:
            remark_merged(x, normalize, getattr(self, "feature_names", ()), parts.source)
        if not self.keeps_missing and y.dtype == torch.float64 and len(y):
            remark_merged(y.view(len(y), -1), Tensor.float, getattr(self, "target_names", ()), parts.source)

    def stored(self, subset: Subset, indices: IntArray) -> tuple[NDArray[Any], NDArray[Any]]:
        """Stored inputs and targets of samples (n,) of a subset."""
        chosen = self._positions(subset, indices)
        x, y = (tensors[subset].index_select(0, chosen).cpu().numpy() for tensors in (self._x, self._y))
        return x, y

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All targets and all stored inputs."""
        for tensors in (self._y, self._x):
            for subset in ("train", "test"):
                yield tensors[subset].cpu().numpy()

    @override
    def keep(self, train: IntArray, test: IntArray) -> None:
        for subset, rows in zip(SUBSETS, (train, test), strict=True):
            if len(rows) < len(self._x[subset]):
                chosen = torch.from_numpy(rows).to(self._device)
                self._x[subset] = self._x[subset].index_select(0, chosen)
                self._y[subset] = self._y[subset].index_select(0, chosen)
                self._kept_rows[subset] = rows

    @override
    def target_values(self, indices: IntArray) -> NDArray[Any] | None:
        if self.num_classes is not None:
            return None
        values: NDArray[Any] = self._y["train"].index_select(0, self._positions("train", indices)).cpu().numpy()
        return values

    @override
    def move_to(self, device: torch.device) -> None:
        self._device = torch.device(device)
        self._x = {subset: x.to(device) for subset, x in self._x.items()}
        self._y = {subset: y.to(device) for subset, y in self._y.items()}
        self._public = None

    @override
    def make_loader(self, batches: Batches) -> TensorLoader:
        subset, training = batches.subset, batches.training
        augmentation, normalize = self._pipeline
        return TensorLoader(
            self._x[subset],
            self._y[subset],
            torch.from_numpy(self._stored(subset, batches.indices)),
            batches.batch_size,
            batches.generator,
            augmentation if training else None,
            normalize,
            training and self.drop_last,
            math.prod(self.input_shape),
            training and self.fresh_batches,
        )

    @override
    def cohort_loader(self, client_ids: Sequence[int]) -> tuple[TensorLoader, IntArray] | None:
        """As of the base class; None where a subclass makes its own loaders, or views differ."""
        own, given = type(self), TensorDataModule
        hooks = ("make_loader", "train_loader", "view", "seen")
        alike = all(getattr(own, hook) is getattr(given, hook) for hook in hooks)
        if not alike or self.skew is not None or self.fresh_batches:
            return None
        for client_id in client_ids if self._ready.clients is not None else ():
            self._ready.of_client(client_id)
        indices, counts = self._ready.train.of_all(client_ids)
        return self.make_loader(Batches("train", indices, self.batch_size, training=True)), counts

    @override
    def make_stored_loader(self, batches: Batches) -> TensorLoader:
        subset = batches.subset
        rows = torch.from_numpy(self._stored(subset, batches.indices))
        return TensorLoader(self._x[subset], self._y[subset], rows, batches.batch_size, collated=True)

    @override
    def make_public_loader(self, batches: Batches) -> TensorLoader:
        """The loader has a copy of the inputs, and no labels."""
        count = len(batches.indices)
        if self._public is None:
            chosen = self._positions("train", batches.indices)
            self._public = (self._x["train"].index_select(0, chosen), torch.arange(count, device=self._device))
        return TensorLoader(
            *self._public,
            torch.arange(count),
            batches.batch_size,
            batches.generator,
            normalize=self._pipeline[1],
            values_per_sample=math.prod(self.input_shape),
        )

    def pixels(self, images: Tensor) -> Tensor | None:
        """Images of bytes, (n, channels, H, W), as stored inputs; None if inputs are not images."""
        del images
        return None

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Arrays ``x`` of stored inputs, or images of any size."""
        stored = next(x for x in self._x.values() if len(x))
        shape, files = tuple(stored.shape[1:]), None
        if is_arrays(path):
            x = torch.from_numpy(read_x(path, shape, stored[:0].cpu().numpy().dtype))
        else:
            paths = image_files(path)
            x, files = self._decoded(paths, shape, stored.dtype), [str(file) for file in paths]
        return NewInputs(viewed(self._loader_of(x, torch.zeros(len(x))), lambda batch: batch[0]), files)

    def _loader_of(self, x: Tensor, y: Tensor) -> TensorLoader:
        """A loader over all rows, batched as in a test."""
        size, values = self.test_batch_size, math.prod(self.input_shape)
        x, y = x.to(self._device), y.to(self._device)
        return TensorLoader(x, y, torch.arange(len(x)), size, normalize=self._pipeline[1], values_per_sample=values)

    def _decoded(self, paths: Sequence[Path], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Images in files as stored inputs."""
        pixels = None
        if len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]:
            images = ImageFiles(paths, shape[1], shape[0] == 1)
            pixels = self.pixels(collate_images([images[index] for index in range(len(paths))]))
        if pixels is None:
            raise ConfigError(f"{type(self).__name__} reads no images from files; name an .npz file with --inputs")
        return pixels.to(dtype) if dtype.is_floating_point else pixels.round().to(dtype)

    def _stored(self, subset: Subset, indices: IntArray) -> IntArray:
        """Rows of samples in the tensors."""
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
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        image_size: Pixels per side to scale images to, on the device; null keeps their size.
        mean: Per channel, of values scaled to [0, 1].
        std: Per channel.
        max_value: Stored value that stands for 1.
        normalize: File of ``lit-fed statistics``, whose means and standard deviations take the place of `mean` and
            `std`.
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
        normalize: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._figures = figures_instead_of(normalize, mean, std)
        if self._figures is not None:
            mean, std = self._figures.of_inputs()
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._mean_std = (tuple(mean or (0.0,)), tuple(std or (1.0,)))
        self._max_value, self._mean_given = max_value, mean is not None
        Normalize(*self._mean_std, max_value)  # checks them
        self._resize = None if image_size is None else Resize(image_size)

    @property
    @abstractmethod
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one stored input: (channels, height, width)."""

    @property
    def max_value(self) -> float:
        """Stored value that stands for 1."""
        return self._max_value

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        shape = self.stored_shape
        return shape if self._resize is None else (shape[0], self._resize.size, self._resize.size)

    @override
    def pixels(self, images: Tensor) -> Tensor:
        return images if self.max_value == 255 else images.float() * (self.max_value / 255)

    @override
    def augmentation(self) -> RandomTransform | None:
        return self._augmentation

    def check_images(self, shape: Sequence[int], what: str) -> None:
        """Refuse settings of images for inputs of another shape."""
        if len(shape) != 3 and (self._augmentation is not None or self._resize is not None):
            raise ConfigError(f"{what}; leave out data.crop_padding, data.horizontal_flip and data.image_size")

    @override
    def normalization(self) -> Callable[[Tensor], Tensor]:
        """Normalise, then resize."""
        normalize, resize = Normalize(*self._mean_std, self.max_value), self._resize
        check_channels(self._figures, normalize.num_channels, self.stored_shape[0])
        if resize is None:
            return normalize
        return InTurn(normalize, resize)


def image_augmentation(crop_padding: int, horizontal_flip: bool) -> Augmentation | None:
    """A crop, then a flip, as the settings ask; None for neither."""
    transforms: list[RandomTransform] = []
    if crop_padding:
        transforms.append(RandomCrop(crop_padding))
    if horizontal_flip:
        transforms.append(RandomHorizontalFlip())
    return Augmentation(transforms) if transforms else None


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """(n, H, W) to (n, 1, H, W) and (n, H, W, C) to (n, C, H, W)."""
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _inputs(array: NDArray[Any], what: str, device: torch.device, keeps_missing: bool) -> Tensor:
    tensor = _tensor(native(np.asarray(array), what), device)
    if not keeps_missing:
        check_finite(tensor, what)
    return tensor


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
