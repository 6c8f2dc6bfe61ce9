"""Data sets that are read as columns: the test samples, the clients, the classes and the shapes follow from these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import IntArray, held_out
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.partition import Natural
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.in_memory import TensorDataModule
from lit_fed.data.population.naming import in_order, numbered
from lit_fed.data.population.targets import count_classes
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

MANY_CLASSES = 100
"""Number of different values above which a target may not be a class, if half of the samples differ."""


@dataclass(frozen=True)
class Categorical:
    """A column of names, such as of classes or clients.

    Args:
        names: The distinct names in their order.
        codes: The position there of each row's name, shape (n,); −1 for another name.
    """

    names: list[str]
    codes: IntArray

    @classmethod
    def of(cls, values: Iterable[Any]) -> Categorical:
        """The names of rows, n; see `in_order` for their order."""
        rows = list(values)
        if None in rows:
            raise ConfigError(f"sample {rows.index(None)} has no class or no client; name it, or leave the sample out")
        names = in_order(rows)
        return cls(names, numbered(rows, names))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Categorical:
        return Categorical(self.names, self.codes[rows])

    def among(self, names: list[str]) -> Categorical:
        """The same rows, numbered by other names."""
        return Categorical(names, np.append(numbered(self.names, names), -1)[self.codes])


@dataclass(frozen=True)
class Columns:
    """Samples as their source has them, one a row.

    Args:
        x: Inputs as in `Part`, or an array that stands for them, such as paths.
        y: Targets: texts or `Categorical` are classes, integers are classes counted from 0, and floating-point numbers,
            of shape (n,) or (n, k), are the targets of a regression.
        clients: The name or number of each sample's client, or `Categorical`; None without clients.
        test: Samples to test on; None to hold out a share of these.
        val: A separate validation set; None for one held out by `val_fraction`.
        source: The file or data set, for errors.
    """

    x: Any
    y: Any
    clients: Any = None
    test: Columns | None = None
    val: Columns | None = None
    source: str = "the data set"

    def __post_init__(self) -> None:
        y = self.y if isinstance(self.y, Categorical) else np.asarray(self.y)
        if not isinstance(y, Categorical) and y.dtype.kind in "OUS":
            y = Categorical.of(y)
        object.__setattr__(self, "y", y)
        if not isinstance(self.clients, Categorical | None):
            object.__setattr__(self, "clients", Categorical.of(self.clients))
        sizes = [len(column) for column in (self.x, y, self.clients) if column is not None]
        if len(set(sizes)) > 1:
            raise ConfigError(f"{self.source}: columns have {' and '.join(map(str, sizes))} rows; give one each")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: NDArray[Any]) -> Columns:
        """Some of the samples, by their positions or a mask, without those to test or validate on."""
        clients = None if self.clients is None else self.clients[rows]
        return Columns(self.x[rows], self.y[rows], clients, source=self.source)

    def part(self) -> Part:
        """The samples, with numbers in place of names."""
        y, clients = (column.codes if isinstance(column, Categorical) else column for column in (self.y, self.clients))
        return Part(self.x, y, clients)


class Source(FederatedDataModule):
    """A data set in a format of its own: `read` gives its columns, from which all else follows.

    Names are in numerical or alphabetical order. The clients are those of the training samples; test samples of others
    are in the shared test set only.

    Args:
        test_fraction: Share of every client's samples (of all samples without clients) to test on, unless `read` gives
            test samples.
        class_names: The classes in their order; null for those that `read` names.
        kwargs: The population's settings, see `FederatedDataModule`; `partition` is `Natural` by default if the data
            name clients.

    Raises:
        ConfigError: A sample is not of a class, or no sample is left to train or to test on.
    """

    names_clients = False
    """Whether `read` gives clients; known without reading."""
    drawn_as = "source"
    """Part of the seed of the samples that are held out."""
    too_few = "leaves no test samples; raise data.test_fraction"
    """Error of a data set that is too small to hold out a share; ``{}`` is the share."""

    def __init__(self, test_fraction: float = 0.2, class_names: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.names_clients and kwargs.get("partition") is None:
            self.partition = Natural()
        check_range("data.test_fraction", test_fraction, above=0, below=1)
        self.test_fraction, self._names_given = test_fraction, class_names
        self._num_classes_given: int | None = None  # of classes without names

    @abstractmethod
    def read(self) -> Columns:
        """Read the samples; called once."""

    @cached_property
    def columns(self) -> Columns:
        """The samples to train, test and validate on, whose names have the same numbers in all three."""
        whole = self.read()
        whole = self._hold_out(whole) if whole.test is None else whole
        classes = whole.y.names if isinstance(whole.y, Categorical) else []
        clients = whole.clients.names if whole.clients is not None else []
        train, test, val = (
            None if part is None else self._numbered(part, self._names_given or classes, clients)
            for part in (whole, whole.test, whole.val)
        )
        assert train is not None
        for name, part in (("training", train), ("test", test)):
            if not part:
                raise ConfigError(f"{whole.source} has no {name} samples; add some")
        return replace(train, test=test, val=val)

    def _hold_out(self, whole: Columns) -> Columns:
        owners = np.zeros(len(whole), dtype=np.int64) if whole.clients is None else whole.clients.codes
        seed = derive_seed(self.seed, self.drawn_as, "test")
        chosen = held_out(owners, 1 + int(owners.max(initial=0)), self.test_fraction, seed)
        if not chosen.any():
            raise ConfigError(f"{whole.source} {self.too_few.format(f'{self.test_fraction:g}')}")
        return replace(whole.take(~chosen), test=whole.take(chosen), val=whole.val)

    def _numbered(self, part: Columns, classes: list[str], clients: list[str]) -> Columns:
        if isinstance(part.y, Categorical):
            of = "data.class_names" if self._names_given else "the training rows"
            check_classes(part.y.names, classes, part.source, of)
            part = replace(part, y=part.y.among(classes))
        return part if part.clients is None else replace(part, clients=part.clients.among(clients))

    # Known without setup; the samples are read once.

    @property
    @override
    def class_names(self) -> list[str] | None:
        if self._names_given or self._num_classes_given is not None:
            return self._names_given
        y = self.columns.y
        return y.names if isinstance(y, Categorical) else None

    @cached_property
    @override
    def num_classes(self) -> int | None:
        """Number of `class_names`; without names the largest training label + 1, or None for numbers."""
        if self._num_classes_given is not None:
            return self._num_classes_given
        if self.class_names is not None:
            return len(self.class_names)
        y = self.columns.y
        return count_classes(y, self.columns.source) if y.dtype.kind in "iu" else None

    @property
    @override
    def output_shape(self) -> tuple[int, ...]:
        """(num_classes,), or the shape of one numerical target."""
        return np.shape(self.columns.y)[1:] if self.num_classes is None else (self.num_classes,)

    @override
    def own_client_names(self) -> list[str] | None:
        return None if self.columns.clients is None else self.columns.clients.names

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return self.columns.source, "leave out the clients of its columns"

    @override
    def pooled(self) -> str | None:
        if self._names_given or self._num_classes_given is not None:
            return super().pooled()
        y = self.columns.y
        if isinstance(y, Categorical):
            return "data.class_names are read off all clients' samples; give them"
        if y.dtype.kind in "iu" and type(self).num_classes is Source.num_classes:
            return "data.num_classes is counted over all clients' labels; give it"
        return super().pooled()

    def numbered(self) -> Parts:
        """The samples, with numbers in place of names."""
        columns = self.columns
        assert columns.test is not None
        val = None if columns.val is None else columns.val.part()
        return Parts(columns.part(), columns.test.part(), val, columns.source)


class TensorSource(Source, TensorDataModule):
    """A `Source` in memory, whose inputs are arrays.

    To bring your own, implement `read`::

        class Letters(TensorSource):
            names_clients = True

            def read(self) -> Columns:
                rows = [json.loads(line) for line in open(f"{self.root}/letters.jsonl")]
                pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
                return Columns(pixels, [row["letter"] for row in rows], [row["writer"] for row in rows])

    Args:
        kwargs: The settings of `Source`.
    """

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.columns.x)[1:])

    @override
    def load_arrays(self) -> Parts:
        return self.numbered()


def check_classes(targets: Iterable[str], classes: Sequence[str], where: str, of: str = "the training rows") -> None:
    """Refuse targets of a file that are not classes."""
    known = set(classes)
    if strange := next((target for target in targets if target not in known), None):
        raise ConfigError(
            f"{where}: target {strange!r} is not a class of {of}, which have {', '.join(classes[:10])}"
            f"{', …' if len(classes) > 10 else ''}; correct it"
        )


_CLASSES = "classes; set data.kind to numbers for a regression, or to classes to confirm them"


def check_few(names: Sequence[str], rows: int, where: str, too_many_for: str = _CLASSES) -> None:
    """Refuse a column, which `where` names, with too many different values to be a class or a level."""
    if len(names) > max(MANY_CLASSES, rows // 2):
        raise ConfigError(f"{where} has {len(names)} different values in {rows} rows, too many for {too_many_for}")


def check_roles(key: str, inputs: Sequence[str] | None, targets: Sequence[str], client: str | None) -> None:
    """Refuse names of columns, of which `data.<key>` gives the inputs, that are missing or in two roles."""
    if not targets or inputs == []:
        raise ConfigError(f"data.{key if targets else 'target'} is empty; name one column or more")
    if both := [name for name in inputs or [] if name in (*targets, client)]:
        raise ConfigError(f"data.{key} names {both[0]!r}, which is the target or the client; leave it out")
