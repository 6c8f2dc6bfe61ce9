"""Populations of a torch dataset, whose workers decode its files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.image_files import ImageFiles, collate_images
from lit_fed.data.loaders.tensor_loader import Loader, TensorLoader
from lit_fed.data.loaders.transforms import Normalize, Step
from lit_fed.data.loaders.worker_loader import Key, WorkerLoader, WorkerPool, loader_of_all
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.census import chosen_rows
from lit_fed.data.population.figures import check_channels, figures_instead_of
from lit_fed.data.population.files import NewInputs, image_files, is_arrays, read_x
from lit_fed.data.population.hooks import Batches
from lit_fed.data.population.in_memory import image_augmentation
from lit_fed.errors import ConfigError
from lit_fed.machine import most_threads
from lit_fed.seeding import derive_seed

_LOOKED_AT = 8  # samples of either part for the fingerprint


class Datasets(Parts):
    """Map-style data sets, and the strata and clients of their samples, see `Part`.

    A sample is (x, y) of tensors, numbers, or nested lists and dictionaries of them, as PyTorch's default collation
    takes them; without a public set it is anything that the collation takes.

    Args:
        train: Training samples, with their random transforms.
        train_labels: Their classes, counted from 0, shape (n,); in a regression other strata, or None.
        test: Test samples.
        test_labels: Their classes or strata, shape (m,).
        train_plain: The training samples without random transforms.
        train_clients: The data set's own client of each training sample.
        test_clients: The data set's own client of each test sample.
        source: The data's origin, for errors.
        val: A separate validation set.
        val_labels: Classes or strata of its samples.
        val_clients: The data set's own client of each of its samples.
    """

    def __init__(
        self,
        train: Dataset[Any],
        train_labels: IntArray | None,
        test: Dataset[Any],
        test_labels: IntArray | None,
        train_plain: Dataset[Any] | None = None,
        train_clients: IntArray | None = None,
        test_clients: IntArray | None = None,
        source: str = "the data set",
        val: Dataset[Any] | None = None,
        val_labels: IntArray | None = None,
        val_clients: IntArray | None = None,
    ) -> None:
        super().__init__(
            Part(train, None, train_clients, train_labels, train_plain),
            Part(test, None, test_clients, test_labels),
            None if val is None else Part(val, None, val_clients, val_labels),
            source,
        )


class DatasetModule(FederatedDataModule):
    """Any map-style ``torch.utils.data.Dataset``, cut into clients and prepared by shared worker processes.

    To bring your own, implement `build_datasets` and `input_shape`, and give `num_classes` for classes or
    `output_shape` for k numbers per sample::

        class Flowers(DatasetModule):
            num_classes = 102
            input_shape = (3, 224, 224)

            def build_datasets(self) -> Datasets:
                train = torchvision.datasets.Flowers102(self.root, "train", transform=...)
                test = torchvision.datasets.Flowers102(self.root, "test", transform=...)
                return Datasets(train, np.array(train._labels), test, np.array(test._labels))

    Transforms may draw from Python's, NumPy's or torch's global generators: every sample comes with a seed, so the
    result does not depend on `num_workers`.

    Args:
        num_workers: Processes that prepare samples for all clients; 0 prepares them in the training process.
        kwargs: The population's settings, see `FederatedDataModule`.
    """

    def __init__(self, num_workers: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("data.num_workers", num_workers, least=0, most=most_threads(), why=" on this machine")
        self.num_workers = num_workers
        self._datasets: dict[str, Dataset[Any]] = {}
        self._looked_at: dict[str, Part] = {}
        self._val_begins: int | None = None
        self._pools: dict[bool, WorkerPool] = {}
        self._tensors: dict[str, tuple[tuple[Tensor, ...], Tensor] | None] = {}
        self._device = torch.device("cpu")

    @abstractmethod
    def build_datasets(self) -> Parts:
        """Open the data set; called once."""

    def finish_batch(self, inputs: Any) -> Any:
        """Transform the inputs of a batch on the device, such as by normalising; deterministic."""
        return inputs

    def collate(self, training: bool) -> Callable[[list[Any]], Any] | None:
        """The workers' collate function for training or other batches; None for PyTorch's default."""
        del training
        return None

    def collates(self) -> dict[str, Callable[[list[Any]], Any] | None]:
        """The collate function of each part of the data set, by default of `collate`."""
        return {part: self.collate(part == "train") for part in self._datasets}

    def worker_options(self, training: bool) -> dict[str, Any]:
        """Arguments of `WorkerPool` about the processes for training, or for everything else."""
        del training
        return {"num_workers": self.num_workers}

    @override
    def read_parts(self) -> Parts:
        parts = Parts.cast(self.build_datasets(), f"build_datasets of {type(self).__name__}", "lit_fed.data.Datasets")
        plain = parts.train.x if parts.train.plain is None else parts.train.plain
        if parts.val is not None:
            self._val_begins = len(parts.train)
            plain = ConcatDataset([plain, parts.val.x])
        self._datasets = {"train": parts.train.x, "plain": plain, "val": plain, "test": parts.test.x}
        self._looked_at = {"plain": parts.train, "test": parts.test}
        return parts

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        """All classes or strata, and a few samples of either part; random and unreadable samples are left out."""
        yield from (part.strata for part in self._looked_at.values() if part.strata is not None)
        for name, part in self._looked_at.items():
            for index in np.arange(len(part))[chosen_rows(len(part), _LOOKED_AT)].tolist():
                once, again = (self._read(name, index) for _ in range(2))
                same = len(once) == len(again) and all(map(np.array_equal, once, again))
                yield from once if same else ()

    def _read(self, part: str, index: int) -> list[NDArray[Any]]:
        """The tensors of a sample, read by a worker, as a data set may hold open files."""
        key = Key(part, index, derive_seed(0, "sample", index), None)
        try:
            batches = list(self._pool(training=False).batches([[key]]))
        except Exception:  # raised again in training, which names the client
            return []
        return list(_arrays(batches))

    @override
    def move_to(self, device: torch.device) -> None:
        """Move batches to this device from now on."""
        self._device = torch.device(device)
        self._pools.clear()
        self._tensors.clear()

    @override
    def teardown(self, stage: str) -> None:
        """End the worker processes; another iteration starts new ones."""
        self._pools.clear()

    @override
    def make_loader(self, batches: Batches) -> Loader:
        training, begins = batches.training, self._val_begins
        part: str = "plain" if batches.subset == "train" and not training else batches.subset
        if part == "plain" and begins is not None and (batches.indices >= begins).all():
            part = "val"
        options: dict[str, Any] = {"drop_last": self.drop_last, "fresh": self.fresh_batches} if training else {}
        if part not in self._tensors:
            self._tensors[part] = self._in_memory(part)
        if (found := self._tensors[part]) is None:
            return self._worker_loader(batches, part, **options)
        (x, y), rows = found[0], found[1][torch.from_numpy(batches.indices)]
        return TensorLoader(x, y, rows, batches.batch_size, batches.generator, collated=True, **options)

    def _in_memory(self, part: str) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """The tensors (x, y) of a part that workers would only copy, and each sample's row (n,); None for others."""
        dataset: Any = self._datasets[part]
        rows = torch.arange(len(Part(dataset)))
        while type(dataset) is Subset:
            dataset, rows = dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.int64)[rows]
        workers = self.worker_options(part == "train")["num_workers"]
        as_stored = type(self).finish_batch is DatasetModule.finish_batch and not workers
        as_stored &= self.collates()[part] in (None, default_collate) and self._device.type == "cpu"
        if not as_stored or type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
            return None
        return dataset.tensors, rows

    @override
    def make_stored_loader(self, batches: Batches) -> WorkerLoader:
        part, indices, size = ("plain" if batches.subset == "train" else "test"), batches.indices, batches.batch_size
        return WorkerLoader(self._pool(training=False), part, indices, size, None, lambda inputs: inputs, self._device)

    @override
    def make_public_loader(self, batches: Batches) -> WorkerLoader:
        """Labels do not leave the workers."""
        return self._worker_loader(batches, "plain", unlabeled=True)

    def _worker_loader(self, batches: Batches, part: str, **kwargs: bool) -> WorkerLoader:
        pool, indices, size = self._pool(batches.training), batches.indices, batches.batch_size
        return WorkerLoader(pool, part, indices, size, batches.generator, self.finish_batch, self._device, **kwargs)

    def decode(self, paths: Sequence[Path]) -> Dataset[Any] | None:
        """Images in files as the data set's inputs, before `finish_batch`; None if its inputs are not images."""
        del paths
        return None

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        """Arrays ``x`` like the samples' inputs, or images of any size."""
        dataset: Any
        if is_arrays(path):
            sample = self._datasets["plain"][0]
            x = np.asarray(sample[0] if isinstance(sample, tuple | list) else sample)
            if x.dtype.kind not in "iuf":
                raise ConfigError(f"{path}: an input of {type(self).__name__} is not a single array; predict in Python")
            files, dataset = None, torch.from_numpy(read_x(path, x.shape, x.dtype))
        else:
            paths = image_files(path)
            decoded = self.decode(paths)
            if decoded is None:
                raise ConfigError(f"{type(self).__name__} reads no images from files; name an .npz file with --inputs")
            files, dataset = [str(file) for file in paths], decoded
        collate, size = None if files is None else collate_images, self.test_batch_size
        whole = loader_of_all(dataset, size, self.finish_batch, self._device, collate, num_workers=self.num_workers)
        return NewInputs(whole, files)

    def _pool(self, training: bool) -> WorkerPool:
        """The workers for training, or for everything else."""
        if training not in self._pools:
            pinned, options = self._device.type == "cuda", self.worker_options(training)
            self._pools[training] = WorkerPool(self._datasets, pin_memory=pinned, collates=self.collates(), **options)
        return self._pools[training]


def _arrays(value: Any) -> Iterator[NDArray[Any]]:
    """The tensors of a nested batch."""
    if isinstance(value, torch.Tensor):
        yield value.numpy()
    elif isinstance(value, Mapping | tuple | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(entry)


class DecodedImages(DatasetModule):
    """Image files of any size and type (`read_image`), resized by the workers and normalised on the device.

    Args:
        image_size: Pixels per side to resize images to.
        grayscale: Decode to one channel instead of three.
        crop_padding: Zeros padded on every side before a random crop of training images; 0 for no crop.
        horizontal_flip: Mirror training images at random.
        mean: Per channel, of pixels scaled to [0, 1].
        std: Per channel.
        normalize: File of ``lit-fed statistics``, whose means and standard deviations take the place of `mean` and
            `std`.
        kwargs: The population's settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.
    """

    def __init__(
        self,
        image_size: int = 32,
        grayscale: bool = False,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        normalize: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("data.image_size", image_size, least=1)
        self._figures = figures_instead_of(normalize, mean, std)
        if self._figures is not None:
            mean, std = self._figures.of_inputs()
        self.grayscale = grayscale
        self._side = image_size
        self._augmentation = image_augmentation(crop_padding, horizontal_flip)
        self._normalize = Normalize(mean or (0.0,), std or (1.0,))
        self.check_channels()

    def check_channels(self) -> None:
        """Refuse a `mean`, or the figures of `normalize`, that do not fit the inputs' channels."""
        check_channels(self._figures, self._normalize.num_channels, self.input_shape[0])

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(channels, image_size, image_size)."""
        return (1 if self.grayscale else 3, self._side, self._side)

    @override
    def collate(self, training: bool) -> Callable[[list[Any]], Any]:
        """Images of 8 bits and of more may be in one batch."""
        del training
        return collate_images

    @override
    def finish_batch(self, inputs: Any) -> Any:
        return self._normalize(inputs)

    @override
    def image_sizes(self, indices: IntArray) -> Iterator[NDArray[np.int64]]:
        files = self._datasets["plain"]
        if isinstance(files, ImageFiles):
            for start in range(0, len(indices), self.test_batch_size):
                yield files.sizes(indices[start : start + self.test_batch_size])

    @override
    def preprocessing(self) -> list[Step]:
        """Normalising; stored inputs are the decoded and resized images."""
        return self._normalize.steps

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str]:
        """Decoded images as bytes; of deeper images, values between bytes are kept."""
        return self.input_shape, "uint8"

    @override
    def decode(self, paths: Sequence[Path]) -> ImageFiles:
        return ImageFiles(paths, self._side, self.grayscale)

    def decoded_parts(self, parts: Parts) -> Parts:
        """Paths `x` of images with their classes `y` as data sets, of which that for training is augmented."""
        train, test = parts.train, parts.test
        augmented, plain, tested = (
            ImageFiles(part.x.tolist(), self._side, self.grayscale, part.y.tolist(), augmentation)
            for part, augmentation in ((train, self._augmentation), (train, None), (test, None))
        )
        return Parts(
            Part(augmented, None, train.clients, train.y, plain),
            Part(tested, None, test.clients, test.y),
            source=parts.source,
        )
