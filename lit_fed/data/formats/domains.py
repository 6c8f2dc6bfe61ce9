"""Several data sets as the clients of one federation: the same classes, seen differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.loaders.transforms import Step
from lit_fed.data.partitions.csr import CSR, ClientIndices, IntArray, offsets_of
from lit_fed.data.partitions.cut import Part, Parts, subset
from lit_fed.data.partitions.partition import Partition, Samples
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.files import NewInputs
from lit_fed.data.population.hooks import SUBSETS, Batches, Subset
from lit_fed.data.population.views import View, viewed
from lit_fed.errors import ConfigError

T = TypeVar("T")
_OWN = ("make_cut", "train_loader", "val_loader", "test_loader", "calibration_loader", "public_loader", "views")
"""Methods of a population that cuts or shows its clients in its own way."""
_SHARED = (
    *("batch_size", "test_batch_size", "val_fraction", "max_test_samples", "drop_last", "fresh_batches"),
    "stratified_public",
)
"""Settings of the population, not of a domain."""


class Domains(FederatedDataModule):
    """Data sets of several sources as the clients of one federation: digits of other hands, cameras, hospitals.

    All domains have the same classes, or targets, and inputs of one shape; they differ in P(x), which is feature shift.
    A domain is one client, or as many as its `num_clients` or its natural clients, cut by its `partition`. The shared
    test set joins those of the domains. Training batches of a plain ``lightning.Trainer`` and shuffled public batches
    hold samples of one domain each, in random order.

    Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
    arXiv:2102.07623, section 5 (digits of five sources, and four domains of offices, a client each).

    Args:
        domains: Data modules by the domain's name. A domain's own settings are those of its data set, `num_clients`,
            `partition`, `skew`, `max_train_samples` and `seed`, to which the population's is added; all others are the
            population's.
        transforms: A domain's transform of a batch of inputs (B, …) as the network sees them, such as one of
            ``torchvision.transforms.v2``, in training and in all tests; it may draw from torch's generator.
        kwargs: The population's settings, see `FederatedDataModule`.

    Raises:
        ConfigError: Domains differ in shape or classes, or a domain sets what is the population's.
    """

    def __init__(
        self,
        domains: dict[str, FederatedDataModule],
        transforms: dict[str, nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=None, partition=_OfDomains(self), **kwargs)
        if not domains:
            raise ConfigError("data.domains is empty; give one data module or more, by the domain's name")
        self.transforms = dict(transforms or {})
        if strange := next((name for name in self.transforms if name not in domains), None):
            raise ConfigError(
                f"data.transforms names {strange!r}, and data.domains has {', '.join(domains)}; correct it"
            )
        for name, module in domains.items():
            _check(f"data.domains.{name}", module)
        self.domains = dict(domains)
        self._parts: list[Parts] = []

    # Known without setup.

    @cached_property
    def starts(self) -> IntArray:
        """The first client of each domain, and the number of clients, shape (domains + 1,)."""
        counts = list[int]()
        for module in self.domains.values():
            count = module._num_clients or module.partition.count(module.own_clients) or 1
            module._num_clients = count  # not the default of a population of its own
            counts.append(count)
        return offsets_of(np.array(counts, dtype=np.int64))

    def of_client(self, client_id: int) -> tuple[str, int]:
        """A client's domain, and the client's number there."""
        place = int(np.searchsorted(self.starts, client_id, side="right")) - 1
        return list(self.domains)[place], client_id - int(self.starts[place])

    @property
    @override
    def client_names(self) -> list[str]:
        """The domain's name, or ``domain/client`` in a domain of several clients."""
        names = list[str]()
        for (name, module), count in zip(self.domains.items(), np.diff(self.starts).tolist(), strict=True):
            inner = module.client_names or list(map(str, range(count)))
            names += [name] if count == 1 else [f"{name}/{client}" for client in inner]
        return names

    def _common(self, key: str, read: Callable[[FederatedDataModule], T]) -> T:
        """A property that all domains share."""
        values = {name: read(module) for name, module in self.domains.items()}
        (first, wanted), *rest = values.items()
        if other := next((name for name, value in rest if value != wanted), None):
            raise ConfigError(
                f"data.domains.{first} has {key} {wanted}, and data.domains.{other} has {values[other]}; domains share "
                "classes and shapes, so set the images' size, channels or classes alike"
            )
        return wanted

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return self._common("input_shape", lambda data: data.input_shape)

    @property
    @override
    def num_classes(self) -> int | None:
        return self._common("num_classes", lambda data: data.num_classes)

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        return self._common("output_shape", lambda data: data.output_shape)

    @property
    @override
    def class_names(self) -> list[str] | None:
        return self._common("class_names", lambda data: data.class_names)

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens of texts; None for other inputs."""
        return self._common("vocab_size", lambda data: getattr(data, "vocab_size", None))

    @override
    def pooled(self) -> str | None:
        lines = ((name, module.pooled()) for name, module in self.domains.items())
        return next((f"data.domains.{name}: {line}" for name, line in lines if line is not None), None)

    @override
    def preprocessing(self) -> list[Step] | None:
        """The domains' common steps; None if they differ or a domain has a transform."""
        first, *rest = (module.preprocessing() for module in self.domains.values())
        return first if not self.transforms and all(steps == first for steps in rest) else None

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str] | None:
        """As the domains store inputs, or as the network sees them if their steps differ."""
        if self.preprocessing() is None:
            return self.input_shape, "int64" if self.vocab_size is not None else "float32"
        return next(iter(self.domains.values())).stored_like()

    # Reading.

    @override
    def prepare_data(self) -> None:
        for module in self.domains.values():
            module.prepare_data()

    @override
    def read_parts(self) -> Parts:
        _ = self.input_shape, self.output_shape, self.class_names, self.starts
        for name, module in self.domains.items():
            module.drop_last, module.fresh_batches = self.drop_last, self.fresh_batches
            parts = module.read_parts().checked(module.num_classes)
            module._check_own_clients(parts.train.clients)
            if parts.val is not None:
                raise ConfigError(
                    f"data.domains.{name} has a separate validation set; leave it out and set data.val_fraction"
                )
            self._parts.append(parts)
        train, test = (_joined([getattr(parts, part) for parts in self._parts]) for part in ("train", "test"))
        return Parts(train, test, source=f"domains {', '.join(self.domains)}")

    def _offsets(self, part: Subset) -> IntArray:
        """The first sample of each domain, and the number of samples."""
        return offsets_of(np.array([len(getattr(parts, part)) for parts in self._parts], dtype=np.int64))

    def _by_domain(self, part: Subset, indices: IntArray) -> Iterator[tuple[str, NDArray[np.bool_], IntArray]]:
        """The domains that have some of the samples (n,): name, a mask of these, and their numbers in the domain."""
        offsets = self._offsets(part)
        places = np.searchsorted(offsets, indices, side="right") - 1
        for place in np.unique(places):
            mask = places == place
            yield list(self.domains)[place], mask, indices[mask] - offsets[place]

    @override
    def make_loader(self, batches: Batches) -> Loader:
        loaders = [
            viewed(
                self.domains[name].make_loader(replace(batches, indices=indices)), self._look(name), batches.generator
            )
            for name, _, indices in self._by_domain(batches.subset, batches.indices)
        ]
        return loaders[0] if len(loaders) == 1 else _Joined(loaders, batches.generator)

    @override
    def make_public_loader(self, batches: Batches) -> Loader:
        loaders = list[Loader]()
        for name, mask, indices in self._by_domain("train", batches.indices):
            look = partial(_placed, self._look(name), torch.from_numpy(np.flatnonzero(mask)))
            own = self.domains[name].make_public_loader(replace(batches, indices=indices))
            loaders.append(viewed(own, look, batches.generator))
        return loaders[0] if len(loaders) == 1 else _Joined(loaders, batches.generator)

    def _look(self, name: str) -> View | None:
        return None if name not in self.transforms else partial(_transformed, self.transforms[name], name)

    @override
    def view(self, client_id: int) -> View | None:
        name, client = self.of_client(client_id)
        return self.domains[name].seen(client)

    @override
    def target_values(self, indices: IntArray) -> NDArray[Any] | None:
        values: NDArray[np.float64] | None = None
        for name, mask, own in self._by_domain("train", indices):
            if (found := self.domains[name].target_values(own)) is None:
                return None
            values = np.empty((len(indices), *found.shape[1:]), dtype=np.float64) if values is None else values
            values[mask] = found
        return values

    @override
    def read_contents(self) -> Iterator[NDArray[Any]]:
        for module in self.domains.values():
            yield from module.read_contents()

    @override
    def keep(self, train: IntArray, test: IntArray) -> None:
        rows = {part: dict.fromkeys(self.domains, train[:0]) for part in ("train", "test")}
        for part, indices in zip(SUBSETS, (train, test), strict=True):
            rows[part] |= {name: own for name, _, own in self._by_domain(part, indices)}
        for name, module in self.domains.items():
            module.keep(rows["train"][name], rows["test"][name])

    @override
    def move_to(self, device: torch.device) -> None:
        for module in self.domains.values():
            module.move_to(device)

    @override
    def teardown(self, stage: str) -> None:
        for module in self.domains.values():
            module.teardown(stage)

    @override
    def describe(self, client_id: int) -> dict[str, Any]:
        """Also the client's ``domain``."""
        return super().describe(client_id) | {"domain": self.of_client(client_id)[0]}

    @override
    def new_inputs(self, path: Path) -> NewInputs:
        raise ConfigError(f"Domains cannot tell the domain of {path}; predict with the domain's own data module")


def _check(key: str, module: FederatedDataModule) -> None:
    """Refuse a module that is not cut or shown by the population, or that sets what is the population's."""
    if not isinstance(module, FederatedDataModule):
        raise ConfigError(f"{key} is {type(module).__name__}, not a data module of lit_fed; wrap it in Wrapped")
    if isinstance(module, Domains):
        raise ConfigError(f"{key}: Domains cannot be a domain; name its own in data.domains")
    if own := next(
        (name for name in _OWN if getattr(type(module), name) is not getattr(FederatedDataModule, name)), None
    ):
        raise ConfigError(f"{key}: {type(module).__name__} has a {own} of its own, which domains do not; leave it out")
    defaults = inspect.signature(FederatedDataModule).parameters
    for setting in _SHARED:
        if (value := getattr(module, setting)) != defaults[setting].default:
            raise ConfigError(f"{key}.{setting} is {value}, and all domains share it; set data.{setting} instead")


def _joined(parts: Sequence[Part]) -> Part:
    """Domains' samples by number, with the strata and numerical targets that all domains have."""
    there: list[list[NDArray[Any]]] = [
        [value for value in values if value is not None]
        for values in ([part.strata for part in parts], [part.y for part in parts])
    ]
    strata, y = (np.concatenate(arrays) if len(arrays) == len(parts) else None for arrays in there)
    numbers = None if y is None or y.dtype.kind != "f" else y
    return Part(np.arange(sum(map(len, parts))), numbers, None, strata)


def _transformed(transform: nn.Module, name: str, batch: Any) -> Any:
    """A batch with its inputs transformed: the batch itself, or its first entry."""
    x = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"data.transforms.{name} needs inputs of one tensor, not {type(x).__name__}; leave it out")
    changed = transform(x)
    if changed.shape != x.shape:
        raise ConfigError(
            f"data.transforms.{name} turns inputs of shape {tuple(x.shape[1:])} into {tuple(changed.shape[1:])}; "
            "choose a transform that keeps their shape"
        )
    return changed if x is batch else (changed, *batch[1:])


def _placed(look: View | None, places: torch.Tensor, batch: Any) -> Any:
    """A batch (x, position in the domain's share) with its place in the whole public set."""
    x, index = batch if look is None else look(batch)
    return x, places.to(index.device)[index]


class _Joined:
    """Batches of several loaders: one loader after the other, or with a generator in random order."""

    def __init__(self, loaders: list[Loader], generator: torch.Generator | None) -> None:
        self._loaders, self._generator = loaders, generator
        self.num_samples = sum(loader.num_samples for loader in loaders)

    def __len__(self) -> int:
        return sum(map(len, self._loaders))

    def __iter__(self) -> Iterator[Any]:
        turns = torch.repeat_interleave(torch.arange(len(self._loaders)), torch.tensor([*map(len, self._loaders)]))
        if self._generator is not None:
            turns = turns[torch.randperm(len(turns), generator=self._generator)]
        batches = [iter(loader) for loader in self._loaders]
        for turn in turns.tolist():
            yield next(batches[turn])


class _OfDomains(Partition):
    """Each domain's samples, cut by the domain's own partition."""

    keeps_clients = True

    def __init__(self, data: Domains) -> None:
        self._data = data

    @override
    def count(self, own: Any) -> int:
        return int(self._data.starts[-1])

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        rows, sizes = list[IntArray](), list[IntArray]()
        for (module, part, numbers, source, start), own in zip(
            self._each("train", samples), self._counts(), strict=True
        ):
            most, own_seed = module.max_train_samples, seed + module.seed
            chosen = subset(len(numbers), most, own_seed, "train")
            cut = module.partition(part.samples(numbers[chosen], source), own, own_seed)
            rows.append(start + chosen[cut.indices])
            sizes.append(cut.sizes)
        return CSR.from_sizes(np.concatenate(rows), np.concatenate(sizes))

    @override
    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        splits, first = list[tuple[ClientIndices, int]](), 0
        each = zip(self._each("train", train_samples), self._each("test", test_samples), self._counts(), strict=True)
        for (module, part, numbers, source, start), (_, test_part, tested, _, test_start), own in each:
            lists = [train[client] - start for client in range(first, first + own)]
            local = CSR.from_sizes(np.concatenate(lists), np.array([len(row) for row in lists]))
            samples, test = part.samples(numbers, source), test_part.samples(tested, source)
            splits.append((module.partition.split_test(local, samples, test, seed + module.seed), test_start))
            first += own
        return _TestSplits(splits, self._data.starts)

    def _counts(self) -> list[int]:
        counts: list[int] = np.diff(self._data.starts).tolist()
        return counts

    def _each(self, part: Subset, samples: Samples) -> Iterator[tuple[FederatedDataModule, Part, IntArray, str, int]]:
        """Of each domain its module, its part, its samples' numbers in it, its name, and its first sample's place."""
        assert samples.numbers is not None
        offsets, data = self._data._offsets(part), self._data
        bounds = np.searchsorted(samples.numbers, offsets).tolist()
        for place, (name, module) in enumerate(data.domains.items()):
            start, stop = bounds[place : place + 2]
            numbers = samples.numbers[start:stop] - offsets[place]
            yield module, getattr(data._parts[place], part), numbers, f"data.domains.{name}", start

    def __repr__(self) -> str:
        return f"Domains({', '.join(f'{name}: {module.partition}' for name, module in self._data.domains.items())})"


class _TestSplits:
    """The domains' test splits as one."""

    def __init__(self, splits: list[tuple[ClientIndices, int]], starts: IntArray) -> None:
        self._splits, self._starts = splits, starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, client_id: int) -> IntArray:
        place = int(np.searchsorted(self._starts, client_id, side="right")) - 1
        split, start = self._splits[place]
        return split[client_id - int(self._starts[place])] + start
