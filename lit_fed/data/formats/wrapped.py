"""Any plain LightningDataModule as a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lit_fed.data.formats.fields import Key, column, kept, kind_of, plain, sample_of, size_of, usual_target, value_of
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.dataset_module import DatasetModule, Datasets
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.population.targets import checked_targets, count_classes, quantile_strata
from lit_fed.errors import ConfigError, own_traceback, reason

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class _Part:
    """One of the module's data sets.

    Args:
        dataset: The samples.
        collate: Makes a batch of a list of them.
        batch_size: Samples per batch, as the module has it.
        where: The method that gave it, for messages.
    """

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    batch_size: int
    where: str


class Wrapped(DatasetModule):
    """A plain ``LightningDataModule``, cut into clients.

    Its training samples are the clients' (``train_dataloader``), its test samples the test set (``test_dataloader``),
    its validation samples the shared validation set (``val_dataloader``), of which a client's own are those that match
    its training samples, as test samples are matched. Without a ``test_dataloader`` the validation samples are the test
    set. Of the loaders the data set, ``collate_fn`` and the size of batches are kept; order and processes are the
    federation's. A sample may be a tuple or a dictionary of any nesting. On the command line
    ``--data my.module.MyData`` is short for ``--data Wrapped --data.module my.module.MyData``.

    ``prepare_data`` and ``setup`` are called in every process, so that the second call should find all done.

    Args:
        module: What is wrapped.
        target: Where a sample has its target: a position of a tuple, or a key of a dictionary; none given means the
            second of a tuple, or ``label``, ``target`` or ``y`` of a dictionary. Partitions such as `Dirichlet` and the
            pictures need it; batches stay as they are.
        client: Where a sample has its client, a number or a name; goes with `Natural`, which is then the default.
        num_classes: The number of classes; none given means the largest training target + 1, and no classes where
            targets are real numbers.
        class_names: What the classes are called, in their order.
        strata: Sort samples into so many strata by a real target, for partitions to cut by.
        batch_size: Samples per training batch; none given means that of the module's ``train_dataloader``.
        partition: How clients come about; none given means `Natural` with `client`, else `IID`.
        kwargs: The population's other settings, see `FederatedDataModule`, and `num_workers`, see `DatasetModule`.

    Raises:
        ConfigError: The module does what clients could not.
    """

    def __init__(
        self,
        module: LightningDataModule,
        target: int | str | None = None,
        client: int | str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        strata: int | None = None,
        batch_size: int | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        if partition is None and client is not None:
            partition = Natural()
        super().__init__(batch_size=1 if batch_size is None else batch_size, partition=partition, **kwargs)
        self._called = type(module).__name__
        if isinstance(module, FederatedDataModule):
            raise ConfigError(f"data.module {self._called} is a federation already: use it as data, without Wrapped")
        for hook in _TRANSFER:
            if getattr(type(module), hook) is not getattr(LightningDataModule, hook):
                raise ConfigError(
                    f"data.module {self._called} overrides {hook}, which no client would call: do that in the data "
                    "set, in collate_fn, or in the model"
                )
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"data.num_classes is {num_classes}: it must be at least 1, or null")
        if strata is not None and strata < 1:
            raise ConfigError(f"data.strata is {strata}: there must be at least 1 stratum")
        self.module, self._own_batches = module, batch_size is None
        self._target, self._client, self._strata_wanted = target, client, strata
        self._num_classes_given, self._names = num_classes, class_names
        self._parts_found: dict[str, _Part] = {}
        self._targets: dict[str, NDArray[Any] | None] = {}
        self._clients: tuple[list[str], dict[str, IntArray]] | None = None
        self._prepared = False

    def prepare_data(self) -> None:
        """What the module does to have its files."""
        if not self._prepared:
            self._ask("prepare_data")
            self._prepared = True

    # What is known without setup: the module is asked for its loaders once.

    @property
    def num_classes(self) -> int | None:
        """The setting, or what the training targets say; None where they are real numbers or nobody knows where."""
        if self._num_classes_given is None and self._kind() == "class":
            labels = self._target_column("train")
            assert labels is not None
            self._num_classes_given = count_classes(labels, f"{self._called}.train_dataloader")
        if self._names is not None and self._num_classes_given != len(self._names):
            count = self._num_classes_given or "no"
            raise ConfigError(f"data.class_names has {len(self._names)} names for {count} classes: give one each")
        return self._num_classes_given

    @property
    def class_names(self) -> list[str] | None:
        """The setting."""
        return self._names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the first tensor of a sample that is not its target or its client.

        Where a sample holds none, as of a table's rows, that of the batch that ``collate_fn`` makes of it.
        """
        part = self._part("train")
        sample = sample_of(part.dataset, 0, part.where)
        besides = {self._target_key(), self._client}
        shape = _first_shape(sample, besides)
        if shape is None and part.collate is not default_collate:
            batched = _first_shape(_collated(part, sample), besides)
            shape = None if not batched else batched[1:]
        if shape is None:
            raise ConfigError(
                f"{part.where}: a sample holds no tensor beside its target; give inputs as tensors, or a collate_fn "
                "that makes some"
            )
        return shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one real target."""
        if self.num_classes is not None:
            return (self.num_classes,)
        key = self._target_key()
        if self._kind() != "number" or key is None:
            return ()
        part = self._part("train")
        return np.shape(plain(value_of(sample_of(part.dataset, 0, part.where), key, part.where)))

    def own_clients(self) -> int | None:
        """How many clients the training samples name; none without `client`."""
        return None if self._client is None else len(self._client_columns()[0])

    def own_client_names(self) -> list[str] | None:
        """What samples call their clients."""
        return None if self._client is None else self._client_columns()[0]

    def own_clients_are(self) -> tuple[str, str]:
        """See `FederatedDataModule.own_clients_are`."""
        return f"data.client {self._client!r}", "leave it out"

    # What the base asks for.

    def build_datasets(self) -> Datasets:
        """See `DatasetModule.build_datasets`."""
        train, test, has_val = self._part("train"), self._part("test"), "val" in self._parts_found
        if self._own_batches:
            self.batch_size = train.batch_size
        labels = self._cut_by()
        key = self._target_key()
        if self._kind() == "number" and key is not None and "train" not in self._targets:
            self._targets["train"] = kept(train.dataset, key, train.where)  # for pictures; not worth reading them all
        owners = {} if self._client is None else self._client_columns()[1]
        return Datasets(
            train.dataset,
            labels.get("train"),
            test.dataset,
            labels.get("test"),
            train_clients=owners.get("train"),
            test_clients=owners.get("test"),
            source=self._called,
            val=self._parts_found["val"].dataset if has_val else None,
            val_labels=labels.get("val"),
            val_clients=owners.get("val"),
        )

    def collate(self, training: bool) -> Callable[[list[Any]], Any]:
        """The ``collate_fn`` of the module's training loader, or of its test loader."""
        return self._part("train" if training else "test").collate

    def target_values(self, indices: IntArray) -> NDArray[np.float32] | None:
        """Real targets, where partitions asked for them or the data set keeps them at hand."""
        targets = self._targets.get("train")
        return None if targets is None or self.num_classes is not None else targets[indices].astype(np.float32)

    def teardown(self, stage: str) -> None:
        """End the worker processes, and tell the module."""
        super().teardown(stage)
        self.module.teardown(stage)

    # The module.

    def _part(self, name: str) -> _Part:
        if not self._parts_found:
            self.prepare_data()
            self._parts_found = self._open()
        return self._parts_found[name]

    def _open(self) -> dict[str, _Part]:
        there = [name for name in ("train", "val", "test") if _has(self.module, f"{name}_dataloader")]
        if "train" not in there:
            raise ConfigError(
                f"data.module {self._called} has no train_dataloader: clients would have nothing to train on"
            )
        if len(there) == 1:
            raise ConfigError(
                f"data.module {self._called} has neither a test_dataloader nor a val_dataloader: give it one to test on"
            )
        self._ask("setup", "fit")
        found = {name: self._loader(name) for name in there if name != "test"}
        if "test" in there:
            self._ask("setup", "test")
            found["test"] = self._loader("test")
        else:
            found["test"] = found.pop("val")
        return found

    def _loader(self, name: str) -> _Part:
        """One of the module's data sets, once it is known that its samples can be dealt out.

        Raises:
            ConfigError: They cannot.
        """
        where = f"{self._called}.{name}_dataloader"
        loader = self._ask(f"{name}_dataloader")
        if not isinstance(loader, DataLoader):
            raise ConfigError(f"{where} gives a {type(loader).__name__}: give one torch.utils.data.DataLoader")
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"{where} reads an IterableDataset, whose samples cannot be dealt out to clients: give a map-style one"
            )
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            own = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batches"
            raise ConfigError(f"{where} makes batches its own way ({own}), which clients would not: give a batch_size")
        sampler = loader.sampler
        if type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
            raise ConfigError(
                f"{where} draws samples by {type(sampler).__name__}, which clients would not: leave the sampler out"
            )
        size_of(loader.dataset, where)
        return _Part(loader.dataset, loader.collate_fn, loader.batch_size, where)

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.module, method)(*args)
        except Exception as error:  # whatever a user's own module raises
            told = ConfigError(f"data.module {self._called} failed in {method}: {reason(error)}")
            told.details = own_traceback(error)
            raise told from error

    # Its targets and clients.

    def _target_key(self) -> Key | None:
        part = self._part("train")
        return usual_target(sample_of(part.dataset, 0, part.where)) if self._target is None else self._target

    def _kind(self) -> str | None:
        part, key = self._part("train"), self._target_key()
        return None if key is None else kind_of(value_of(sample_of(part.dataset, 0, part.where), key, part.where))

    def _target_column(self, name: str) -> NDArray[Any] | None:
        key = self._target_key()
        if name not in self._targets:
            part = self._part(name)
            self._targets[name] = None if key is None else column(part.dataset, key, part.where)
        return self._targets[name]

    def _cut_by(self) -> dict[str, IntArray | None]:
        """What partitions cut by, for each part."""
        parts = list(self._parts_found)
        if self.num_classes is not None:
            return {name: self._target_column(name) for name in parts}
        if self._strata_wanted is None:
            return {}
        if self._kind() != "number":
            raise ConfigError(
                f"data.strata is {self._strata_wanted}, but the samples of {self._called} have no real target"
            )
        numbers = {}
        for name in parts:
            numbers[name] = checked_targets(
                np.asarray(self._target_column(name)), self.output_shape, f"targets of {self._part(name).where}"
            )
            self._targets[name] = numbers[name]
        first = {name: values.reshape(len(values), -1)[:, 0] for name, values in numbers.items()}
        found = {name: quantile_strata(first["train"], first[name], self._strata_wanted) for name in parts}
        return {name: pair[0] if name == "train" else pair[1] for name, pair in found.items()}

    def _client_columns(self) -> tuple[list[str], dict[str, IntArray]]:
        """The clients' names in their order, and the number of each sample's."""
        if self._clients is None:
            assert self._client is not None
            self._part("train")
            parts = self._parts_found.items()
            values = {name: column(part.dataset, self._client, part.where).tolist() for name, part in parts}
            if odd := next((one for one in values["train"] if isinstance(one, float | list)), None):
                raise ConfigError(
                    f"{self._part('train').where}: {odd!r} at {self._client!r} is no client: give names or integers"
                )
            names = in_order(values["train"])
            self._clients = (names, {name: numbered(own, names) for name, own in values.items()})
        return self._clients


def _collated(part: _Part, sample: Any) -> Any:
    try:
        return part.collate([sample])
    except Exception as error:  # whatever a user's own code raises
        told = ConfigError(f"{part.where}: collate_fn fails on one sample ({reason(error)}); correct it")
        told.details = own_traceback(error)
        raise told from error


def _has(module: LightningDataModule, method: str) -> bool:
    """Whether a module has a method of its own, by its class or by ``LightningDataModule.from_datasets``."""
    return getattr(getattr(module, method), "__func__", None) is not getattr(LightningDataModule, method)


def _first_shape(value: Any, but: set[Key | None]) -> tuple[int, ...] | None:
    """The shape of the first tensor in a sample, but for what it has in some places."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        entries: list[tuple[Key, Any]] = list(value.items())
    elif isinstance(value, tuple | list):
        entries = list(enumerate(value))
    else:
        return None
    found = (_first_shape(entry, set()) for key, entry in entries if key not in but)
    return next((shape for shape in found if shape is not None), None)
