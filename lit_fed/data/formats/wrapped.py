"""Any plain LightningDataModule as a population: the fields of its samples, the target and the client among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.loaders.worker_loader import isolated_randomness, loader_of_all
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.partition import Natural, Partition
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.dataset_module import DatasetModule
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.population.targets import checked_targets, count_classes, quantile_strata
from lit_fed.data.population.views import viewed
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError, own_traceback, reason

Key = int | str
"""A position in a tuple, or a key of a dictionary."""
_USUAL_KEYS = ("label", "labels", "target", "targets", "y")
_LOOKED_AT = 8  # samples to compare with a list beside the data set


@contextmanager
def refusing(line: str) -> Iterator[None]:
    """Turn any error of a user's code into a `ConfigError` with its traceback; ``{}`` in `line` is its reason."""
    try:
        yield
    except Exception as error:  # whatever a user's code raises
        raise ConfigError(line.replace("{}", reason(error)), own_traceback(error)) from error


def sample_of(dataset: Dataset[Any], index: int, what: str) -> Any:
    """One sample."""
    with refusing(f"{what}: sample {index} cannot be read ({{}}); correct its data set"), isolated_randomness(index):
        return dataset[index]


def usual_target(sample: Any) -> Key | None:
    """The likely place of a target: the second entry of a tuple, or a dictionary's ``label`` and the like."""
    if isinstance(sample, tuple | list):
        return 1 if len(sample) > 1 else None
    if isinstance(sample, Mapping):
        return next((key for key in _USUAL_KEYS if key in sample), None)
    return None


def value_of(sample: Any, key: Key, what: str) -> Any:
    """A field of a sample."""
    if isinstance(sample, Mapping) and key in sample:
        return sample[key]
    if isinstance(sample, tuple | list) and isinstance(key, int) and -len(sample) <= key < len(sample):
        return sample[key]
    if isinstance(sample, Mapping):
        there = f"is a dictionary of {', '.join(map(str, sample))}"
    elif isinstance(sample, tuple | list):
        there = f"is a {type(sample).__name__} of {len(sample)}"
    else:
        there = f"is a {type(sample).__name__}, neither a tuple nor a dictionary"
    raise ConfigError(f"{what}: a sample has no field {key!r}, as it {there}; correct the setting")


def column(dataset: Dataset[Any], key: Key, what: str) -> NDArray[Any]:
    """A field of all samples, as an array with a row per sample.

    Taken from the usual attributes (``targets``, ``labels``, the field's name, the tensors of a `TensorDataset`, also
    within `Subset` and `ConcatDataset`) if some samples agree with them; else every sample is read.
    """
    if (values := stored_field(dataset, key, what)) is not None:
        return values
    rows = [plain(value_of(sample_of(dataset, index, what), key, what)) for index in range(size_of(dataset, what))]
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise ConfigError(f"{what}: the samples' field {key!r} differs in shape; correct the setting") from error


def stored_field(dataset: Dataset[Any], key: Key, what: str) -> NDArray[Any] | None:
    """A field from an attribute of the data set, if some samples agree with it; else None."""
    count, values = size_of(dataset, what), _attribute(dataset, key)
    if values is None or len(values) != count:
        return None
    looked_at = np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)).tolist()
    said = [plain(value_of(sample_of(dataset, index, what), key, what)) for index in looked_at]
    return values if all(np.array_equal(value, values[at]) for value, at in zip(said, looked_at, strict=True)) else None


def size_of(dataset: Dataset[Any], what: str) -> int:
    """Number of samples."""
    count = len(dataset) if isinstance(dataset, Sized) else 0
    if not count:
        lacks = "samples; add some" if isinstance(dataset, Sized) else "__len__; implement it"
        raise ConfigError(f"{what}: its data set has no {lacks}")
    return count


def plain(value: Any) -> Any:
    """A value with tensors as NumPy arrays."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _attribute(dataset: Dataset[Any], key: Key) -> NDArray[Any] | None:
    """A field in an attribute of the data set; None without such an attribute."""
    if isinstance(dataset, Subset):
        whole = _attribute(dataset.dataset, key)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_attribute(part, key) for part in dataset.datasets]
        there = [part for part in parts if part is not None]
        return (
            np.concatenate(there)
            if len(there) == len(parts) and len({array_part.shape[1:] for array_part in there}) == 1
            else None
        )
    if isinstance(dataset, TensorDataset):
        at = isinstance(key, int) and -len(dataset.tensors) <= key < len(dataset.tensors)
        return dataset.tensors[key].cpu().numpy() if at and isinstance(key, int) else None
    names = [key] if isinstance(key, str) else ["targets", "labels"]
    for name in names:
        values = getattr(dataset, name, None)
        if isinstance(values, Tensor | np.ndarray | list | tuple):
            array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
            return array if array.ndim and array.dtype != object else None
    return None


def kind_of(value: Any) -> str | None:
    """``class`` for an integer, ``number`` for one or more floating-point numbers, else None."""
    array = np.asarray(plain(value)) if isinstance(value, Tensor | np.ndarray | np.generic | int | float) else None
    if array is None or array.ndim > 1:
        return None
    if array.dtype.kind in "iub":
        return "class" if array.ndim == 0 else None
    return "number" if array.dtype.kind == "f" or (torch.is_tensor(value) and value.is_floating_point()) else None


_OF_LOADERS = ("batch_size", "test_batch_size", "shared_batch_size", "drop_last", "num_workers")
_OF_WORKERS = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Wrapped(DatasetModule):
    """A plain ``LightningDataModule``, cut into clients.

    ``train_dataloader`` gives the clients' samples, ``test_dataloader`` the test set, and ``val_dataloader`` the shared
    validation set, or the test set without a ``test_dataloader``. A client's own validation samples match its training
    samples, as its test samples do. The loaders' data set, ``collate_fn`` and batch size are kept; order and processes
    are the federation's. A sample is a tuple or a dictionary of any nesting. On the command line ``--data
    my.module.MyData`` is short for ``--data Wrapped --data.module my.module.MyData``.

    ``prepare_data`` and ``setup`` are called in every process, so a second call should be a no-op.

    Args:
        module: The module to wrap.
        target: A sample's target: a position of a tuple or a key of a dictionary; null for the second of a tuple, or
            ``label``, ``target`` or ``y`` of a dictionary. Partitions such as `Dirichlet` and the pictures need it;
            batches are unchanged.
        client: A sample's client, a number or a name, likewise; the default partition is then `Natural`.
        num_classes: Number of classes; null for the largest training target + 1, or for numerical targets.
        class_names: Names of the classes, in their order.
        strata: Number of strata by a numerical target, for partitions to cut by.
        batch_size: Samples per training batch; null for that of the module's ``train_dataloader``.
        test_batch_size: Samples per batch in evaluation; null for those of ``val_dataloader`` and ``test_dataloader``.
        shared_batch_size: Samples per batch of the shared test and validation sets; null for `test_batch_size`.
        drop_last: Drop a client's last training batch if it is smaller than the others; null for the setting of
            ``train_dataloader``.
        num_workers: Processes that prepare samples for all clients; null for those of the module's loaders.
        partition: Cuts the samples into clients; null for `Natural` with `client`, else `IID`.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: The module has hooks or loaders that clients cannot use.
    """

    class_names: list[str] | None = None

    def __init__(
        self,
        module: LightningDataModule,
        target: int | str | None = None,
        client: int | str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        strata: int | None = None,
        batch_size: int | None = None,
        test_batch_size: int | None = None,
        shared_batch_size: int | None = None,
        drop_last: bool | None = None,
        num_workers: int | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        if partition is None and client is not None:
            partition = Natural()
        values = (batch_size, test_batch_size, shared_batch_size, drop_last, num_workers)
        given: dict[str, Any] = {
            name: value for name, value in zip(_OF_LOADERS, values, strict=True) if value is not None
        }
        super().__init__(partition=partition, **given, **kwargs)
        self._called = type(module).__name__
        if isinstance(module, FederatedDataModule):
            raise ConfigError(
                f"data.module {self._called} is already a federated data module; use it as data, without Wrapped"
            )
        for hook in _TRANSFER:
            if getattr(type(module), hook) is not getattr(LightningDataModule, hook):
                raise ConfigError(
                    f"data.module {self._called} overrides {hook}, which clients do not call; move it to the data set, "
                    "to collate_fn, or to the model"
                )
        check_range("data.num_classes", num_classes, least=1, null="to count them")
        check_range("data.strata", strata, least=1, null="for none")
        self.module, self._given = module, frozenset(given)
        self._target, self._client, self._strata_wanted = target, client, strata
        self._num_classes_given, self.class_names = num_classes, class_names
        self._targets: dict[str, NDArray[Any] | None] = {}
        self._prepared = self._counts = False

    @override
    def prepare_data(self) -> None:
        if not self._prepared:
            self._ask("prepare_data")
            self._prepared = True

    # Known without setup; the module's loaders are made once.

    @override
    def pooled(self) -> str | None:
        if self._counts:
            return "data.num_classes is counted over all clients' labels; give it"
        if self._strata_wanted is not None:
            return "data.strata cuts by quantiles of all clients' targets; leave it out"
        return None

    @property
    def num_classes(self) -> int | None:
        """The setting, or the count of the training targets; None if they are numerical or unknown."""
        if self._num_classes_given is None and self._kind() == "class":
            labels = self._target_column("train")
            assert labels is not None
            self._num_classes_given, self._counts = count_classes(labels, f"{self._called}.train_dataloader"), True
        if self.class_names is not None and self._num_classes_given != len(self.class_names):
            count = self._num_classes_given or "no"
            raise ConfigError(f"data.class_names has {len(self.class_names)} names for {count} classes; give one each")
        return self._num_classes_given

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the first tensor of a sample that is not its target or its client.

        If a sample does not hold a tensor, such as a table's row, the shape comes from ``collate_fn``'s batch.
        """
        part, where, sample = self._loaders["train"], self._where("train"), self._sample()
        besides = {self._target_key(), self._client}
        shape = _first_shape(sample, besides)
        if shape is None and part.collate_fn is not default_collate:
            with refusing(f"{where}: collate_fn fails on one sample ({{}}); correct it"):
                batch = part.collate_fn([sample])
            batched = _first_shape(batch, besides)
            shape = None if not batched else batched[1:]
        if shape is None:
            raise ConfigError(
                f"{where}: a sample holds no tensor beside its target; give inputs as tensors, or a collate_fn "
                "that makes some"
            )
        return shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one numerical target."""
        if self.num_classes is not None:
            return (self.num_classes,)
        key = self._target_key()
        if self._kind() != "number" or key is None:
            return ()
        return np.shape(plain(value_of(self._sample(), key, self._where("train"))))

    @override
    def own_client_names(self) -> list[str] | None:
        return None if self._client is None else self._clients[0]

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.client {self._client!r}", "leave data.client out"

    @override
    def build_datasets(self) -> Parts:
        train, test = self._loaders["train"], self._loaders["test"]
        own = {"batch_size": train.batch_size, "test_batch_size": test.batch_size, "drop_last": train.drop_last}
        for name in own.keys() - self._given:
            setattr(self, name, own[name])
        labels = self._cut_by()
        key = self._target_key()
        if self._kind() == "number" and key is not None and "train" not in self._targets:
            # For pictures, if no sample need be read.
            self._targets["train"] = stored_field(train.dataset, key, self._where("train"))
        owners = {} if self._client is None else self._clients[1]
        parts = {
            name: Part(loader.dataset, clients=owners.get(name), strata=labels.get(name))
            for name, loader in self._loaders.items()
        }
        return Parts(parts["train"], parts["test"], parts.get("val"), source=self._called)

    @override
    def collates(self) -> dict[str, Callable[[list[Any]], Any] | None]:
        """The ``collate_fn`` of each of the module's loaders; training samples held out have the test loader's."""
        own = {part: loader.collate_fn for part, loader in self._loaders.items()}
        return {"plain": own["test"], **own}

    @override
    def worker_options(self, training: bool) -> dict[str, Any]:
        return self._workers_of(self._loaders["train" if training else "test"])

    def _workers_of(self, loader: DataLoader[Any]) -> dict[str, Any]:
        given = {"num_workers": self.num_workers} if "num_workers" in self._given else {}
        return {name: getattr(loader, name) for name in _OF_WORKERS} | given

    @override
    def evaluation_batch_size(self, part: Literal["val", "test"], shared: bool) -> int:
        if "test_batch_size" in self._given or (shared and "shared_batch_size" in self._given):
            return super().evaluation_batch_size(part, shared)
        return self._loaders[part if part in self._loaders else "test"].batch_size or 1

    @override
    def predict_dataloader(self) -> Any:
        """All samples of the module's ``predict_dataloader``, or the shared test set without one."""
        if not _has(self.module, "predict_dataloader"):
            return super().predict_dataloader()
        self._ask("setup", "predict")
        loader = self._loader("predict")
        self._print_choices({"predict": loader})
        size, finish, workers = loader.batch_size or 1, self.finish_batch, self._workers_of(loader)
        whole = loader_of_all(loader.dataset, size, finish, self._device, loader.collate_fn, **workers)
        return viewed(whole, self.shared_view())

    def target_values(self, indices: IntArray) -> NDArray[Any] | None:
        """Numerical targets, if partitions have read them or the data set holds them as an attribute."""
        targets = self._targets.get("train")
        return None if targets is None or self.num_classes is not None else targets[indices]

    def teardown(self, stage: str) -> None:
        """End the worker processes, and tear down the module."""
        super().teardown(stage)
        self.module.teardown(stage)

    # The module.

    @cached_property
    def _loaders(self) -> dict[str, DataLoader[Any]]:
        self.prepare_data()
        there = [name for name in ("train", "val", "test") if _has(self.module, f"{name}_dataloader")]
        if "train" not in there:
            raise ConfigError(f"data.module {self._called} has no train_dataloader; give it one to train on")
        if len(there) == 1:
            raise ConfigError(
                f"data.module {self._called} has neither a test_dataloader nor a val_dataloader; give it one to test on"
            )
        self._ask("setup", "fit")
        loaders = {name: self._loader(name) for name in there if name != "test"}
        if "test" in there:
            self._ask("setup", "test")
            loaders["test"] = self._loader("test")
        else:
            loaders["test"] = loaders.pop("val")
        self._print_choices(loaders)
        return loaders

    def _print_choices(self, loaders: Mapping[str, DataLoader[Any]]) -> None:
        """Name the arguments of the module's loaders that the federation replaces."""
        found = {self._where(part): replaced_of(loader, part == "train") for part, loader in loaders.items()}
        if lines := [f"{', '.join(names)} of {where}" for where, names in found.items() if names]:
            remark(f"the federation replaces {'; '.join(lines)} (docs/own_data.md has the table)")

    def _loader(self, name: str) -> DataLoader[Any]:
        """One of the module's data sets."""
        where = f"{self._called}.{name}_dataloader"
        loader = self._ask(f"{name}_dataloader")
        if not isinstance(loader, DataLoader):
            raise ConfigError(f"{where} returns a {type(loader).__name__}; return one torch.utils.data.DataLoader")
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"{where} reads an IterableDataset, which cannot be split among clients; give a map-style data set"
            )
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            made_by = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batches"
            raise ConfigError(
                f"{where} has a custom batch sampler ({made_by}), which clients do not use; give a batch_size"
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise ConfigError(
                f"{where} returns a {type(loader).__name__} that overrides __iter__, which clients do not call; move "
                "it to the data set or to collate_fn"
            )
        sampler: Any = loader.sampler
        count = size_of(loader.dataset, where)
        plain = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
        if not plain or len(sampler) != count:
            of = "" if not plain else f" of {len(sampler)} of {count} samples"
            raise ConfigError(
                f"{where} has the sampler {type(sampler).__name__}{of}, which clients do not use; leave it out"
            )
        return loader

    def _ask(self, method: str, *args: Any) -> Any:
        with refusing(f"data.module {self._called} failed in {method}: {{}}"):
            return getattr(self.module, method)(*args)

    def _where(self, name: str) -> str:
        """A part's method of the module, for errors."""
        asked = "val" if name == "test" and not _has(self.module, "test_dataloader") else name
        return f"{self._called}.{asked}_dataloader"

    def _sample(self) -> Any:
        """The first training sample."""
        return sample_of(self._loaders["train"].dataset, 0, self._where("train"))

    def _target_key(self) -> Key | None:
        return usual_target(self._sample()) if self._target is None else self._target

    def _kind(self) -> str | None:
        key = self._target_key()
        return None if key is None else kind_of(value_of(self._sample(), key, self._where("train")))

    def _target_column(self, name: str) -> NDArray[Any] | None:
        key = self._target_key()
        if name not in self._targets:
            self._targets[name] = None if key is None else column(self._loaders[name].dataset, key, self._where(name))
        return self._targets[name]

    def _cut_by(self) -> dict[str, IntArray | None]:
        """Strata of each part."""
        parts = list(self._loaders)
        if self.num_classes is not None:
            return {name: self._target_column(name) for name in parts}
        if self._strata_wanted is None:
            return {}
        if self._kind() != "number":
            raise ConfigError(
                f"data.strata is {self._strata_wanted}, and {self._called} has no numerical target; leave it out"
            )
        numbers = {}
        for name in parts:
            numbers[name] = checked_targets(
                np.asarray(self._target_column(name)), self.output_shape, f"targets of {self._where(name)}"
            )
            self._targets[name] = numbers[name]
        first = {name: values.reshape(len(values), -1)[:, 0] for name, values in numbers.items()}
        strata = {name: quantile_strata(first["train"], first[name], self._strata_wanted) for name in parts}
        return {name: pair[0] if name == "train" else pair[1] for name, pair in strata.items()}

    @cached_property
    def _clients(self) -> tuple[list[str], dict[str, IntArray]]:
        """The clients' names in order, and the number of each sample's client."""
        assert self._client is not None
        values = {
            name: column(part.dataset, self._client, self._where(name)).tolist() for name, part in self._loaders.items()
        }
        if odd := next((value for value in values["train"] if isinstance(value, float | list)), None):
            raise ConfigError(
                f"{self._where('train')}: {odd!r} at {self._client!r} is not a client; give names or integers"
            )
        names = in_order(values["train"])
        return names, {name: numbered(column_values, names) for name, column_values in values.items()}


def replaced_of(loader: DataLoader[Any], training: bool) -> list[str]:
    """The arguments of a loader that differ from those with which the federation reads its data set."""
    shuffles = isinstance(loader.sampler, RandomSampler)
    found = [f"shuffle={shuffles}"] * (shuffles != training) + ["drop_last=True"] * (loader.drop_last and not training)
    used = {"generator": None, "persistent_workers": loader.num_workers > 0, "in_order": True}
    return [*found, *(name for name, value in used.items() if getattr(loader, name, value) != value)]


def _has(module: LightningDataModule, method: str) -> bool:
    """Whether a module defines a method, in its class or by ``LightningDataModule.from_datasets``."""
    return getattr(getattr(module, method), "__func__", None) is not getattr(LightningDataModule, method)


def _first_shape(value: Any, but: set[Key | None]) -> tuple[int, ...] | None:
    """The shape of the first tensor in a sample, except in some fields."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        entries: list[tuple[Key, Any]] = list(value.items())
    elif isinstance(value, tuple | list):
        entries = list(enumerate(value))
    else:
        return None
    shapes = (_first_shape(entry, set()) for key, entry in entries if key not in but)
    return next((shape for shape in shapes if shape is not None), None)
