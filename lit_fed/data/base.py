"""The population as a `LightningDataModule`: clients, shared sets, and the partition between them.

Two bases build on it: `TensorDataModule` for data that fit into memory, `DatasetModule` for any map-style
``torch.utils.data.Dataset``. Bring your own data by subclassing one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule

from lit_fed.data.csr import CSR, ClientIndices, IntArray, sha256_of
from lit_fed.data.partition import IID, Natural, Partition
from lit_fed.data.tensor_loader import Loader
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator, torch_generator

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Population:
    """What must be known of a data set to cut it into clients.

    Args:
        train_labels: Class of each training sample, counted from 0, shape (n,).
        test_labels: Class of each test sample, shape (m,).
        train_clients: The data set's own client of each training sample, shape (n,), where it has one.
        test_clients: The same for the test samples, shape (m,).
        source: The file or data set that the labels are from, for error messages.
    """

    train_labels: IntArray
    test_labels: IntArray
    train_clients: IntArray | None = None
    test_clients: IntArray | None = None
    source: str = "the data set"


@dataclass(frozen=True)
class _Cut:
    """The population after `setup`: sample indices in the data set's own numbering."""

    train: CSR
    val: CSR
    calibration: CSR
    test: ClientIndices
    public: IntArray
    shared_val: IntArray
    shared_test: IntArray
    labels: IntArray


class FederatedDataModule(LightningDataModule, ABC):
    """A data set and the clients that share it.

    ``num_clients``, ``num_classes``, ``in_channels`` and ``input_shape`` are known after construction; everything else
    after `setup`. Also works with a plain ``lightning.Trainer``, which then sees all clients' data pooled.

    Args:
        num_clients: Clients in the population; none given means the data set's own clients under `Natural`, else 10.
        partition: How the training samples are cut into clients; none given means `IID`.
        batch_size: Samples per training batch.
        test_batch_size: Samples per batch where nothing is trained.
        seed: The partition's own seed, independent of the run's, so that runs can share a partition.
        val_fraction: Share of every client's samples that is held out to validate on; together these are the shared
            validation set.
        calibration_fraction: Share of every client's samples that is held out for density models and the like.
        public_size: Training samples set aside, before the partition, as a public set without labels.
        max_train_samples: Use a random choice of so many training samples; none given means all.
        max_test_samples: Use a random choice of so many test samples; none given means all.
        drop_last: Leave out a client's last training batch where it is smaller than the others.
        root: Folder where data sets lie.
        download: Fetch what is missing in `root`, for data sets that can be had in public.

    Raises:
        ConfigError: A setting is out of range.
    """

    def __init__(
        self,
        num_clients: int | None = None,
        partition: Partition | None = None,
        batch_size: int = 50,
        test_batch_size: int = 500,
        seed: int = 0,
        val_fraction: float = 0.0,
        calibration_fraction: float = 0.0,
        public_size: int = 0,
        max_train_samples: int | None = None,
        max_test_samples: int | None = None,
        drop_last: bool = False,
        root: str = "data",
        download: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("test_batch_size", test_batch_size)):
            if value < 1:
                raise ConfigError(f"data.{name} is {value}: a batch needs at least 1 sample")
        for name, fraction in (("val_fraction", val_fraction), ("calibration_fraction", calibration_fraction)):
            if not 0 <= fraction < 1:
                raise ConfigError(f"data.{name} is {fraction}: it must be at least 0 and below 1")
        if val_fraction + calibration_fraction >= 1:
            raise ConfigError(
                f"data.val_fraction {val_fraction} and data.calibration_fraction {calibration_fraction} leave nothing "
                "to train on: together they must stay below 1"
            )
        if num_clients is not None and num_clients < 1:
            raise ConfigError(f"data.num_clients is {num_clients}: a population needs at least 1 client")
        if public_size < 0:
            raise ConfigError(f"data.public_size is {public_size}: it must be 0 or more samples")
        for name, most in (("max_train_samples", max_train_samples), ("max_test_samples", max_test_samples)):
            if most is not None and most < 1:
                raise ConfigError(f"data.{name} is {most}: it must be at least 1, or null for all samples")
        self.partition = partition if partition is not None else IID()
        self.batch_size, self.test_batch_size, self.drop_last = batch_size, test_batch_size, drop_last
        self.seed, self.root, self.download = seed, root, download
        self.val_fraction, self.calibration_fraction = val_fraction, calibration_fraction
        self.public_size = public_size
        self.max_train_samples, self.max_test_samples = max_train_samples, max_test_samples
        self._num_clients = num_clients
        self._cut: _Cut | None = None
        self._sha256: str | None = None

    # What a data set tells about itself.

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """The number of classes; known without `setup`."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input as the model sees it, such as (channels, height, width); known without `setup`."""

    @abstractmethod
    def population(self) -> Population:
        """Read the labels, and the data set's own clients where it has some; called once by `setup`."""

    @abstractmethod
    def make_loader(
        self,
        split: Split,
        indices: IntArray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        training: bool = False,
    ) -> Loader:
        """A loader over some samples.

        Args:
            split: Which part of the data set the indices count in.
            indices: The samples, shape (n,).
            batch_size: Samples per batch.
            generator: Shuffles where it is given.
            training: Augment, and obey `drop_last`.
        """

    @abstractmethod
    def make_public_loader(self, indices: IntArray, *, batch_size: int, generator: torch.Generator | None) -> Loader:
        """A loader over training samples that yields positions in `indices` (int64) in place of their labels."""

    def own_clients(self) -> int | None:
        """How many clients the data set itself knows, without `setup`; none where it knows of no clients."""
        return None

    def move_to(self, device: torch.device) -> None:
        """Move what is kept in memory to a device; called once after `setup`."""
        del device

    # The population.

    @property
    def num_clients(self) -> int:
        """Clients in the population."""
        if self._num_clients is None:
            own = self.own_clients() if isinstance(self.partition, Natural) else None
            self._num_clients = 10 if own is None else own
        return self._num_clients

    @property
    def in_channels(self) -> int:
        """Channels of an input: the first entry of `input_shape`."""
        return self.input_shape[0]

    @property
    def image_size(self) -> int | None:
        """Height of an input in pixels where the inputs are images."""
        return self.input_shape[-2] if len(self.input_shape) == 3 else None

    def setup(self, stage: str | None = None) -> None:
        """Read the data and cut them into clients; does nothing the second time.

        Args:
            stage: Lightning's stage; every stage needs the same.

        Raises:
            ConfigError: The data are missing, damaged, or cannot be cut as the settings say.
        """
        if self._cut is not None:
            return
        population = self.population()
        train_labels = _checked(population.train_labels, self.num_classes, f"training labels of {population.source}")
        test_labels = _checked(population.test_labels, self.num_classes, f"test labels of {population.source}")
        for own, labels in ((population.train_clients, train_labels), (population.test_clients, test_labels)):
            if own is not None and len(own) != len(labels):
                raise ConfigError(
                    f"{population.source}: {len(own)} client ids for {len(labels)} samples: give one each"
                )
        pool = self._subset(len(train_labels), self.max_train_samples, "train")
        public, pool = self._take_public(pool)
        own = population.train_clients
        cut = self.partition(train_labels[pool], self.num_clients, self.seed, None if own is None else own[pool])
        shared_test = self._subset(len(test_labels), self.max_test_samples, "test")
        own = population.test_clients
        test = self.partition.split_test(
            cut, train_labels[pool], test_labels[shared_test], self.seed, None if own is None else own[shared_test]
        )
        val, calibration, train = cut.hold_out(
            (self.val_fraction, self.calibration_fraction), numpy_generator(self.seed, "data", "hold-out")
        )
        val = val.through(pool)
        self._cut = _Cut(
            train=train.through(pool),
            val=val,
            calibration=calibration.through(pool),
            test=test,
            public=public,
            shared_val=np.unique(val.indices),
            shared_test=shared_test,
            labels=train_labels,
        )

    def num_samples(self, client_id: int) -> int:
        """Training samples of one client."""
        return self._ready.train.size(client_id)

    def class_counts(self, client_id: int) -> IntArray:
        """Training samples of one client in each class, shape (num_classes,)."""
        cut = self._ready
        return np.bincount(cut.labels[cut.train[client_id]], minlength=self.num_classes)

    @property
    def has_val(self) -> bool:
        """Whether samples are held out to validate on."""
        return self.val_fraction > 0

    @property
    def has_calibration(self) -> bool:
        """Whether every client holds out samples for calibration."""
        return self.calibration_fraction > 0

    @property
    def has_public(self) -> bool:
        """Whether there is a public set."""
        return self.public_size > 0

    # Loaders for the round loop.

    def train_loader(self, client_id: int, generator: torch.Generator) -> Loader:
        """One client's training batches (x, y), shuffled and augmented anew in every iteration.

        Args:
            client_id: Which client.
            generator: A CPU generator, drawn on by every iteration.
        """
        indices = self._ready.train[client_id]
        return self.make_loader("train", indices, batch_size=self.batch_size, generator=generator, training=True)

    def val_loader(self, client_id: int | None = None) -> Loader:
        """One client's held-out batches, or everybody's.

        Args:
            client_id: Which client; None for the shared validation set.

        Raises:
            ConfigError: Nothing was held out.
        """
        if not self.has_val:
            raise ConfigError("there is no validation set: set data.val_fraction above 0")
        cut = self._ready
        indices = cut.shared_val if client_id is None else cut.val[client_id]
        return self.make_loader("train", indices, batch_size=self.test_batch_size)

    def test_loader(self, client_id: int | None = None) -> Loader:
        """Test batches that match one client's data, or the shared test set.

        Args:
            client_id: Which client; None for the shared test set.
        """
        cut = self._ready
        indices = cut.shared_test if client_id is None else cut.shared_test[cut.test[client_id]]
        return self.make_loader("test", indices, batch_size=self.test_batch_size)

    def calibration_loader(self, client_id: int) -> Loader:
        """The batches that one client holds out for calibration, neither shuffled nor augmented.

        Args:
            client_id: Which client; one with too few samples for `calibration_fraction` to take any has no batches.

        Raises:
            ConfigError: Nothing was held out.
        """
        if not self.has_calibration:
            raise ConfigError("clients hold no calibration samples: set data.calibration_fraction above 0")
        return self.make_loader("train", self._ready.calibration[client_id], batch_size=self.test_batch_size)

    def public_loader(self, generator: torch.Generator | None = None) -> Loader:
        """The public set as (x, index), never with labels and never augmented.

        ``index`` is the position within the public set (int64), by which predictions of different clients are matched.

        Args:
            generator: Shuffles where it is given, in batches of `batch_size`; without it the order is fixed, in
                batches of `test_batch_size`.

        Raises:
            ConfigError: There is no public set.
        """
        if not self.has_public:
            raise ConfigError("there is no public set: set data.public_size above 0")
        batch_size = self.test_batch_size if generator is None else self.batch_size
        return self.make_public_loader(self._ready.public, batch_size=batch_size, generator=generator)

    def public_accuracy(self, classes: IntArray) -> float:
        """How many of the public samples are of the classes that a server takes them for.

        The only use of the public set's labels, which no loader yields: a number to report, for nothing to learn from.

        Args:
            classes: One for each public sample, in the order of their positions, shape (public_size,).
        """
        cut = self._ready
        return float((cut.labels[cut.public] == classes).mean())

    # Loaders for a plain lightning.Trainer: all clients' data pooled.

    def train_dataloader(self) -> Any:
        """All clients' training samples, pooled, in batches of `batch_size`."""
        indices = np.unique(self._ready.train.indices)
        generator = torch_generator(self.seed, "data", "pooled")
        return self.make_loader("train", indices, batch_size=self.batch_size, generator=generator, training=True)

    def val_dataloader(self) -> Any:
        """The shared validation set; empty where there is none."""
        return self.val_loader() if self.has_val else []

    def test_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    def predict_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    # What a run writes down about its population.

    def class_histogram(self) -> IntArray:
        """Training samples per client and class, shape (num_clients, num_classes)."""
        return self._ready.train.histogram(self._ready.labels, self.num_classes)

    def partition_sha256(self) -> str:
        """The SHA-256 of the training, validation and calibration rows and of the public set; computed once."""
        if self._sha256 is None:
            cut = self._ready
            arrays = [array for csr in (cut.train, cut.val, cut.calibration) for array in (csr.indices, csr.offsets)]
            self._sha256 = sha256_of([*arrays, cut.public])
        return self._sha256

    def partition_rows(self) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """Each client with its training ``indices``, in the data set's own numbering, and their class ``histogram``."""
        cut, histogram = self._ready, self.class_histogram()
        for client_id in range(self.num_clients):
            indices: list[int] = cut.train[client_id].tolist()
            yield client_id, {"indices": indices, "histogram": histogram[client_id].tolist()}

    def partition_record(self) -> dict[str, Any]:
        """The partition in plain Python values: its ``sha256``, and all ``clients`` as `partition_rows` gives them."""
        return {"sha256": self.partition_sha256(), "clients": dict(self.partition_rows())}

    @property
    def _ready(self) -> _Cut:
        if self._cut is None:
            raise RuntimeError(f"{type(self).__name__} has not read its data yet: call setup() first")
        return self._cut

    def _subset(self, available: int, most: int | None, purpose: str) -> IntArray:
        """All indices, or a random choice, ascending."""
        if most is None or most >= available:
            return np.arange(available, dtype=np.int64)
        chosen = numpy_generator(self.seed, "data", "subset", purpose).choice(available, most, replace=False)
        return np.sort(chosen).astype(np.int64)

    def _take_public(self, pool: IntArray) -> tuple[IntArray, IntArray]:
        """Set the public samples aside: (public, rest)."""
        if self.public_size == 0:
            return pool[:0], pool
        if self.public_size >= len(pool):
            raise ConfigError(
                f"data.public_size {self.public_size} leaves none of the {len(pool)} training samples to the clients: "
                "lower it"
            )
        generator = numpy_generator(self.seed, "data", "public")
        taken = np.zeros(len(pool), dtype=bool)
        taken[generator.choice(len(pool), self.public_size, replace=False)] = True
        return pool[taken], pool[~taken]


def _checked(labels: IntArray, num_classes: int, what: str) -> IntArray:
    """The labels as int64, in 0 … num_classes − 1.

    Raises:
        ConfigError: There are none, or one is out of range.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{what}: expected a list of integers, one per sample, found shape {array.shape} of {array.dtype}"
        )
    wrong = np.flatnonzero((array < 0) | (array >= num_classes))
    if len(wrong):
        raise ConfigError(
            f"{what}: label {array[wrong[0]]} of sample {wrong[0]} is not in 0 … {num_classes - 1}: "
            "correct the file or the number of classes"
        )
    return array.astype(np.int64)
