"""The population as a `LightningDataModule`: clients, shared sets, and the partition between them.

Two bases build on it: `TensorDataModule` for data that fit into memory, `DatasetModule` for any map-style
``torch.utils.data.Dataset``. Bring your own data by subclassing one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import CutSettings, Strata, cut_population, named
from lit_fed.data.partitions.partition import IID, Natural, Partition
from lit_fed.data.population.described import DescribedPopulation
from lit_fed.data.population.feature_skew import FeatureSkew
from lit_fed.data.population.new_inputs import NewInputs
from lit_fed.data.population.views import View, viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import torch_generator

Subset = Literal["train", "test"]


class FederatedDataModule(DescribedPopulation):
    """A data set and the clients that share it.

    ``num_clients``, ``num_classes``, ``in_channels``, ``input_shape`` and ``output_shape`` are known after
    construction; everything else after `setup`. Also works with a plain ``lightning.Trainer``, which then sees all
    clients' data pooled. What a method needs beside the clients' training data, a public set or calibration samples,
    it reserves before `setup`, see `reserve`.

    Args:
        num_clients: Clients in the population; none given means the data set's own clients under `Natural`, else 10.
        partition: How the training samples are cut into clients; none given means `IID`.
        batch_size: Samples per training batch.
        test_batch_size: Samples per batch where nothing is trained.
        shared_batch_size: The same for the shared test and validation sets; none given means `test_batch_size`.
        seed: The partition's own seed, independent of the run's, so that runs can share a partition.
        val_fraction: Share of every client's samples that is held out to validate on; together these are the shared
            validation set.
        max_train_samples: Use a random choice of so many training samples; none given means all.
        max_test_samples: Use a random choice of so many test samples; none given means all.
        drop_last: Leave out a client's last training batch where it is smaller than the others.
        fresh_batches: Make every training batch the first of a fresh shuffle of the client's samples, instead of going
            through one shuffle after the other.
        stratified_public: Take equally many public samples of every class, instead of any.
        skew: How clients' inputs differ, such as `NoiseLevels`; none given shows all of them the same.
        root: Folder where data sets lie.
        download: Fetch what is missing in `root`, for data sets that can be had in public.

    Raises:
        ConfigError: A setting is out of range.

    Note:
        The public code of FedDr+ draws its batches like ``fresh_batches`` under LDA, which its paper does not say: a
        client may see a sample in several steps and another in none.
    """

    def __init__(
        self,
        num_clients: int | None = None,
        partition: Partition | None = None,
        batch_size: int = 50,
        test_batch_size: int = 500,
        shared_batch_size: int | None = None,
        seed: int = 0,
        val_fraction: float = 0.0,
        max_train_samples: int | None = None,
        max_test_samples: int | None = None,
        drop_last: bool = False,
        fresh_batches: bool = False,
        stratified_public: bool = False,
        skew: FeatureSkew | None = None,
        root: str = "data",
        download: bool = False,
    ) -> None:
        super().__init__()
        self.skew = skew
        shared = test_batch_size if shared_batch_size is None else shared_batch_size
        sizes = {"batch_size": batch_size, "test_batch_size": test_batch_size, "shared_batch_size": shared}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"data.{name} is {value}: a batch needs at least 1 sample")
        if not 0 <= val_fraction < 1:
            raise ConfigError(f"data.val_fraction is {val_fraction}: it must be at least 0 and below 1")
        if num_clients is not None and num_clients < 1:
            raise ConfigError(f"data.num_clients is {num_clients}: a population needs at least 1 client")
        for name, most in (("max_train_samples", max_train_samples), ("max_test_samples", max_test_samples)):
            if most is not None and most < 1:
                raise ConfigError(f"data.{name} is {most}: it must be at least 1, or null for all samples")
        self.partition, self._num_clients = partition if partition is not None else IID(), num_clients
        self.batch_size, self.test_batch_size, self.shared_batch_size = batch_size, test_batch_size, shared
        self.drop_last, self.fresh_batches, self.stratified_public = drop_last, fresh_batches, stratified_public
        self.seed, self.root, self.download = seed, root, download
        self.val_fraction, self.public_size, self.calibration_fraction = val_fraction, 0, 0.0
        self.max_train_samples, self.max_test_samples = max_train_samples, max_test_samples

    # Who sees what.

    def view(self, client_id: int) -> View | None:
        """What a client makes of its batches, such as a lower resolution; None shows them as they are.

        A view is applied to all batches of the client's own data, after normalising. See `ViewLoader` for random ones.

        Args:
            client_id: Which client.
        """
        del client_id
        return None

    def shared_view(self) -> View | None:
        """What is made of the batches of shared and pooled sets, nobody's own; None shows them as they are."""
        return None

    def views(self) -> Mapping[str, View]:
        """The views that an evaluation may ask for, by name; in the order in which to evaluate them."""
        return {}

    def seen(self, client_id: int | None, name: str | None = None) -> View | None:
        """The view of a name, of a client with its skew, or of nobody.

        Args:
            client_id: Which client; None for nobody.
            name: One of `views`; None for the client's own.

        Raises:
            ConfigError: There is no view of that name.
        """
        if name is not None:
            views = self.views()
            if name not in views:
                known = ", ".join(views) or "none"
                raise ConfigError(f"{type(self).__name__} has no view named {name!r}: it has {known}")
            return views[name]
        if client_id is None:
            return self.shared_view()
        own = self.view(client_id)
        skewed = None if self.skew is None else self.skew.view(client_id, self.num_clients)
        if own is None or skewed is None:
            return skewed if own is None else own
        return lambda batch: own(skewed(batch))

    def describe(self, client_id: int) -> dict[str, Any]:
        """See `DescribedPopulation.describe`; with the client's own values of the ``skew``, where there is one."""
        row = super().describe(client_id)
        return row if self.skew is None else row | {"skew": self.skew.describe(client_id, self.num_clients)}

    # What a data set tells about itself.

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of what a model puts out for one sample: (num_classes,), or without classes () or (k,).

        Known without `setup`. Override it for k targets per sample.
        """
        return () if self.num_classes is None else (self.num_classes,)

    @abstractmethod
    def read_strata(self) -> Strata:
        """Read what the data set tells of its samples, for partitions to cut by; called once by `setup`."""

    @abstractmethod
    def make_loader(
        self,
        subset: Subset,
        indices: IntArray,
        *,
        batch_size: int,
        generator: torch.Generator | None = None,
        training: bool = False,
    ) -> Loader:
        """A loader over some samples.

        Args:
            subset: Which part of the data set the indices count in.
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

    def own_client_names(self) -> list[str] | None:
        """What the data set calls its own clients, in their order; none where they have no names."""
        return None

    def own_clients_are(self) -> tuple[str, str]:
        """What names the data set's own clients, and how to do without them, for messages."""
        return "client_train of the data", "leave it out"

    def new_inputs(self, path: Path) -> NewInputs:
        """Samples of a file or a folder that are none of the data set's, to predict on; called after `setup`.

        Args:
            path: What ``lit-fed predict --inputs`` names.

        Raises:
            ConfigError: It is missing or damaged, or does not hold what the network takes.
        """
        raise ConfigError(f"{type(self).__name__} reads no inputs from files, so {path} cannot be predicted on")

    def keep(self, train: IntArray, test: IntArray) -> None:
        """Forget samples that belong to clients who are not here; called by `setup` for some clients only.

        Args:
            train: Training samples to keep, ascending, shape (n,).
            test: Test samples to keep: the shared test set.
        """
        del train, test

    def move_to(self, device: torch.device) -> None:
        """Move what is kept in memory to a device; called once after `setup`."""
        del device

    # The population.

    @property
    def num_clients(self) -> int:
        """Clients in the population."""
        if self._num_clients is None:
            asked_for = self.partition.count(self.own_clients)
            self._num_clients = 10 if asked_for is None else asked_for
        return self._num_clients

    @property
    def client_names(self) -> list[str] | None:
        """What the clients are called: as the data set calls its own, under `Natural`."""
        names = self.own_client_names() if isinstance(self.partition, Natural) else None
        return None if names is None else names[: self.num_clients]

    @property
    def in_channels(self) -> int:
        """Channels of an input: the first entry of `input_shape`."""
        return self.input_shape[0]

    @property
    def image_size(self) -> int | None:
        """Height of an input in pixels where the inputs are images."""
        return self.input_shape[-2] if len(self.input_shape) == 3 else None

    def reserve(self, public_size: int = 0, calibration_fraction: float = 0.0) -> None:
        """Set samples aside for a method; called before `setup`.

        Args:
            public_size: Training samples set aside, before the partition, as a public set without labels.
            calibration_fraction: Share of every client's samples that is held out for density models and the like.

        Raises:
            ConfigError: A value is out of range, or `setup` was called with others.
        """
        if public_size < 0:
            raise ConfigError(f"algorithm.public_size is {public_size}: it must be 0 or more samples")
        if not 0 <= calibration_fraction < 1:
            raise ConfigError(
                f"algorithm.calibration_fraction is {calibration_fraction}: it must be at least 0 and below 1"
            )
        if self.val_fraction + calibration_fraction >= 1:
            raise ConfigError(
                f"data.val_fraction {self.val_fraction} and algorithm.calibration_fraction {calibration_fraction} "
                "leave nothing to train on: together they must stay below 1"
            )
        before = (self.public_size, self.calibration_fraction)
        if self._cut is not None and before != (public_size, calibration_fraction):
            raise ConfigError(
                f"the data were cut with algorithm.public_size {before[0]} and algorithm.calibration_fraction "
                f"{before[1]}, and cannot be cut again with {public_size} and {calibration_fraction}: "
                "reserve before setup, or use a data module of its own for each method"
            )
        self.public_size, self.calibration_fraction = public_size, calibration_fraction

    def setup(self, stage: str | None = None, clients: Iterable[int] | None = None) -> None:
        """Read the data and cut them into clients; does nothing the second time.

        Args:
            stage: Lightning's stage; every stage needs the same.
            clients: Those whose data are wanted here, maybe none; their part is the same as if everybody were here.
                The shared test set and the public set are everywhere, the shared validation set where everybody is.
                None for everybody, or the second time for those who are here.

        Raises:
            ConfigError: The data are missing, damaged, or cannot be cut as the settings say, or are set up already for
                other clients.
        """
        wanted = None if clients is None else frozenset(index(client_id) for client_id in clients)
        if self._cut is not None:
            if wanted is not None and wanted != frozenset(self.clients):
                raise ConfigError(
                    f"the data are set up for {named(self.clients)} and cannot be set up again for {named(wanted)}: "
                    "use a data module of its own"
                )
            return
        strata = self.read_strata().checked(self.num_classes)
        self._check_own_clients(strata.train_clients)
        settings = CutSettings(
            num_clients=self.num_clients,
            seed=self.seed,
            val_fraction=self.val_fraction,
            calibration_fraction=self.calibration_fraction,
            public_size=self.public_size,
            stratified_public=self.stratified_public,
            max_train_samples=self.max_train_samples,
            max_test_samples=self.max_test_samples,
        )
        cut = cut_population(strata, self.partition, settings)
        if wanted is not None:
            self.contents()  # of everybody's data, while they are here
            cut = cut.only(wanted)
            own = (cut.train.indices, cut.val.indices, cut.calibration.indices, cut.public)
            self.keep(np.unique(np.concatenate(own)), cut.shared_test)
        self._cut = cut

    def _check_own_clients(self, clients: IntArray | None) -> None:
        """Refuse a partition that ignores the data set's own clients, and say if some of them take no part.

        Args:
            clients: The data set's own client of each training sample, shape (n,); None where it knows of none.

        Raises:
            ConfigError: It names both.
        """
        count = 0 if clients is None else len(np.unique(clients))
        what, otherwise = self.own_clients_are()
        if count > 1 and not self.partition.keeps_clients:
            number = "" if self._num_clients is None else " and data.num_clients to null"
            raise ConfigError(
                f"{what} names {count} clients, and data.partition {type(self.partition).__name__} makes others of "
                f"their samples: set data.partition to Natural{number}, or {otherwise}"
            )
        if count > self.num_clients:
            remark(
                f"data.num_clients is {self.num_clients}: the others of the {count} clients that {what} names take no "
                "part; null takes all of them"
            )

    @property
    def has_val(self) -> bool:
        """Whether samples are held out to validate on; before `setup`, whether any are asked for."""
        if self._cut is None or self._cut.clients is not None:
            return self.val_fraction > 0 or (self._cut is not None and self._cut.own_val)
        return len(self._cut.shared_val) > 0

    @property
    def has_calibration(self) -> bool:
        """Whether every client holds out samples for calibration."""
        return self.calibration_fraction > 0

    @property
    def has_public(self) -> bool:
        """Whether there is a public set."""
        return self.public_size > 0

    # Loaders for the round loop. A client's own loaders refuse, by name, a client whose data are not here.

    def train_loader(self, client_id: int, generator: torch.Generator) -> Loader:
        """One client's training batches (x, y), shuffled and augmented anew in every iteration.

        Args:
            client_id: Which client.
            generator: A CPU generator, drawn on by every iteration.
        """
        indices = self._of(client_id).train[client_id]
        loader = self.make_loader("train", indices, batch_size=self.batch_size, generator=generator, training=True)
        return viewed(loader, self.seen(client_id), generator)

    def val_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """One client's held-out batches, or everybody's.

        Args:
            client_id: Which client; None for the shared validation set.
            view: One of `views`; None for the client's own.

        Raises:
            ConfigError: Nothing was held out, or not everybody is here to share it.
        """
        if not self.has_val:
            raise ConfigError(f"there is no validation set: set data.val_fraction above {self.val_fraction:g}")
        if client_id is None:
            self._all_here("the shared validation set")
            indices, size = self._ready.shared_val, self.shared_batch_size
        else:
            indices, size = self._of(client_id).val[client_id], self.test_batch_size
        loader = self.make_loader("train", indices, batch_size=size)
        return viewed(loader, self.seen(client_id, view))

    def test_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """Test batches that match one client's data, or the shared test set.

        Args:
            client_id: Which client; None for the shared test set.
            view: One of `views`; None for the client's own.
        """
        indices, size = self._ready.shared_test, self.shared_batch_size
        if client_id is not None:
            indices, size = indices[self._of(client_id).test[client_id]], self.test_batch_size
        loader = self.make_loader("test", indices, batch_size=size)
        return viewed(loader, self.seen(client_id, view))

    def calibration_loader(self, client_id: int) -> Loader:
        """The batches that one client holds out for calibration, neither shuffled nor augmented.

        Args:
            client_id: Which client; one with too few samples for `calibration_fraction` to take any has no batches.

        Raises:
            ConfigError: Nothing was held out.
        """
        if not self.has_calibration:
            raise ConfigError("clients hold no calibration samples: set algorithm.calibration_fraction above 0")
        indices = self._of(client_id).calibration[client_id]
        return viewed(self.make_loader("train", indices, batch_size=self.test_batch_size), self.seen(client_id))

    def public_loader(self, generator: torch.Generator | None = None, client_id: int | None = None) -> Loader:
        """The public set as (x, index), never with labels and never augmented.

        ``index`` is the position within the public set (int64), by which predictions of different clients are matched.

        Args:
            generator: Shuffles where it is given, in batches of `batch_size`; without it the order is fixed, in
                batches of `test_batch_size`.
            client_id: Whose view of it; None for the set as it is.

        Raises:
            ConfigError: There is no public set.
        """
        if not self.has_public:
            raise ConfigError("there is no public set: set algorithm.public_size above 0")
        batch_size = self.test_batch_size if generator is None else self.batch_size
        loader = self.make_public_loader(self._ready.public, batch_size=batch_size, generator=generator)
        return viewed(loader, self.seen(client_id), generator)

    # Loaders for a plain lightning.Trainer: all clients' data pooled.

    def train_dataloader(self) -> Any:
        """All clients' training samples, pooled, in batches of `batch_size`."""
        self._all_here("the pooled training set")
        indices = np.unique(self._ready.train.indices)
        generator = torch_generator(self.seed, "data", "pooled")
        loader = self.make_loader("train", indices, batch_size=self.batch_size, generator=generator, training=True)
        return viewed(loader, self.shared_view(), generator)

    def val_dataloader(self) -> Any:
        """The shared validation set; empty where there is none."""
        return self.val_loader() if self.has_val else []

    def test_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    def predict_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    def _all_here(self, what: str) -> None:
        """Refuse what is made of everybody's data where only some clients are here."""
        if self._ready.clients is not None:
            raise ConfigError(f"{what} needs everybody's data: setup was asked for {named(self.clients)} only")
