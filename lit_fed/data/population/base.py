"""The population as a `LightningDataModule`: clients, shared sets, and the partition between them.

Two bases build on it: `TensorDataModule` for data that fit into memory, `DatasetModule` for any map-style
``torch.utils.data.Dataset``. Bring your own data by subclassing one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.data.loaders.tensor_loader import Loader, TensorLoader
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Cut, CutSettings, cut_population, named
from lit_fed.data.partitions.partition import IID, Natural, Partition
from lit_fed.data.population.census import Census, Contents, contents_of
from lit_fed.data.population.hooks import Batches, DataHooks
from lit_fed.data.population.naming import check_names
from lit_fed.data.population.pictures import Names, partition_picture, render, sizes_picture, target_picture
from lit_fed.data.population.targets import quantiles
from lit_fed.data.population.views import FeatureSkew, View, viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import torch_generator
from lit_fed.tracking import tracked

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FederatedDataModule(Checked, DataHooks, LightningDataModule):
    """A data set and the clients that share it.

    ``num_clients``, ``num_classes``, ``in_channels``, ``input_shape`` and ``output_shape`` are known after
    construction, everything else after `setup`. A plain ``lightning.Trainer`` sees all clients' data pooled. A method's
    public set and calibration samples are set aside before `setup`, see `reserve`. A data set overrides `DataHooks`.

    Args:
        num_clients: Clients in the population; null for the data set's own clients under `Natural`, else 10.
        partition: Cuts the training samples into clients; null for `IID`.
        batch_size: Samples per training batch.
        test_batch_size: Samples per batch in evaluation.
        shared_batch_size: Samples per batch of the shared test and validation sets; null for `test_batch_size`.
        seed: The partition's own seed, independent of the run's, so that runs can share a partition.
        val_fraction: Share of every client's samples held out for validation; together they are the shared validation
            set.
        max_train_samples: Size of a random choice of training samples; null for all.
        max_test_samples: Size of a random choice of test samples; null for all.
        drop_last: Drop a client's last training batch if it is smaller than the others.
        fresh_batches: Make every training batch the first of a fresh shuffle of the client's samples, instead of one
            shuffle per pass.
        stratified_public: Take equally many public samples of every class, instead of any.
        skew: Makes the clients' inputs differ, such as `NoiseLevels`; null for none.
        root: Folder of the data sets.
        download: Fetch missing files of public data sets to `root`.

    Raises:
        ConfigError: A setting is out of range.

    Note:
        The public code of FedDr+ draws its batches like ``fresh_batches`` under LDA, which its paper does not say: a
        client may see a sample in several steps and another in none.
    """

    _refused_as = "data"

    @override
    @classmethod
    def advice(cls, odd: Any) -> str:
        made = "LightningDataModule.from_datasets(train, test_dataset=test)"
        if isinstance(odd, LightningDataModule):
            made = f"{type(odd).__name__}(…)"
        return f"it has no clients; wrap its data: lit_fed.data.Wrapped({made})"

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
        shared = test_batch_size if shared_batch_size is None else shared_batch_size
        check_range("data.batch_size", batch_size, least=1)
        check_range("data.test_batch_size", test_batch_size, least=1)
        check_range("data.shared_batch_size", shared, least=1)
        check_range("data.val_fraction", val_fraction, least=0, below=1)
        check_range("data.num_clients", num_clients, least=1, null="for the default")
        check_range("data.max_train_samples", max_train_samples, least=1, null="for all samples")
        check_range("data.max_test_samples", max_test_samples, least=1, null="for all samples")
        self.partition, self._num_clients = partition if partition is not None else IID(), num_clients
        self.batch_size, self.test_batch_size, self.shared_batch_size = batch_size, test_batch_size, shared
        self.drop_last, self.fresh_batches, self.stratified_public = drop_last, fresh_batches, stratified_public
        self.seed, self.root, self.download, self.skew = seed, root, download, skew
        self.val_fraction, self.public_size, self.calibration_fraction = val_fraction, 0, 0.0
        self.max_train_samples, self.max_test_samples = max_train_samples, max_test_samples
        self._cut: Cut | None = None
        self._absent: frozenset[int] | None = None

    @property
    def num_clients(self) -> int:
        """Clients in the population."""
        if self._num_clients is None:
            self._num_clients = self.partition.count(self.own_clients)
        return 10 if self._num_clients is None else self._num_clients

    @property
    def counts_by_reading(self) -> bool:
        """Whether only the samples say how many clients there are, and are not read yet."""
        unset = self._num_clients is None and self.partition.keeps_clients
        return unset and self.partition.count(self.own_clients) is None

    @property
    def client_names(self) -> list[str] | None:
        """Names of the clients: the data set's own under `Natural`, else None."""
        names = self.own_client_names() if isinstance(self.partition, Natural) else None
        return None if names is None else names[: self.num_clients]

    def seen(self, client_id: int | None, name: str | None = None) -> View | None:
        """The named view, or else a client's view after its skew, or else the shared view.

        Raises:
            ConfigError: No view has that name.
        """
        if name is not None:
            views = self.views()
            if name not in views:
                known = ", ".join(views) or "none"
                raise ConfigError(f"{type(self).__name__} has no view named {name!r}; it has {known}")
            return views[name]
        if client_id is None:
            return self.shared_view()
        of_client = self.view(client_id)
        skewed = None if self.skew is None else self.skew.view(client_id, self.num_clients)
        if of_client is None or skewed is None:
            return skewed if of_client is None else of_client
        return lambda batch: of_client(skewed(batch))

    # The cut.

    def reserve(self, public_size: int = 0, calibration_fraction: float = 0.0) -> None:
        """Set samples aside for a method; called before `setup`.

        Args:
            public_size: Training samples set aside, before the partition, as a public set without labels.
            calibration_fraction: Share of every client's samples held out for calibration, such as of density models.

        Raises:
            ConfigError: A value is out of range, or differs from that of an earlier `setup`.
        """
        check_range("algorithm.public_size", public_size, least=0)
        check_range("algorithm.calibration_fraction", calibration_fraction, least=0, below=1)
        if self.val_fraction + calibration_fraction >= 1:
            raise ConfigError(
                f"data.val_fraction {self.val_fraction} and algorithm.calibration_fraction {calibration_fraction} "
                "leave nothing to train on; their sum must be below 1"
            )
        before = (self.public_size, self.calibration_fraction)
        if self._cut is not None and before != (public_size, calibration_fraction):
            raise ConfigError(
                f"the data were cut with algorithm.public_size {before[0]} and algorithm.calibration_fraction "
                f"{before[1]}, and cannot be cut again with {public_size} and {calibration_fraction}; reserve before "
                "setup, or make another data module"
            )
        self.public_size, self.calibration_fraction = public_size, calibration_fraction

    @override
    def setup(self, stage: str | None = None, clients: Iterable[int] | None = None) -> None:
        """Read the data and cut them into clients; a second call is a no-op.

        Args:
            stage: Lightning's stage, without effect.
            clients: The clients whose data are wanted here, maybe none; their parts are the same as in the whole
                population. The shared test set and the public set are always here, the shared validation set only with
                all clients. None for all clients, or in a second call for the clients of the first.

        Raises:
            ConfigError: The data are missing or damaged, cannot be cut by the settings, or are already set up for other
                clients.
        """
        wanted = None if clients is None else frozenset(index(client_id) for client_id in clients)
        if self._cut is None:
            (self._cut,) = tracked(map(self.make_cut, [wanted]), "reading and dividing the data")
        elif wanted is not None and wanted != frozenset(self.census.clients):
            raise ConfigError(
                f"the data are set up for {named(self.census.clients)} and cannot be set up again for {named(wanted)}; "
                "make another data module"
            )

    def leave_out(self, absent: Collection[int]) -> None:
        """Take all samples of absent clients out of the population and its shared sets; called after `setup`.

        Raises:
            ConfigError: It is not known whose a shared set's samples are, or an earlier call left out other clients.
        """
        wanted = frozenset(absent)
        if self._absent not in (None, wanted):
            raise ConfigError(
                f"the data are set up without {named(self._absent or ())} and cannot be set up again without "
                f"{named(wanted)}; make another data module"
            )
        if wanted and self._absent is None:
            self._cut = self._ready.without(wanted, self.partition.keeps_clients)
            if "census" in vars(self):
                self.census.leave_out(wanted, self._cut)
        self._absent = wanted

    @property
    def mixed_by(self) -> str | None:
        """The setting by which a client's data change which samples another client has; None where they cannot."""
        if self.max_train_samples is not None and self.partition.keeps_clients:
            return "data.max_train_samples"
        return None

    def make_cut(self, wanted: frozenset[int] | None) -> Cut:
        """Read the data and cut them; `wanted` are the clients whose data are wanted here, None for all."""
        parts = self.read_parts().checked(self.num_classes)
        check_names([*(self.client_names or ()), *(self.class_names or ())])
        if self._num_clients is None and (owners := parts.train.clients) is not None:
            self._num_clients = self.partition.count(lambda: len(np.unique(owners)))
        self._check_own_clients(parts.train.clients)
        settings = CutSettings(**{setting.name: getattr(self, setting.name) for setting in fields(CutSettings)})
        cut = cut_population(parts, self.partition, settings)
        del parts  # arrays of which `keep` may free some
        if wanted is not None:
            _ = self.record.contents  # of all clients' data, before some are freed
            cut = cut.only(wanted)
            kept_rows = (cut.train.indices, cut.val.indices, cut.calibration.indices, cut.public)
            self.keep(np.unique(np.concatenate(kept_rows)), cut.shared_test)
        return cut

    def _check_own_clients(self, clients: IntArray | None) -> None:
        """Refuse a partition that ignores the data set's own clients (n,), and remark on clients that take no part."""
        count = 0 if clients is None else len(np.unique(clients))
        what, instead = self.own_clients_are()
        if count > 1 and not self.partition.keeps_clients:
            number = "" if self._num_clients is None else " and data.num_clients to null"
            raise ConfigError(
                f"{what} names {count} clients, which data.partition {type(self.partition).__name__} would ignore; set "
                f"data.partition to Natural{number}, or {instead}"
            )
        made = self.partition.count(lambda: count) or count
        if made > self.num_clients:
            verb = "names" if made == count else f"names {count} clients, which make"
            remark(
                f"data.num_clients is {self.num_clients}, and {what} {verb} {made} clients; the others take no part "
                "(null takes all of them)"
            )

    @property
    def _ready(self) -> Cut:
        if self._cut is None:
            raise RuntimeError(f"{type(self).__name__} has not read its data yet; call setup() first")
        return self._cut

    @property
    def has_val(self) -> bool:
        """Whether samples are held out for validation; before `setup`, whether any are asked for."""
        if self._cut is None or self._cut.clients is not None:
            return self.val_fraction > 0 or (self._cut is not None and self._cut.own_val)
        return len(self._cut.shared_val) > 0

    @property
    def has_shared_val(self) -> bool:
        """Whether the shared validation set is here, which holds samples of all clients."""
        return self.has_val and self._ready.clients is None

    @property
    def has_calibration(self) -> bool:
        """Whether every client holds out samples for calibration."""
        return self.calibration_fraction > 0

    @property
    def has_public(self) -> bool:
        """Whether there is a public set."""
        return self.public_size > 0

    # Loaders of the round loop. A client's own loaders refuse a client whose data are not here.

    def train_loader(self, client_id: int, generator: torch.Generator) -> Loader:
        """One client's training batches (x, y), shuffled and augmented anew in every iteration by a CPU generator."""
        indices = self._ready.of_client(client_id).train[client_id]
        loader = self.make_loader(Batches("train", indices, self.batch_size, generator, training=True))
        return viewed(loader, self.seen(client_id), generator)

    def cohort_loader(self, client_ids: Sequence[int]) -> tuple[TensorLoader, IntArray] | None:
        """One loader, without shuffling, over some clients' training samples, one client after the other.

        Returns:
            The loader and each client's number of samples; None where clients' loaders differ in more than these.
        """
        del client_ids
        return None

    def val_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """One client's validation batches, or the shared validation set, in a named view or the client's own.

        Raises:
            ConfigError: Nothing is held out, or the shared set lacks clients.
        """
        if not self.has_val:
            raise ConfigError(f"the data have no validation set; set data.val_fraction above {self.val_fraction:g}")
        if client_id is None:
            self._require_everybody("the shared validation set")
            indices = self._ready.shared_val
        else:
            indices = self._ready.of_client(client_id).val[client_id]
        size = self.evaluation_batch_size("val", client_id is None)
        return viewed(self.make_loader(Batches("train", indices, size)), self.seen(client_id, view))

    def test_loader(self, client_id: int | None = None, view: str | None = None) -> Loader:
        """Test batches that match one client's data, or the shared test set, in a named view or the client's own."""
        indices = self._ready.shared_test
        if client_id is not None:
            indices = indices[self._ready.of_client(client_id).test[client_id]]
        size = self.evaluation_batch_size("test", client_id is None)
        return viewed(self.make_loader(Batches("test", indices, size)), self.seen(client_id, view))

    def evaluation_batch_size(self, part: Literal["val", "test"], shared: bool) -> int:
        """Samples per batch of a client's validation or test samples, or of the shared set."""
        del part
        return self.shared_batch_size if shared else self.test_batch_size

    def calibration_loader(self, client_id: int) -> Loader:
        """One client's calibration batches, neither shuffled nor augmented.

        A client with too few samples for `calibration_fraction` has no batches.

        Raises:
            ConfigError: Nothing is held out.
        """
        if not self.has_calibration:
            raise ConfigError("clients hold no calibration samples; set algorithm.calibration_fraction above 0")
        indices = self._ready.of_client(client_id).calibration[client_id]
        return viewed(self.make_loader(Batches("train", indices, self.test_batch_size)), self.seen(client_id))

    def public_loader(self, generator: torch.Generator | None = None, client_id: int | None = None) -> Loader:
        """The public set as (x, index), without labels or augmentation.

        ``index`` is the position in the public set (int64), which matches the predictions of different clients.

        Args:
            generator: Shuffles, in batches of `batch_size`; None keeps the order, in batches of `test_batch_size`.
            client_id: The client whose view to take; None for the shared view.

        Raises:
            ConfigError: The data have no public set.
        """
        if not self.has_public:
            raise ConfigError("the data have no public set; set algorithm.public_size above 0")
        batch_size = self.test_batch_size if generator is None else self.batch_size
        loader = self.make_public_loader(Batches("train", self._ready.public, batch_size, generator))
        return viewed(loader, self.seen(client_id), generator)

    def stored_loader(self, client_id: int) -> Loader:
        """One client's training samples as stored, in their order and in batches (x, y) of `test_batch_size`."""
        indices = self._ready.of_client(client_id).train[client_id]
        return self.make_stored_loader(Batches("train", indices, self.test_batch_size))

    def stored_sizes(self, client_id: int) -> Iterator[NDArray[np.int64]]:
        """Heights and widths (n, 2) of one client's training images, in batches; see `image_sizes`."""
        return self.image_sizes(self._ready.of_client(client_id).train[client_id])

    def first_sample(self, part: Literal["train", "test"], client_id: int) -> Any:
        """The first training sample of a client, or of the shared test set as the client sees it.

        Returns:
            A batch of one, neither shuffled nor augmented; None without a sample.
        """
        indices = self._ready.shared_test if part == "test" else self._ready.of_client(client_id).train[client_id]
        return next(iter(viewed(self.make_loader(Batches(part, indices[:1], 1)), self.seen(client_id))), None)

    # Loaders of a plain lightning.Trainer: all clients' data pooled.

    @override
    def train_dataloader(self) -> Any:
        """All clients' training samples, pooled, in batches of `batch_size`."""
        self._require_everybody("the pooled training set")
        indices = np.unique(self._ready.train.indices)
        generator = torch_generator(self.seed, "data", "pooled")
        loader = self.make_loader(Batches("train", indices, self.batch_size, generator, training=True))
        return viewed(loader, self.shared_view(), generator)

    @override
    def val_dataloader(self) -> Any:
        """The shared validation set; empty without one."""
        return self.val_loader() if self.has_val else []

    @override
    def test_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    @override
    def predict_dataloader(self) -> Any:
        """The shared test set."""
        return self.test_loader()

    def _require_everybody(self, what: str) -> None:
        if self._ready.clients is not None:
            raise ConfigError(
                f"{what} needs the data of all clients; setup was asked for {named(self.census.clients)} only"
            )

    # What others know of the population.

    @cached_property
    def census(self) -> Census:
        """Counts of the clients here and, by their reports, of remote clients; known after `setup`."""
        name = type(self).__name__
        return Census(self._ready, self.num_classes, name, self.fingerprint_of, self.input_scale, self.agree)

    @cached_property
    def record(self) -> PartitionRecord:
        """A run's record of the population: its hashes, a row for each client, and a picture; known after `setup`."""
        return PartitionRecord(self)

    def balanced_weights(self) -> list[float]:
        r"""Weights of the classes, :math:`n / (C n_c)` for n_c of all clients' n training samples in C classes.

        Raises:
            ConfigError: The data have no classes, or some clients' counts are not known here.
        """
        self.given_to_model = "model.class_weights are counted over all clients' classes; give a list"
        if not self.census.is_complete:
            raise ConfigError(
                "model.class_weights 'balanced' needs the counts of all clients; give a list, by lit-fed statistics"
            )
        counts = self.census.class_histogram().sum(axis=0)
        weights: list[float] = (counts.sum() / (len(counts) * np.maximum(counts, 1))).tolist()
        return weights

    def fingerprint_of(self, client_id: int) -> str:
        """The SHA-256 by which a server recognises a client's data; by default of its indices."""
        return self._ready.of_client(client_id).fingerprint(client_id)

    def describe(self, client_id: int) -> dict[str, Any]:
        """One client's row of ``partition.json``, in plain Python values; see `PartitionRecord.row`."""
        return self.record.row(client_id)

    def figure(self) -> Figure | None:
        """Draw the partition: classes by client, the distribution of targets by client, or else sizes.

        Override it to draw something else; None draws nothing.
        """
        return self.record.figure()


class PartitionRecord:
    """A population in plain Python values.

    Args:
        data: The population after its `setup`.
    """

    def __init__(self, data: FederatedDataModule) -> None:
        self._data = data

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the whole population's training, validation and calibration rows and of its public set."""
        return self._data._ready.digest()

    @cached_property
    def contents(self) -> Contents:
        """The fingerprint of all clients' values, from `read_contents`."""
        return contents_of(self._data.read_contents())

    def row(self, client_id: int) -> dict[str, Any]:
        """One client's row of ``partition.json``.

        Returns:
            Its ``name`` if clients have names; its training ``indices`` in the data set's numbering; with classes
            their ``histogram``, else the number of ``samples`` and, of numerical targets, the ``quantiles``: minimum,
            quartiles and maximum, a list for each of k targets; with a `skew` the client's own values of it.
        """
        data, names = self._data, self._data.client_names
        indices = data._ready.of_client(client_id).train[client_id]
        row: dict[str, Any] = {} if names is None else {"name": names[client_id]}
        row["indices"] = indices.tolist()
        if data.census.has_labels:
            row["histogram"] = data.census.class_counts(client_id).tolist()
        else:
            row["samples"] = len(indices)
            if (targets := data.target_values(indices)) is not None:
                row["quantiles"] = quantiles(targets)
        return row if data.skew is None else row | {"skew": data.skew.describe(client_id, data.num_clients)}

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The reports of remote clients, and `FederatedDataModule.describe` of each client here."""
        for client_id, report in sorted(self._data.census.reports.items()):
            yield client_id, asdict(report)
        for client_id in self._data.census.clients:
            yield client_id, self._data.describe(client_id)

    def as_dict(self) -> dict[str, Any]:
        """The ``sha256``, and the `rows` as ``clients``."""
        return {"sha256": self.sha256, "clients": dict(self.rows())}

    def figure(self) -> Figure | None:
        """The usual figure of a partition: classes by client, the distribution of targets by client, or else sizes."""
        data, ids = self._data, np.asarray(list(self._data.census.clients), dtype=np.int64)
        if not len(ids):
            return None
        train, names = data._ready.train, Names(data.client_names, data.class_names)
        if data.census.has_labels:
            return partition_picture(data.census.class_histogram(), ids, names)
        targets = data.target_values(train.indices)
        if targets is None:
            return sizes_picture(train.sizes[ids], ids, names)
        return target_picture(targets, np.searchsorted(ids, train.owners()), len(ids), ids, names)

    def picture(self) -> NDArray[np.uint8] | None:
        """The data's figure as pixels, shape (height, width, 3)."""
        figure = self._data.figure()
        return None if figure is None else render(figure)
