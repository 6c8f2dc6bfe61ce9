"""Partitions, which cut one data set into many clients.

A `Partition` is a function of (samples, number of clients, seed), stateless and without side effects, and vectorised:
100,000 clients are cut in one sweep. To write one, subclass `Partition` and implement `assign`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import CSR, ClientIndices, IntArray
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator


@dataclass(frozen=True)
class Samples:
    """The facts about samples that a partition may cut by.

    Args:
        size: Number of samples, n.
        strata: Class or other stratum of each sample, counted from 0, shape (n,); None for neither.
        clients: The data set's own client of each sample, counted from 0, shape (n,); None without clients.
        source: The samples' origin, for errors.
        numbers: The data set's number of each sample, ascending, shape (n,); None for 0 … n − 1.
        total: Number of samples of the data set; None for n.
        targets: Numerical target of each sample, the first of several, shape (n,); None without known ones.
    """

    size: int
    strata: IntArray | None = None
    clients: IntArray | None = None
    source: str = "the data set"
    numbers: IntArray | None = None
    total: int | None = None
    targets: NDArray[np.floating[Any]] | None = None

    @classmethod
    def from_strata(cls, strata: IntArray, clients: IntArray | None = None) -> Samples:
        """Samples with a stratum each."""
        return cls(len(strata), np.asarray(strata, dtype=np.int64), clients)

    def strata_for(self, partition: Partition) -> IntArray:
        """The stratum of each sample, for a partition that needs strata.

        Raises:
            ConfigError: The samples have no strata.
        """
        if self.strata is None:
            raise ConfigError(
                f"partition {type(partition).__name__} needs the class (or another stratum) of each sample, which "
                f"{self.source} does not tell; choose IID, Quantity or Natural, or a data set with strata"
            )
        return self.strata


class Partition(Checked, ABC):
    """Cuts training samples into clients, and test samples to match.

    Every random choice derives from the seed that is passed in.
    """

    keeps_clients = False
    """Whether clients are the data set's own (`Samples.clients`), which other partitions would ignore."""

    def __call__(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Cut the samples into positions by client, at least one per client."""
        check_range("data.num_clients", num_clients, least=1)
        if samples.size < num_clients:
            raise ConfigError(
                f"{samples.size} training samples cannot be shared among {num_clients} clients; "
                "lower data.num_clients, algorithm.public_size or use a larger data set"
            )
        strata = samples.strata
        if strata is not None and strata.min() < 0:
            position = int(strata.argmin())
            raise ConfigError(f"label {strata[position]} of sample {position} is negative; count classes from 0")
        cut = self.assign(samples, num_clients, seed)
        return cut if isinstance(cut, CSR) else _from_lists(cut, type(self).__name__, samples.size, num_clients)

    @abstractmethod
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR | Sequence[Sequence[int] | IntArray]:
        """Cut the samples; the arguments have been checked.

        Returns:
            Positions in the samples, 0 … n − 1, by client: a `CSR`, or a list with one list or array per client.
        """

    def count(self, own: Callable[[], int | None]) -> int | None:
        """Number of clients if none is set, maybe the data set's `own`; None leaves it to the data module."""
        del own
        return None

    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        """Give each client test samples, by position, that match its training samples.

        The default draws per stratum min(training samples of the client, test samples of the stratum) random test
        samples without repetition; clients may share test samples. It is the test split that the public code of FedDr+
        makes for its Dirichlet partition. Samples without strata are one stratum.
        """
        train_strata, test_strata = train_samples.strata, test_samples.strata
        if train_strata is None or test_strata is None:
            train_strata, test_strata = (np.zeros(s.size, dtype=np.int64) for s in (train_samples, test_samples))
        return MatchedTestSplit(train, train_strata, test_strata, seed)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def _from_lists(lists: Sequence[Sequence[int] | IntArray], name: str, size: int, num_clients: int) -> CSR:
    """A partition's lists of positions, one a client, as a `CSR`."""
    rows = [np.asarray(row) for row in lists]
    if len(rows) != num_clients:
        raise ConfigError(f"partition {name} makes {len(rows)} lists for {num_clients} clients; it must make one each")
    for client_id, row in enumerate(rows):
        if row.ndim != 1 or not len(row) or row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= size:
            raise ConfigError(
                f"partition {name} gives client {client_id} {row.tolist()!r:.60}; it must give one position or more, "
                f"0 to {size - 1}"
            )
    indices = np.concatenate(rows)
    positions, times = np.unique(indices, return_counts=True)
    if times.max() > 1:
        raise ConfigError(f"partition {name} assigns sample {positions[times.argmax()]} twice; assign it once")
    return CSR.from_sizes(indices, np.array([len(row) for row in rows], dtype=np.int64))


class MatchedTestSplit:
    """Per class min(n_train of the client, test samples of the class) random test samples, drawn on access.

    Nothing is stored per client; the choice is a function of (seed, client).

    Args:
        train: The clients' training samples.
        train_labels: Their labels, shape (n,).
        test_labels: Class of each test sample, shape (m,).
        seed: The partition's seed.
    """

    def __init__(self, train: CSR, train_labels: IntArray, test_labels: IntArray, seed: int) -> None:
        self._train, self._train_labels, self._seed = train, np.asarray(train_labels), seed
        self._num_classes = 1 + int(max(self._train_labels.max(initial=0), test_labels.max(initial=0)))
        self._by_class = class_index(np.asarray(test_labels), self._num_classes)

    def __len__(self) -> int:
        return len(self._train)

    def __getitem__(self, client_id: int) -> IntArray:
        """The client's test samples, ascending."""
        generator = numpy_generator(self._seed, "partition", "test", client_id)
        held = np.bincount(self._train_labels[self._train[client_id]], minlength=self._num_classes)
        parts = []
        for label in np.flatnonzero(held):
            pool = self._by_class[int(label)]
            parts.append(pool[generator.choice(len(pool), min(int(held[label]), len(pool)), replace=False)])
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def untaught(self, left: CSR) -> int:
        """Number of clients with test samples of a class that is missing in what is left of their training samples."""
        before, after = (
            np.unique(rows.owners() * self._num_classes + self._train_labels[rows.indices])
            for rows in (self._train, left)
        )
        missing = np.setdiff1d(before, after, assume_unique=True)
        tested = self._by_class.sizes[missing % self._num_classes] > 0
        return len(np.unique(missing[tested] // self._num_classes))


class IID(Partition):
    """Shuffle all samples and deal them out in equal parts; sizes differ by at most one.

    The test samples are dealt out likewise, in disjoint parts.
    """

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        return _deal(samples.size, num_clients, numpy_generator(seed, "partition", "iid"))

    @override
    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        """With fewer test samples than clients some clients get none."""
        return _deal(test_samples.size, len(train), numpy_generator(seed, "partition", "iid", "test"))


class UnequalSizes(Partition):
    """Clients hold random samples in unequal numbers, redrawn until every client has enough.

    Args:
        min_samples: Least number of training samples of a client.
        max_retries: Number of draws before giving up.
    """

    setting: str
    """The setting of the inequality."""
    remedy: str
    """The verb that lowers the inequality: ``raise`` or ``lower``."""

    def __init__(self, min_samples: int = 10, max_retries: int = 1000) -> None:
        self.min_samples, self.max_retries = min_samples, max_retries

    @abstractmethod
    def shares(self, num_clients: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Non-negative shares of the samples that sum to 1, shape (num_clients,)."""

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Draw shares until every client has enough.

        Raises:
            ConfigError: No draw gave every client `min_samples`.
        """
        name = type(self).__name__
        check_enough(name, self.min_samples, num_clients, samples.size)
        generator = numpy_generator(seed, "partition", name.lower())
        smallest = 0
        for _ in range(self.max_retries):
            shares = self.shares(num_clients, generator)
            if not shares.sum() > 0:  # a tiny α underflows
                continue
            sizes = shared_out(samples.size, shares)
            if sizes.min() >= self.min_samples:
                return CSR.from_sizes(generator.permutation(samples.size), sizes)
            smallest = max(smallest, int(sizes.min()))
        drawn = f"{name}({self.setting}={getattr(self, self.setting)})"
        remedy = f"{self.remedy} partition.{self.setting}"
        raise ConfigError(too_few(drawn, remedy, num_clients, self.min_samples, self.max_retries, smallest))


class Quantity(UnequalSizes):
    """Clients hold random samples in unequal numbers: q ~ Dir(α·1_N), and client k gets the share q_k of them.

    The shares are redrawn until the smallest client holds at least `min_samples`. The smaller α, the more unequal the
    sizes. The samples need no strata.

    Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, arXiv:2102.02079
    (its quantity skew).

    Args:
        alpha: α > 0, the concentration.
        min_samples: Least number of training samples of a client.
        max_retries: Number of draws before giving up.
    """

    setting, remedy = "alpha", "raise"

    def __init__(self, alpha: float = 0.5, min_samples: int = 10, max_retries: int = 1000) -> None:
        check_draws("Quantity", alpha, min_samples, max_retries)
        self.alpha = alpha
        super().__init__(min_samples, max_retries)

    @override
    def shares(self, num_clients: int, generator: np.random.Generator) -> NDArray[np.float64]:
        return generator.dirichlet(np.full(num_clients, self.alpha))


class LogNormal(UnequalSizes):
    """Clients hold random samples in unequal numbers: client k's share is proportional to exp(σ·z_k), z_k ~ N(0, 1).

    The shares are redrawn until the smallest client holds at least `min_samples`. With σ = 0 sizes differ by at most
    one sample. The samples need no strata.

    Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263 (unbalanced data).

    Args:
        sigma: σ ≥ 0, the standard deviation of the logarithm of a client's size.
        min_samples: Least number of training samples of a client.
        max_retries: Number of draws before giving up.
    """

    setting, remedy = "sigma", "lower"

    def __init__(self, sigma: float = 1.0, min_samples: int = 10, max_retries: int = 1000) -> None:
        check_range("LogNormal.sigma", sigma, least=0)
        check_draws("LogNormal", 1.0, min_samples, max_retries)
        self.sigma = sigma
        super().__init__(min_samples, max_retries)

    @override
    def shares(self, num_clients: int, generator: np.random.Generator) -> NDArray[np.float64]:
        logarithms = self.sigma * generator.standard_normal(num_clients)
        sizes = np.exp(logarithms - logarithms.max())  # the largest is 1: none overflows
        shares: NDArray[np.float64] = sizes / sizes.sum()
        return shares


Law = Literal["linear", "square", "exponential"]


class SizeLaw(Partition):
    """Clients hold random samples in numbers that follow from their places: client k of N gets ⌊n·f(k)/Σⱼ f(j)⌋.

    With k = 1 … N, f(k) is k (linear), k² (square) or exp(k) (exponential); the last client, the largest, gets the
    remainder, too. The sizes do not depend on the seed, and the samples need no strata.

    The laws of ``flwr_datasets``: ``LinearPartitioner``, ``SquarePartitioner``, ``ExponentialPartitioner``.

    Args:
        law: The function f.
    """

    def __init__(self, law: Law = "linear") -> None:
        self.law = law

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse a law that leaves a client without samples.

        Raises:
            ConfigError: It is such a law.
        """
        places = np.arange(1, num_clients + 1, dtype=np.float64)
        units = {"linear": places, "square": places**2, "exponential": np.exp(places - num_clients)}[self.law]
        sizes = (units * samples.size / units.sum()).astype(np.int64)
        sizes[-1] += samples.size - sizes.sum()
        if sizes[0] == 0:
            raise ConfigError(
                f"SizeLaw(law={self.law!r}) gives client 0 of {num_clients} none of the {samples.size} training "
                "samples; lower data.num_clients or choose a flatter partition.law"
            )
        return CSR.from_sizes(numpy_generator(seed, "partition", "sizelaw").permutation(samples.size), sizes)


class _OwnClients(Partition):
    """Clients are made of the data set's own clients, in their order."""

    keeps_clients = True
    owners = 1
    """The number of the data set's own clients that make a client."""

    @override
    def count(self, own: Callable[[], int | None]) -> int | None:
        number = own()
        return None if number is None else -(-number // self.owners)

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse a data set that names no clients, or too few.

        Raises:
            ConfigError: It is such a data set.
        """
        name = type(self).__name__
        if samples.clients is None:
            raise ConfigError(
                f"partition {name} needs a data set that names the client of each sample (an array file's "
                "client_train, a folder per client), and this one does not; choose IID, Dirichlet or Shards"
            )
        clients = self._of_owners(samples.clients)
        csr = CSR.from_owners(np.arange(samples.size), clients, num_clients)
        empty = np.flatnonzero(csr.sizes == 0)
        if len(empty):
            raise ConfigError(
                f"client {empty[0]} of {num_clients} has no training samples under partition {name}, as the data set "
                f"has {len(np.unique(clients))} clients with samples; lower data.num_clients or "
                "algorithm.public_size"
            )
        return csr

    @override
    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        if test_samples.clients is not None:
            split = CSR.from_owners(np.arange(test_samples.size), self._of_owners(test_samples.clients), len(train))
            if len(split.indices):
                return split
        return super().split_test(train, train_samples, test_samples, seed)

    def _of_owners(self, owners: IntArray) -> IntArray:
        """The client of each sample (n,), from the data set's own; below 0 for none."""
        return np.asarray(owners, dtype=np.int64) // self.owners


class Natural(_OwnClients):
    """The data set's own clients: the writer, the phone, the person who recorded the sample.

    With a smaller `num_clients` than the data set has, its first clients are used. Test samples follow the data set's
    own client of each test sample. If it names none, or if all test samples are of other clients (UCI-HAR's official
    split), the default of `Partition.split_test` applies.
    """


class Grouped(_OwnClients):
    """Several of the data set's own clients make one: the writers of a class, the people of a household, a hospital.

    The data set's own clients, in their order, are cut into groups of `owners`: own client j is part of client
    ⌊j/owners⌋, and the last client may have fewer. A `num_clients` smaller by one leaves this last one out. Training
    and test samples follow as under `Natural`, which it is with ``owners=1``, but clients have no names.

    ``GroupedNaturalIdPartitioner`` of ``flwr_datasets``, with its mode ``allow-smaller``.

    Args:
        owners: The number of the data set's own clients that make a client.
    """

    def __init__(self, owners: int = 2) -> None:
        check_range("Grouped.owners", owners, least=1)
        self.owners = owners


def class_index(labels: IntArray, num_classes: int) -> CSR:
    """The positions of each class, ascending; class ``c`` is row ``c``."""
    return CSR.from_owners(np.arange(len(labels)), np.asarray(labels, dtype=np.int64), num_classes)


def equal_sizes(total: int, parts: int) -> IntArray:
    """Sizes of `parts` pieces of `total`; the first pieces take the remainder, one each."""
    return np.full(parts, total // parts, dtype=np.int64) + (np.arange(parts) < total % parts)


def shared_out(total: int, shares: NDArray[np.float64]) -> IntArray:
    """Sizes of pieces of `total` in given shares that sum to 1, shape (n,): cut by the cumulative sum, rounded down."""
    cuts = (np.cumsum(shares) * total).astype(np.int64)[:-1]
    return np.diff(cuts, prepend=0, append=total)


def check_draws(name: str, alpha: float, min_samples: int, max_retries: int) -> None:
    """Check the settings of a partition that redraws shares until every client has enough samples."""
    check_range(f"{name}.alpha", alpha, above=0)
    check_range(f"{name}.min_samples", min_samples, least=1)
    check_range(f"{name}.max_retries", max_retries, least=1)


def check_enough(name: str, min_samples: int, num_clients: int, size: int) -> None:
    """Check that there are `min_samples` for every client."""
    if min_samples * num_clients > size:
        raise ConfigError(
            f"{name} cannot give {num_clients} clients {min_samples} samples each from {size}; "
            "lower partition.min_samples or data.num_clients"
        )


def too_few(drawn: str, remedy: str, num_clients: int, min_samples: int, max_retries: int, best: int) -> str:
    """The error of a partition none of whose draws gave every client enough samples."""
    return (
        f"{drawn} gave some of {num_clients} clients fewer than {min_samples} samples in each of {max_retries} draws "
        f"(best smallest client: {best}); {remedy}, raise partition.max_retries, or lower partition.min_samples or "
        "data.num_clients"
    )


def _deal(num_samples: int, num_clients: int, generator: np.random.Generator) -> CSR:
    return CSR.from_sizes(generator.permutation(num_samples), equal_sizes(num_samples, num_clients))


class Listed(Partition):
    """Clients hold the training samples in their lists, by their numbers in the data set.

    Unlisted samples are unused. A public set and `max_train_samples` take samples out of the lists. Test samples are
    matched by class, see `Partition.split_test`.

    Args:
        clients: A list of sample numbers per client, or a JSON file with such lists: a list of them, a mapping from
            client ids 0, 1, … to them, or the ``partition.json`` of a run.

    Raises:
        ConfigError: The file is missing, or holds no such lists.
    """

    def __init__(self, clients: list[list[int]] | str) -> None:
        self.source = clients if isinstance(clients, str) else "partition.clients"
        lists = _read(Path(clients)) if isinstance(clients, str) else list(clients)
        if not lists:
            raise ConfigError(f"{self.source} names no client; give a list of sample numbers for each")
        self._lists = [_checked(numbers, client_id, self.source) for client_id, numbers in enumerate(lists)]

    @override
    def count(self, own: Any) -> int:
        return len(self._lists)

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse lists that do not fit the samples.

        Raises:
            ConfigError: The number of lists differs, a sample number is out of range or repeated, or nothing of a list
                is left.
        """
        if num_clients != len(self._lists):
            raise ConfigError(
                f"{self.source} has lists for {len(self._lists)} clients, and data.num_clients is {num_clients}; "
                "leave the number out"
            )
        self._check(samples.size if samples.total is None else samples.total)
        numbers = np.arange(samples.size) if samples.numbers is None else samples.numbers
        wanted, sizes = np.concatenate(self._lists), np.array([len(row) for row in self._lists])
        owners = np.repeat(np.arange(num_clients), sizes)
        positions = np.searchsorted(numbers, wanted).clip(max=samples.size - 1)
        there = numbers[positions] == wanted
        csr = CSR.from_owners(positions[there], owners[there], num_clients)
        if len(empty := np.flatnonzero(csr.sizes == 0)):
            raise ConfigError(
                f"{self.source}: none of the {sizes[empty[0]]} samples of client {empty[0]} is left to train on; lower "
                "algorithm.public_size or raise data.max_train_samples"
            )
        return csr

    def _check(self, size: int) -> None:
        """Refuse sample numbers that are out of range or repeated."""
        wanted = np.concatenate(self._lists)
        owners = np.repeat(np.arange(len(self._lists)), [len(row) for row in self._lists])
        if len(wrong := np.flatnonzero((wanted < 0) | (wanted >= size))):
            raise ConfigError(
                f"{self.source}: client {owners[wrong[0]]} names sample {wanted[wrong[0]]}, and training samples are "
                f"numbered 0 to {size - 1}; correct it"
            )
        order = np.argsort(wanted, kind="stable")
        if len(twice := np.flatnonzero(np.diff(wanted[order]) == 0)):
            first, second = order[twice[0]], order[twice[0] + 1]
            raise ConfigError(
                f"{self.source}: sample {wanted[first]} is listed twice, for client {owners[first]} and for client "
                f"{owners[second]}; list it once"
            )

    def __repr__(self) -> str:
        return f"Listed({self.source!r}, {len(self._lists)} clients)"


def _read(path: Path) -> list[Any]:
    """The lists of a file, in client order."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"partition.clients: {path} cannot be read ({error.strerror}); name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"partition.clients: {path} is not JSON ({error}); list numbers per client") from error
    if isinstance(content, dict) and isinstance(content.get("clients"), dict):
        content = content["clients"]
    if isinstance(content, dict):
        if set(content) != {str(client_id) for client_id in range(len(content))}:
            odd = next(key for key in content if key not in {str(place) for place in range(len(content))})
            raise ConfigError(f"{path} has a client {odd!r}; number the {len(content)} clients from 0 on")
        content = [content[str(client_id)] for client_id in range(len(content))]
        content = [entry.get("indices") if isinstance(entry, dict) else entry for entry in content]
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds no lists; give a list of sample numbers for each client")
    return content


def _checked(numbers: Any, client_id: int, source: str) -> IntArray:
    if not isinstance(numbers, list) or not numbers:
        raise ConfigError(f"{source}: client {client_id} has no list of samples; give it one number or more")
    array = np.asarray(numbers, dtype=object)
    if array.ndim != 1 or any(type(number) is not int or abs(number) >= 2**62 for number in numbers):
        raise ConfigError(f"{source}: the list of client {client_id} holds other values than whole numbers; correct it")
    return array.astype(np.int64)
