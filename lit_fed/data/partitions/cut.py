"""The parts of a data set, and the population that a partition cuts out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import CSR, ClientIndices, IntArray, held_out, sha256_of
from lit_fed.data.partitions.partition import MatchedTestSplit, Partition, Samples, class_index, equal_sizes
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, numpy_generator


@dataclass(frozen=True)
class Part:
    """The samples of a part of a data set, such as those to train on.

    Args:
        x: Inputs: an array (n, …) in the model's layout before any resizing, uint8, integer or floating; or a map-style
            ``torch.utils.data.Dataset`` with its random transforms.
        y: Classes, integers of shape (n,), or numerical targets, floating point of shape (n,) or (n, k); None if `x`
            yields them.
        clients: The data set's own client of each sample, counted from 0, shape (n,); None without clients.
        strata: Anything by which clients may differ and partitions such as `Dirichlet` cut, counted from 0, shape (n,),
            such as `quantile_strata` of a numerical target; None for the classes `y`, or for neither.
        plain: The data set `x` without random transforms, for validation, calibration and public sets; None for `x`.
    """

    x: Any
    y: Any = None
    clients: NDArray[Any] | None = None
    strata: IntArray | None = None
    plain: Any = None

    def __len__(self) -> int:
        known = self.strata if self.y is None else self.y
        if known is None and not isinstance(self.x, Sized):
            raise ConfigError(f"{type(self.x).__name__} has neither a length nor labels; give it __len__")
        return len(self.x if known is None else known)

    def take(self, rows: NDArray[Any] | slice) -> Part:
        """Some of the samples in arrays, by their positions, a slice or a mask."""
        y, clients, strata = (None if array is None else array[rows] for array in (self.y, self.clients, self.strata))
        return Part(self.x[rows], y, clients, strata)

    def hold_out(self, groups: NDArray[Any], fraction: float, seed: int) -> tuple[Part, Part]:
        """The samples without a random share of each group (n,), such as of each client, and this share."""
        _, owners = np.unique(groups, return_inverse=True)
        chosen = held_out(owners, 1 + int(owners.max()), fraction, seed)
        return self.take(~chosen), self.take(chosen)

    def samples(self, rows: IntArray, source: str) -> Samples:
        """Some of the samples, as partitions see them."""
        strata, clients = (None if array is None else array[rows] for array in (self.strata, self.clients))
        y = np.asarray(self.y)
        targets = y[(rows, *(y.ndim - 1) * (0,))] if y.dtype.kind == "f" else None
        return Samples(len(rows), strata, clients, source, rows, len(self), targets)

    def checked(self, num_classes: int | None, what: str, source: str) -> Part:
        """A checked copy with strata in int64, these being the classes if there are any."""
        strata = self.y if self.strata is None and num_classes is not None else self.strata
        strata = _checked(strata, len(self), num_classes, f"{what} of {source}")
        if self.clients is not None and len(self.clients) != len(self):
            raise ConfigError(f"{source}: {len(self.clients)} client ids for {len(self)} samples; give one each")
        return replace(self, strata=strata)


def joined(parts: Sequence[Part]) -> Part:
    """Parts with arrays as one, in their order; clients only if the first part has clients."""
    if len(parts) == 1:
        return Part(parts[0].x, parts[0].y, parts[0].clients)
    clients = None if parts[0].clients is None else np.concatenate([part.clients for part in parts])
    x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
    return Part(x, y, clients)


@dataclass(frozen=True)
class Parts:
    """A data set.

    Args:
        train: Training samples.
        test: Test samples.
        val: A separate validation set without random transforms, whose samples are numbered after the training samples;
            None for one held out by `val_fraction`.
        source: The file or data set, for errors.
    """

    train: Part
    test: Part
    val: Part | None = None
    source: str = "the data set"

    @classmethod
    def cast(cls, made: object, maker: str, instead: str) -> Parts:
        """Return what a user's function made; refuse another type."""
        if not isinstance(made, cls):
            raise ConfigError(f"{maker} returned {type(made).__name__}; return {instead}(…)")
        return made

    def checked(self, num_classes: int | None) -> Parts:
        """A checked copy with strata; `num_classes` is null if strata are not classes.

        Raises:
            ConfigError: A stratum is out of range, or arrays differ in length.
        """
        kind, source = "strata" if num_classes is None else "labels", self.source
        train = self.train.checked(num_classes, f"training {kind}", source)
        test = self.test.checked(num_classes, f"test {kind}", source)
        val = None if self.val is None else self.val.checked(num_classes, f"validation {kind}", source)
        return Parts(train, test, val, source)


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

    def of_client(self, client_id: int) -> Cut:
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

    def without(self, absent: frozenset[int], own_test: bool) -> Cut:
        """The same population, with its digest, after some clients have taken their samples out of it.

        Args:
            absent: The clients.
            own_test: Whether test samples may be clients' own, and belong to the shared test set, too.

        Raises:
            ConfigError: Nobody can tell which samples of a shared set are theirs.
        """
        if own_test and (len(self.public) or not isinstance(self.test, CSR | MatchedTestSplit)):
            what = "public set" if len(self.public) else "shared test set"
            raise ConfigError(
                f"participation.absent takes clients' samples out of shared sets, and the {what} does not tell whose "
                "its samples are; divide these data differently, or leave absent out"
            )
        rest = [client_id for client_id in range(len(self.train)) if client_id not in absent]
        train, val, calibration = (csr.only(rest) for csr in (self.train, self.val, self.calibration))
        test: ClientIndices = _Emptied(self.test, absent)
        shared_val, shared_test = self.shared_val, self.shared_test
        if not self.own_val or (own_test and isinstance(self.test, CSR)):
            shared_val = np.setdiff1d(shared_val, np.setdiff1d(self.val.indices, val.indices))
        if own_test and isinstance(self.test, CSR):
            kept = self.test.only(rest)
            left = np.setdiff1d(np.arange(len(shared_test)), np.setdiff1d(self.test.indices, kept.indices))
            test, shared_test = CSR(np.searchsorted(left, kept.indices), kept.offsets), shared_test[left]
        return replace(
            self, train=train, val=val, calibration=calibration, test=test, shared_val=shared_val,
            shared_test=shared_test, sha256=self.digest(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Emptied:
    """Sample indices by client, of which some clients have none."""

    rows: ClientIndices
    absent: frozenset[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, client_id: int) -> IntArray:
        return self.rows[client_id][: 0 if client_id in self.absent else None]


def cut_population(parts: Parts, partition: Partition, settings: CutSettings) -> Cut:
    """Choose the samples, set the public ones aside, and cut the rest into clients."""
    seed, source = settings.seed, parts.source
    pool = subset(len(parts.train), settings.max_train_samples, seed, "train")
    public, pool = _take_public(pool, parts.train.strata, settings)
    train_samples = parts.train.samples(pool, source)
    cut = partition(train_samples, settings.num_clients, seed)
    shared_test = subset(len(parts.test), settings.max_test_samples, seed, "test")
    test = partition.split_test(cut, train_samples, parts.test.samples(shared_test, source), seed)
    fractions = (settings.val_fraction, settings.calibration_fraction)
    val, calibration, train = cut.hold_out(fractions, derive_seed(seed, "data", "hold-out"))
    check_held_out(cut.sizes, train.sizes, *fractions, range(len(cut)))
    untaught = test.untaught(train) if isinstance(test, MatchedTestSplit) else 0
    val = val.through(pool)
    num_train, num_val = len(parts.train), 0 if parts.val is None else len(parts.val)
    strata, shared_val = parts.train.strata, np.unique(val.indices)
    if parts.val is not None and num_val:
        if settings.val_fraction:
            raise ConfigError(
                f"data.val_fraction is {settings.val_fraction}, and {source} has {num_val} validation samples in a "
                "separate set; set the fraction to 0"
            )
        whole = parts.val.samples(np.arange(num_val), source)
        matched = partition.split_test(cut, train_samples, whole, derive_seed(seed, "data", "own-val"))
        rows = [matched[client_id] for client_id in range(len(cut))]
        val = CSR.from_sizes(np.concatenate(rows) + num_train, np.array([len(row) for row in rows]))
        shared_val = num_train + np.arange(num_val)
        if strata is not None:
            strata_of_val = parts.val.strata
            strata = np.concatenate([strata, np.full(num_val, -1) if strata_of_val is None else strata_of_val])
    return Cut(
        train=train.through(pool),
        val=val,
        calibration=calibration.through(pool),
        test=test,
        public=public,
        shared_val=shared_val,
        shared_test=shared_test,
        strata=strata,
        own_val=num_val > 0,
        untaught=untaught,
    )


def cut_of_parts(
    sizes: Mapping[str, Sequence[int]],
    owners: Sequence[int],
    num_clients: int,
    data: Parts,
    here: frozenset[int] | None,
) -> Cut:
    """The population of clients who divided their samples themselves.

    Args:
        sizes: Number of samples of each of `owners` in the parts ``train``, ``val``, ``calibration`` and ``test``; of
            ``public`` and ``shared_test``, one number. Samples are numbered part by part, one client after the other:
            ``train val calibration public`` among the training samples, ``shared_test test`` among the others.
        owners: The clients, ascending.
        num_clients: Clients in the population; others have no samples.
        data: The data set, with the samples of the clients here.
        here: The clients here; None for all.
    """

    def rows(part: str, begin: int) -> CSR:
        counts = np.zeros(num_clients, dtype=np.int64)
        counts[list(owners)] = sizes[part]
        return CSR.from_sizes(np.arange(begin, begin + counts.sum(), dtype=np.int64), counts)

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
        shared_test=np.arange(len(data.test), dtype=np.int64),
        strata=data.train.strata,
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


def clients_here(wanted: Iterable[int] | None, count: int) -> list[int]:
    """The wanted clients of a population, ascending; None for all. Refuse clients that do not exist."""
    here = list(range(count)) if wanted is None else sorted(set(wanted))
    if beyond := [client_id for client_id in here if not 0 <= client_id < count]:
        raise ConfigError(f"client {beyond[0]} does not exist; clients are 0 to {count - 1}")
    return here


def named(clients: Iterable[int]) -> str:
    """The first few clients, for messages."""
    ids = sorted(clients)
    if not ids:
        return "no client"
    shown = ", ".join(str(client_id) for client_id in ids[:8])
    return f"client{'s' if len(ids) > 1 else ''} {shown}{', …' if len(ids) > 8 else ''}"


def subset(available: int, most: int | None, seed: int, purpose: str) -> IntArray:
    """All indices, or a random choice, ascending."""
    if most is None or most >= available:
        return np.arange(available, dtype=np.int64)
    chosen = numpy_generator(seed, "data", "subset", purpose).choice(available, most, replace=False)
    return np.sort(chosen).astype(np.int64)


def _take_public(pool: IntArray, strata: IntArray | None, settings: CutSettings) -> tuple[IntArray, IntArray]:
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
        chosen = _of_every_class(None if strata is None else strata[pool], size, generator)
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
