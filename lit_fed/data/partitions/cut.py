"""Strata of a data set, and the population that a partition cuts out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lit_fed.data.partitions.csr import CSR, ClientIndices, IntArray, sha256_of
from lit_fed.data.partitions.partition import MatchedTestSplit, Partition, Samples, class_index, equal_sizes
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, numpy_generator


@dataclass(frozen=True)
class Strata:
    """Facts about a data set's samples, for partitions to cut by.

    Args:
        train: Stratum of each training sample, counted from 0, shape (n,): its class, or in a regression anything by
            which clients may differ, such as a quantile of the target; None for neither.
        test: Strata of the test samples, shape (m,).
        train_size: Number of training samples, n.
        test_size: Number of test samples, m.
        train_clients: The data set's own client of each training sample, shape (n,); None without clients.
        test_clients: The data set's own client of each test sample, shape (m,).
        source: The file or data set, for errors.
        val: Strata of a separate validation set, whose samples are numbered after the training samples.
        val_size: Number of its samples; 0 without such a set.
        val_clients: The data set's own client of each of its samples.
    """

    train: IntArray | None
    test: IntArray | None
    train_size: int
    test_size: int
    train_clients: IntArray | None = None
    test_clients: IntArray | None = None
    source: str = "the data set"
    val: IntArray | None = None
    val_size: int = 0
    val_clients: IntArray | None = None

    def checked(self, num_classes: int | None) -> Strata:
        """A checked copy with strata in int64; `num_classes` is null if strata are not classes.

        Raises:
            ConfigError: A stratum is out of range, or arrays differ in length.
        """
        kind = "strata" if num_classes is None else "labels"
        train = _checked(self.train, self.train_size, num_classes, f"training {kind} of {self.source}")
        test = _checked(self.test, self.test_size, num_classes, f"test {kind} of {self.source}")
        val = _checked(self.val, self.val_size, num_classes, f"validation {kind} of {self.source}")
        for own, size in (
            (self.train_clients, self.train_size),
            (self.test_clients, self.test_size),
            (self.val_clients, self.val_size),
        ):
            if own is not None and len(own) != size:
                raise ConfigError(f"{self.source}: {len(own)} client ids for {size} samples; give one each")
        return replace(self, train=train, test=test, val=val)

    def train_samples(self, indices: IntArray) -> Samples:
        """Some of the training samples."""
        strata, clients = _take(self.train, indices), _take(self.train_clients, indices)
        return Samples(len(indices), strata, clients, self.source, indices, self.train_size)

    def test_samples(self, indices: IntArray) -> Samples:
        """Some of the test samples."""
        return Samples(len(indices), _take(self.test, indices), _take(self.test_clients, indices), self.source)

    def val_samples(self) -> Samples:
        """The samples of the separate validation set."""
        return Samples(self.val_size, self.val, self.val_clients, self.source)


@dataclass(frozen=True)
class CutSettings:
    """The settings of a cut; see `FederatedDataModule`."""

    num_clients: int
    seed: int
    val_fraction: float
    calibration_fraction: float
    public_size: int
    stratified_public: bool
    max_train_samples: int | None
    max_test_samples: int | None


@dataclass(frozen=True)
class Cut:
    """The population after `setup`: sample indices in the data set's own numbering.

    Args:
        train: Each client's training samples.
        val: Each client's validation samples.
        calibration: Each client's calibration samples.
        test: Test samples that match each client's, as positions in `shared_test`.
        public: The public set.
        shared_val: The validation samples of all clients.
        shared_test: The test samples in use.
        strata: Stratum of each training sample, and of each sample of a separate validation set; −1 for samples of
            clients that are not here.
        sha256: Hash of the whole population's rows; None to compute it from these.
        clients: The clients here; None for all.
        own_val: Whether the data set has a separate validation set.
        untaught: Number of clients that are tested on a stratum whose samples were all held out.
    """

    train: CSR
    val: CSR
    calibration: CSR
    test: ClientIndices
    public: IntArray
    shared_val: IntArray
    shared_test: IntArray
    strata: IntArray | None
    sha256: str | None = None
    clients: frozenset[int] | None = None
    own_val: bool = False
    untaught: int = 0

    def of(self, client_id: int) -> Cut:
        """The cut, for looking up one client."""
        if self.clients is not None and client_id not in self.clients:
            self.train.bounds(client_id)  # refuses a client that does not exist
            raise ConfigError(f"client {client_id}'s data are not here; setup was asked for {named(self.clients)}")
        return self

    def digest(self) -> str:
        """The SHA-256 of the training, validation and calibration rows and of the public set."""
        if self.sha256 is not None:
            return self.sha256
        rows = [array for csr in (self.train, self.val, self.calibration) for array in (csr.indices, csr.offsets)]
        return sha256_of([*rows, self.public])

    def fingerprint(self, client_id: int) -> str:
        """The SHA-256 of one client's training, validation and calibration indices."""
        return sha256_of([csr[client_id] for csr in (self.train, self.val, self.calibration)])

    def only(self, clients: Iterable[int]) -> Cut:
        """The same population with only some clients here."""
        present = sorted(set(clients))
        for client_id in present:
            self.train.bounds(client_id)
        train, val, calibration = (csr.only(present) for csr in (self.train, self.val, self.calibration))
        test = [self.test[client_id] for client_id in present]
        sizes = np.zeros(len(self.train), dtype=np.int64)
        sizes[present] = [len(indices) for indices in test]
        strata = None
        if self.strata is not None:
            known = np.concatenate([train.indices, val.indices, calibration.indices, self.public])
            strata = np.full_like(self.strata, -1)
            strata[known] = self.strata[known]
        return replace(
            self,
            train=train,
            val=val,
            calibration=calibration,
            test=CSR.from_sizes(np.concatenate([self.shared_test[:0], *test]), sizes),
            shared_val=self.shared_val[:0],
            strata=strata,
            sha256=self.digest(),
            clients=frozenset(present),
        )


def cut_population(strata: Strata, partition: Partition, settings: CutSettings) -> Cut:
    """Choose the samples, set the public ones aside, and cut the rest into clients."""
    seed = settings.seed
    pool = _subset(strata.train_size, settings.max_train_samples, seed, "train")
    public, pool = _take_public(pool, strata, settings)
    train_samples = strata.train_samples(pool)
    cut = partition(train_samples, settings.num_clients, seed)
    shared_test = _subset(strata.test_size, settings.max_test_samples, seed, "test")
    test = partition.split_test(cut, train_samples, strata.test_samples(shared_test), seed)
    fractions = (settings.val_fraction, settings.calibration_fraction)
    val, calibration, train = cut.hold_out(fractions, derive_seed(seed, "data", "hold-out"))
    check_held_out(cut.sizes, train.sizes, *fractions, range(len(cut)))
    untaught = test.untaught(train) if isinstance(test, MatchedTestSplit) else 0
    val = val.through(pool)
    if strata.val_size:
        if settings.val_fraction:
            raise ConfigError(
                f"data.val_fraction is {settings.val_fraction}, and {strata.source} has {strata.val_size} validation "
                "samples in a separate set; set the fraction to 0"
            )
        matched = partition.split_test(cut, train_samples, strata.val_samples(), derive_seed(seed, "data", "own-val"))
        rows = [matched[client_id] for client_id in range(len(cut))]
        val = CSR.from_sizes(np.concatenate(rows) + strata.train_size, np.array([len(row) for row in rows]))
    return Cut(
        train=train.through(pool),
        val=val,
        calibration=calibration.through(pool),
        test=test,
        public=public,
        shared_val=np.unique(val.indices) if not strata.val_size else strata.train_size + np.arange(strata.val_size),
        shared_test=shared_test,
        strata=_joined(strata),
        own_val=bool(strata.val_size),
        untaught=untaught,
    )


def cut_of_parts(
    sizes: Mapping[str, Sequence[int]],
    owners: Sequence[int],
    num_clients: int,
    strata: Strata,
    here: frozenset[int] | None,
) -> Cut:
    """The population of clients who divided their samples themselves.

    Args:
        sizes: Number of samples of each of `owners` in the parts ``train``, ``val``, ``calibration`` and ``test``; of
            ``public`` and ``shared_test``, one number. Samples are numbered part by part, one client after the other:
            ``train val calibration public`` among the training samples, ``shared_test test`` among the others.
        owners: The clients, ascending.
        num_clients: Clients in the population; others have no samples.
        strata: The samples' strata.
        here: The clients here; None for all.
    """

    def rows(part: str, begin: int) -> CSR:
        found = np.zeros(num_clients, dtype=np.int64)
        found[list(owners)] = sizes[part]
        return CSR.from_sizes(np.arange(begin, begin + found.sum(), dtype=np.int64), found)

    begin, parts = 0, dict[str, CSR]()
    for part in ("train", "val", "calibration"):
        parts[part], begin = rows(part, begin), begin + sum(sizes[part])
    return Cut(
        train=parts["train"],
        val=parts["val"],
        calibration=parts["calibration"],
        test=rows("test", sum(sizes["shared_test"])),
        public=np.arange(begin, begin + sum(sizes["public"]), dtype=np.int64),
        shared_val=parts["val"].indices,
        shared_test=np.arange(strata.test_size, dtype=np.int64),
        strata=strata.train,
        clients=here,
    )


def check_held_out(
    whole: IntArray, left: IntArray, val_fraction: float, calibration_fraction: float, clients: Sequence[int]
) -> None:
    """Refuse fractions that leave a client nothing to train on, and remark on a single sample left.

    Args:
        whole: Number of samples of each client, shape (n,).
        left: Number of its training samples, shape (n,).
        val_fraction: The setting of the data.
        calibration_fraction: The setting of the method.
        clients: The clients' ids, n.
    """
    fractions = f"data.val_fraction {val_fraction:g} and algorithm.calibration_fraction {calibration_fraction:g} leave"
    if len(bare := np.flatnonzero((whole > 0) & (left == 0))):
        raise ConfigError(
            f"{fractions} client {clients[bare[0]]} none of its {whole[bare[0]]} samples to train on; lower them"
        )
    if len(poor := np.flatnonzero((whole > 1) & (left == 1))):
        others = f" and {len(poor) - 1} other clients" if len(poor) > 1 else ""
        remark(f"{fractions} client {clients[poor[0]]}{others} one sample to train on, of {whole[poor[0]]}")


def named(clients: Iterable[int]) -> str:
    """The first few clients, for messages."""
    ids = sorted(clients)
    if not ids:
        return "no client"
    shown = ", ".join(str(client_id) for client_id in ids[:8])
    return f"client{'s' if len(ids) > 1 else ''} {shown}{', …' if len(ids) > 8 else ''}"


def _joined(strata: Strata) -> IntArray | None:
    """Strata of training samples and then of a separate validation set."""
    if strata.train is None or not strata.val_size:
        return strata.train
    return np.concatenate([strata.train, np.full(strata.val_size, -1) if strata.val is None else strata.val])


def _take(array: IntArray | None, indices: IntArray) -> IntArray | None:
    return None if array is None else array[indices]


def _subset(available: int, most: int | None, seed: int, purpose: str) -> IntArray:
    """All indices, or a random choice, ascending."""
    if most is None or most >= available:
        return np.arange(available, dtype=np.int64)
    chosen = numpy_generator(seed, "data", "subset", purpose).choice(available, most, replace=False)
    return np.sort(chosen).astype(np.int64)


def _take_public(pool: IntArray, strata: Strata, settings: CutSettings) -> tuple[IntArray, IntArray]:
    """Set the public samples aside: (public, rest)."""
    size = settings.public_size
    if size == 0:
        return pool[:0], pool
    if size >= len(pool):
        raise ConfigError(
            f"algorithm.public_size {size} leaves none of the {len(pool)} training samples to the clients; lower it"
        )
    generator = numpy_generator(settings.seed, "data", "public")
    if settings.stratified_public:
        chosen = _of_every_class(_take(strata.train, pool), size, generator)
    else:
        chosen = generator.choice(len(pool), size, replace=False)
    taken = np.zeros(len(pool), dtype=bool)
    taken[chosen] = True
    return pool[taken], pool[~taken]


def _of_every_class(labels: IntArray | None, size: int, generator: np.random.Generator) -> IntArray:
    """Positions of random samples, equally many of every class up to one."""
    if labels is None:
        raise ConfigError("data.stratified_public is true, but the samples have no classes; set it to false")
    by_class = class_index(labels, 1 + int(labels.max()))
    chosen = []
    for label, quota in enumerate(equal_sizes(size, len(by_class))):
        if quota > len(by_class[label]):
            raise ConfigError(
                f"algorithm.public_size {size} with data.stratified_public needs {quota} samples of class {label}, "
                f"which has {len(by_class[label])}; lower algorithm.public_size, or set data.stratified_public to false"
            )
        chosen.append(generator.choice(by_class[label], int(quota), replace=False))
    return np.concatenate(chosen)


def _checked(strata: IntArray | None, size: int, num_classes: int | None, what: str) -> IntArray | None:
    """The strata as int64, in 0 … num_classes − 1."""
    if strata is None:
        return None
    array = np.asarray(strata)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        hint = " (floating-point targets need num_classes null)" if array.dtype.kind == "f" else ""
        raise ConfigError(
            f"{what} have shape {array.shape} of {array.dtype}; they must be integers, one per sample{hint}"
        )
    if len(array) != size:
        raise ConfigError(f"{what}: found {len(array)} for {size} samples; give one each")
    if num_classes is None:
        wrong, bounds, remedy = np.flatnonzero(array < 0), "0 or more", "count strata from 0"
    else:
        wrong = np.flatnonzero((array < 0) | (array >= num_classes))
        bounds, remedy = f"in 0 … {num_classes - 1}", "correct the file or the number of classes"
    if len(wrong):
        word = "stratum" if num_classes is None else "label"
        raise ConfigError(f"{what}: {word} {array[wrong[0]]} of sample {wrong[0]} is not {bounds}; {remedy}")
    return array.astype(np.int64)
