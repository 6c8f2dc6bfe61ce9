"""Data sets of the library ``datasets``: folders, its cache and the hub, read row by row."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.formats.cells import (
    Content,
    Reader,
    bytes_of,
    content_of,
    place_of,
    read_array,
    read_numbers,
    read_sound,
    read_text,
)
from lit_fed.data.formats.csv_text import hash_words, load_tokenizer
from lit_fed.data.formats.table import Kind
from lit_fed.data.loaders.image_files import ImageFiles, read_image
from lit_fed.data.loaders.transforms import Encode, InTurn, Normalize, Step
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.partitions.cut import Part, Parts
from lit_fed.data.partitions.partition import Partition
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.dataset_module import DecodedImages
from lit_fed.data.population.features import MEDIANS, Features, Impute, in_turn
from lit_fed.data.population.naming import in_order
from lit_fed.data.population.source import Categorical, Columns, Source, check_classes, check_few, check_roles
from lit_fed.data.population.targets import checked_targets, remark_merged
from lit_fed.errors import ConfigError, reason
from lit_fed.printing import counted
from lit_fed.seeding import numpy_generator

Held = Literal["samples", "clients"]
_LENGTH = 64  # tokens of a text
_VOCABULARY, _SIDE = 8192, 32  # defaults
_LOOKED_AT = 2**10  # rows, to compare their numbers with those in 32 bits


class HuggingFace(Source, DecodedImages):
    """A map-style data set of the library ``datasets`` (extra ``datasets``), from a folder, its cache or the hub.

    Setting up reads the columns of the target and the client alone; inputs stay in the memory-mapped file, and
    workers decode each in turn, so that memory does not grow with the set. A column of images gives images, see
    `DecodedImages`; of sound, as WAV, or of lists of numbers with a `length`, signals (1, length); of texts, token ids
    (length,), as in `CSVText`; numbers, in one column or several, vectors; arrays of one shape stay as they are.
    Several columns of texts are joined with a space. A target of texts or whole numbers is a class, others are numbers,
    as in `Table`; so are missing numbers, null or NaN, and categories, by `impute` and `levels`.

    Args:
        name: A folder that ``save_to_disk`` has written, a folder of Parquet, Arrow, CSV or JSON files or of images,
            which the library copies to its cache once, or a name on the hub; in Python also a ``DatasetDict``.
        inputs: The column of the inputs, or several of numbers or texts.
        target: The column of the target, or several of numbers.
        config: The set's configuration, such as a language; null for its only one.
        split: The split of the training samples, also ``train[:10%]`` of what the library itself loads.
        test_split: The split to test on; null holds out `test_fraction` of `split`.
        val_split: The shared validation set; null for `val_fraction`.
        client: The column of each sample's client, a text or a whole number; the partition is then `Natural`.
        least_samples: Join the two smallest clients until each has this many samples; null for no bound.
        clients: Join the two smallest clients until this many are left; null for no bound.
        test_fraction: Share to test on without a `test_split`.
        test_by: ``samples`` tests on a share of every client's samples, ``clients`` on all samples of a share of the
            clients, who do not train.
        kind: ``classes`` or ``numbers``, if whole numbers are not classes.
        class_names: The classes in their order; null for those of the column's type, else of the training samples.
        impute: Number in place of a missing one by column; or ``median``, that of all clients' training samples for
            each column with gaps, for which these columns are read whole; null refuses gaps.
        levels: Levels of each column that is a category, of texts, whole numbers or classes.
        length: Tokens of a text (null for 64), or values of a signal; longer ones are cut, shorter ones end in 0.
        vocab_size: Of texts, token ids are 0 … vocab_size − 1.
        tokenizer: Folder of a tokenizer that transformers can load; null hashes words.
        cache: The library's cache; null for its own place.
        download: Fetch a missing set from the hub; else nothing is read but this machine's disk.
        partition: Cuts the samples into clients; null for `Natural` with `client`, else `IID`.
        kwargs: The images' settings and the population's others, see `DecodedImages`; `mean` and `std` also of numbers.

    Raises:
        ConfigError: The set is not here or streamed, a column is missing, or a cell is malformed.
    """

    drawn_as = "hugging-face"

    def __init__(
        self,
        name: str | Mapping[str, Any],
        inputs: str | list[str],
        target: str | list[str],
        config: str | None = None,
        split: str = "train",
        test_split: str | None = None,
        val_split: str | None = None,
        client: str | None = None,
        least_samples: int | None = None,
        clients: int | None = None,
        test_fraction: float = 0.2,
        test_by: Held = "samples",
        kind: Kind | None = None,
        class_names: list[str] | None = None,
        impute: Impute | None = None,
        levels: dict[str, list[str]] | None = None,
        length: int | None = None,
        vocab_size: int = _VOCABULARY,
        tokenizer: str | None = None,
        cache: str | None = None,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        self.names_clients = client is not None
        super().__init__(test_fraction=test_fraction, class_names=class_names, partition=partition, **kwargs)
        check_range("data.least_samples", least_samples, least=1, null="for no bound")
        check_range("data.clients", clients, least=1, null="for no bound")
        check_range("data.length", length, least=1, null="for the default")
        check_range("data.vocab_size", vocab_size, least=2, most=2**31 - 1)
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target = [target] if isinstance(target, str) else list(target)
        check_roles("inputs", self._inputs, self._target, client)
        self.features, self.fills_missing = Features(impute, levels), impute is not None
        self.features.check(self._inputs, "data.inputs")
        self._prepare: Normalize | InTurn = self._normalize
        if client is None and (least_samples, clients, test_by) != (None, None, "samples"):
            raise ConfigError("data.least_samples, data.clients and data.test_by are of data.client; name its column")
        if test_split is not None and test_by == "clients":
            raise ConfigError(f"data.test_split is {test_split!r}, and data.test_by is 'clients'; leave one out")
        if class_names is not None and (kind == "numbers" or len(self._target) > 1):
            raise ConfigError("data.class_names are for classes, and the target is numbers; leave them out")
        if isinstance(name, str) and not name:
            raise ConfigError("data.name is empty; give a folder, or a name on the hub")
        self._name, self._config, self._cache = name, config, cache
        self._splits = {"train": split, "test": test_split, "val": val_split}
        self._client, self._least, self._most = client, least_samples, clients
        self._test_by, self._kind = test_by, "classes" if class_names is not None else kind
        self._length, self._vocabulary, self._tokenizer = length, vocab_size, tokenizer

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(channels, side, side) of images, (length,) of texts, (1, length) of signals, else as stored."""
        match self._content:
            case "images":
                return super().input_shape
            case "text":
                return (self._length or _LENGTH,)
            case "numbers":
                return (len(self._inputs) if self._encode is None else self._encode.width,)
            case "audio":
                return (1, self._signal)
        return (1, self._length) if self._length is not None else self._array_shape

    @property
    def feature_names(self) -> list[str]:
        """The columns of numbers and categories, in the order of the stored inputs; empty of other inputs."""
        return self._inputs if self._content == "numbers" else []

    @cached_property
    def gaps(self) -> list[str]:
        """Columns in which a number is missing."""
        return [
            name for name in self._numeric if any(np.isnan(self._column(part, name)).any() for part in self._tables)
        ]

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens; None without texts."""
        return self._vocabulary if self._content == "text" else None

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.client {self._client!r}", "leave data.client out"

    @override
    def pooled(self) -> str | None:
        if self._least is not None or self._most is not None:
            return "data.least_samples and data.clients join clients by the sizes of all; leave them out"
        if self.features.has_medians:
            return MEDIANS
        if self._feature_names(self._target[0]) is not None:
            return FederatedDataModule.pooled(self)
        return super().pooled()

    @override
    def check_channels(self) -> None:
        """`_reader` checks them, once the set is open."""

    @override
    def finish_batch(self, inputs: Any) -> Any:
        return inputs if self._content == "text" else self._prepare(inputs)

    @override
    def preprocessing(self) -> list[Step] | None:  # type: ignore[override]
        """Normalising; None of texts, which become token ids on reading, and of signals."""
        return self._prepare.steps if self._content in ("images", "numbers", "arrays") else None

    @override
    def stored_like(self) -> tuple[tuple[int, ...], str]:
        types = {"images": "uint8", "text": "int64"}
        shape = (len(self._inputs),) if self._content == "numbers" else self.input_shape
        return shape, types.get(self._content, "float64")

    @override
    def decode(self, paths: Sequence[Path]) -> ImageFiles | None:  # type: ignore[override]
        return super().decode(paths) if self._content == "images" else None

    @override
    def target_values(self, indices: IntArray) -> NDArray[Any] | None:
        return None if self.num_classes is not None else self.columns.y[indices]

    @override
    def build_datasets(self) -> Parts:
        (parts, _), where = (self.numbered(), self._reader), self._where("train")
        made = dict[str, Part]()
        for part, rows in (("train", parts.train), ("test", parts.test), ("val", parts.val)):
            if rows is not None:
                numbers, strata = (rows.y, None) if self.num_classes is None else (None, rows.y)
                made[part] = Part(self._rows(part, rows, part == "train"), numbers, rows.clients, strata)
        made["train"] = replace(made["train"], plain=self._rows("train", parts.train, training=False))
        if self._content == "numbers" and not self.keeps_missing:
            plain = made["train"].plain
            some = torch.stack([plain[row][0] for row in range(0, len(plain), max(1, len(plain) // _LOOKED_AT))])
            remark_merged(some, self._prepare, self._inputs, where)
        if self.num_classes is None and not self.keeps_missing:
            targets = torch.from_numpy(parts.train.y.reshape(len(parts.train), -1))
            remark_merged(targets, Tensor.float, self._target, where)
        return Parts(made["train"], made["test"], made.get("val"), where)

    def _rows(self, part: str, rows: Part, training: bool) -> Dataset[Any]:
        stored, where = self._stored(part if part in self._tables else "train"), self._where(part)
        if self.num_classes is None and not self.keeps_missing:
            rows = replace(rows, y=rows.y.astype(np.float32))
        if self._reader is not None:
            return _Rows(stored, rows, where, self._reader)
        augmentation = self._augmentation if training else None
        return _Pictures(stored, rows, where, self._inputs[0], self._side, self.grayscale, rows.y, augmentation)

    # The set.

    @cached_property
    def _tables(self) -> dict[str, Any]:
        """Its splits in use by part, with images and sound as bytes."""
        library = _library()
        tables = dict[str, Any]()
        for part, split in self._splits.items():
            if split is not None:
                table = _open(library, self._name, self._config, split, self._cache, self.download)
                if isinstance(table, library.IterableDataset):
                    raise ConfigError(
                        f"{self._called}, split {split!r} is streamed, and clients cannot be cut from samples without "
                        "numbers; load it without streaming"
                    )
                if not isinstance(table, library.Dataset):
                    raise ConfigError(
                        f"{self._called}, split {split!r} is a {type(table).__name__}; give a datasets.Dataset"
                    )
                if not len(table):
                    raise ConfigError(f"{self._called}, split {split!r} has no rows; choose another")
                for column in {*self._inputs, *self._target, *([self._client] if self._client else [])}:
                    if column not in table.features:
                        known = ", ".join(table.column_names) or "none"
                        raise ConfigError(f"{self._called}, split {split!r} has no column {column!r}; it has {known}")
                for column in self._inputs:
                    if isinstance(table.features[column], library.Image | library.Audio):
                        plain = replace(table.features[column], decode=False)
                        table = table.cast_column(column, plain)
                tables[part] = table.with_format(None)
        return tables

    @property
    def _called(self) -> str:
        return repr(self._name) if isinstance(self._name, str) else "data.name"

    def _where(self, part: str) -> str:
        return f"{self._called}, split {self._splits[part] or self._splits['train']!r}"

    @cached_property
    def _content(self) -> Content:
        """The kind of inputs, from the columns' types."""
        kinds = {column: content_of(self._tables["train"].features[column]) for column in self._inputs}
        kinds |= {column: "numbers" for column in self.features.levels if kinds[column] == "text"}
        one = len(set(kinds.values())) == 1
        content = next(iter(kinds.values()))
        if unknown := next((column for column, kind in kinds.items() if kind is None), None):
            raise ConfigError(
                f"{self._where('train')}: {unknown!r} is {self._tables['train'].features[unknown]}; name columns of "
                "images, sound, texts, numbers or lists of numbers in data.inputs"
            )
        if not one or (len(self._inputs) > 1 and content not in ("numbers", "text")):
            listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
            raise ConfigError(
                f"data.inputs names {listed}; name one column, or several of numbers or of texts, or give the levels of"
                " texts that are categories in data.levels"
            )
        assert content is not None
        self._check_settings(content)
        return content

    def _check_settings(self, content: Content) -> None:
        """Refuse settings for other inputs."""
        if content != "images" and (self.grayscale or self._augmentation is not None or self._side != _SIDE):
            raise ConfigError(
                f"data.inputs are {content}; leave out data.image_size, data.grayscale, data.crop_padding and "
                "data.horizontal_flip"
            )
        if content != "numbers" and (self.fills_missing or self.features.levels):
            raise ConfigError(f"data.inputs are {content}; leave out data.impute and data.levels")
        if content in ("images", "numbers") and self._length is not None:
            raise ConfigError(f"data.inputs are {content}; leave out data.length")
        if content != "text" and (self._tokenizer is not None or self._vocabulary != _VOCABULARY):
            raise ConfigError(f"data.inputs are {content}; leave out data.tokenizer and data.vocab_size")
        if content == "text" and self._normalize.steps != Normalize((0.0,), (1.0,)).steps:
            raise ConfigError("data.inputs are text; leave out data.mean and data.std")
        if content == "audio":
            _ = self._signal

    @property
    def _signal(self) -> int:
        if self._length is None:
            raise ConfigError("data.length is null; set it to the values of a signal, such as 16000")
        return self._length

    @cached_property
    def _array_shape(self) -> tuple[int, ...]:
        first = read_array(self._inputs[0], None, None, self._stored("train")[0], f"{self._where('train')}, row 0")
        if not first.ndim:
            raise ConfigError(f"{self._where('train')}, row 0: {self._inputs[0]!r} has no shape; name another column")
        return tuple(first.shape)

    @cached_property
    def _reader(self) -> Reader | None:
        """Reads a row's inputs; None for images."""
        columns = self._inputs
        read: Reader | None = None
        match self._content:
            case "text":
                encode = hash_words if self._tokenizer is None else load_tokenizer(self._tokenizer, self._vocabulary)
                read = partial(read_text, columns, encode, self._vocabulary, self._length or _LENGTH)
            case "audio":
                rate = getattr(self._tables["train"].features[columns[0]], "sampling_rate", None)
                read = partial(read_sound, columns[0], self._signal, rate)
            case "numbers":
                return self._reader_of_numbers()
            case "arrays":
                read = partial(read_array, columns[0], self._length, None if self._length else self.input_shape)
        if self._content != "text":
            mean, std = self._scale(self.input_shape[0])
            if read is not None:  # the pixels of images are bytes
                self._prepare = Normalize(mean, std, max_value=1.0)
        return read

    def _scale(self, wanted: int) -> tuple[list[float], list[float]]:
        """The given mean and standard deviation: one, or one each."""
        given, step = self._normalize.num_channels, self._normalize.steps[0]
        if given not in (1, wanted):
            raise ConfigError(f"data.mean has {given} values for {wanted}; give one, or one each")
        return list(step["mean"]), list(step["std"])

    # Numbers and categories.

    @property
    def _numeric(self) -> list[str]:
        return [name for name in self._inputs if name not in self.features.levels]

    @cached_property
    def _encode(self) -> Encode | None:
        """The step from stored inputs to those of the network; None if they are the same."""
        x, gaps = np.empty((0, len(self._inputs))), list[str]()
        if self.features.has_medians:
            gaps, rows = self.gaps, self.columns.x
            x = np.full((len(rows), len(self._inputs)), np.nan)
            for name in gaps:
                x[:, self._inputs.index(name)] = self._column("train", name)[rows]
        return self.features.encoding(self._inputs, gaps, x)

    def _column(self, part: str, name: str) -> NDArray[np.float64]:
        """A column of numbers; NaN where one is missing."""
        values = self._tables[part].select_columns([name]).with_format("arrow")[:].column(0)
        return np.asarray(values.cast("float64").to_numpy())

    def _reader_of_numbers(self) -> Reader:
        mean, std = self._scale(len(self._numeric))
        if self._encode is not None:  # a number for each, as indicators and levels are not scaled
            mean, std = (values * len(self._numeric) if len(values) == 1 else values for values in (mean, std))
        self._prepare = in_turn(self._encode, mean, std)
        places = {
            name: partial(place_of, levels, self._feature_names(name)) for name, levels in self.features.levels.items()
        }
        open_to = {name for name in self._numeric if self.keeps_missing or self.features.keeps_missing(name)}
        return partial(read_numbers, self._inputs, open_to, places)

    def _feature_names(self, column: str) -> list[str] | None:
        """Names of classes that the column's type has."""
        names = getattr(self._tables["train"].features[column], "names", None)
        return None if names is None else list(names)

    @override
    def read(self) -> Columns:
        parts = dict[str, Columns]()
        for part, table in self._tables.items():
            y = self._classes(part, parts["train"].y if parts else None) if self._is_class else self._numbers(part)
            parts[part] = Columns(np.arange(len(table)), y, source=self._where(part))
        if self._client is not None:
            clients = self._clients(self._client)
            parts = {part: replace(rows, clients=clients[part]) for part, rows in parts.items()}
            if self._test_by == "clients":
                is_test = clients["train"].codes < 0
                parts |= {"train": parts["train"].take(~is_test), "test": parts["train"].take(is_test)}
        return replace(parts["train"], test=parts.get("test"), val=parts.get("val"))

    @property
    def _is_class(self) -> bool:
        """Whether the target is a class, by its type."""
        column = self._target[0]
        if len(self._target) > 1 or self._kind == "numbers":
            return False
        feature = self._tables["train"].features[column]
        dtype = str(getattr(feature, "dtype", type(feature).__name__))
        if dtype.startswith(("int", "uint", "bool", "string", "large_string")):
            return True
        if self._kind == "classes" or not (dtype.startswith("float") or content_of(feature) == "arrays"):
            raise ConfigError(
                f"{self._where('train')}: {column!r} is {dtype}, not a class; name another column in data.target"
            )
        return False

    def _classes(self, part: str, train: Categorical | None) -> Categorical:
        """The class of each sample, numbered as in the training split."""
        where, column = self._where(part), self._target[0]
        classes, known = _names(self._tables[part], column, where, "target"), self._feature_names(column)
        if self._names_given is not None and known is not None and self._names_given != known:
            raise ConfigError(f"data.class_names is {self._names_given}, and {column!r} has {known}; leave it out")
        names = train.names if train is not None else self._names_given or known or in_order(classes.names)
        if self._kind is None and known is None:
            check_few(names, len(self._tables["train"]), f"{where}: {column!r}")
        check_classes(classes.names, names, f"{where}, {column!r}")
        return classes.among(names)

    def _clients(self, column: str) -> dict[str, Categorical]:
        """The client of each sample by part; no name for the samples of others, such as of clients to test on."""
        own = {part: _names(table, column, self._where(part), "client") for part, table in self._tables.items()}
        names = in_order(own["train"].names)
        if self._test_by == "clients":
            count = round(self.test_fraction * len(names))
            if not 0 < count < len(names):
                raise ConfigError(
                    f"data.test_fraction {self.test_fraction:g} of {counted(len(names), 'client')} is {count}; choose "
                    "a fraction that leaves clients to train and to test on"
                )
            order = numpy_generator(self.seed, "hugging-face", "test").permutation(len(names))
            names = in_order(names[place] for place in order[count:])
        codes = own["train"].among(names).codes
        sizes = np.bincount(codes[codes >= 0], minlength=len(names))
        group = join_small(sizes, self._least or 1, self._most or len(names))
        members, first = np.bincount(group), np.unique(group, return_index=True)[1]
        joined = [
            names[place] if members[at] == 1 else f"{names[place]} +{members[at] - 1}" for at, place in enumerate(first)
        ]
        lookup = np.append(group, -1)
        return {part: Categorical(joined, lookup[clients.among(names).codes]) for part, clients in own.items()}

    def _numbers(self, part: str) -> NDArray[Any]:
        """Numerical targets, (n,) or (n, k)."""
        where, columns = self._where(part), list[NDArray[Any]]()
        for column in self._target:
            stored = _arrow(self._tables[part], column, where, "data.target")
            try:
                cells = stored.to_numpy()
                values = np.array(cells.tolist() if cells.dtype == object else cells, dtype=np.float64)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{where}: {column!r} does not hold numbers ({reason(error)}); correct it") from error
            columns.append(values)
        array = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return checked_targets(array, array.shape[1:], f"{where}: targets")

    def _stored(self, part: str) -> Any:
        """The columns of the inputs alone."""
        stored = self._tables[part].select_columns(list(dict.fromkeys(self._inputs)))
        return stored.with_format("numpy", dtype=np.float64) if self._content == "arrays" else stored


def join_small(sizes: IntArray, least: int, most: int) -> IntArray:
    """Join the two smallest clients until each has `least` samples and at most `most` are left.

    Args:
        sizes: Number of samples of each client, shape (n,).
        least: Least number of samples of a client.
        most: Largest number of clients.

    Returns:
        The group of each client, shape (n,), numbered in the order of their first clients.
    """
    if sizes.sum() < least:
        raise ConfigError(f"data.least_samples is {least}; it must be at most {sizes.sum()}, the training samples")
    heap = [(int(size), client, [client]) for client, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1 and (heap[0][0] < least or len(heap) > most):
        (size, first, members), (other, second, more) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (size + other, min(first, second), members + more))
    group = np.empty(len(sizes), dtype=np.int64)
    for number, (_, _, members) in enumerate(sorted(heap, key=lambda entry: entry[1])):
        group[members] = number
    return group


class _Rows(Dataset[Any]):
    """Some rows of a set, decoded one by one, with their targets."""

    def __init__(self, table: Any, rows: Part, where: str, read: Reader) -> None:
        self._table, self._rows, self._where, self._read = table, rows, where, read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        row = int(self._rows.x[index])
        return self._read(self._table[row], f"{self._where}, row {row}"), self._rows.y[index]


class _Pictures(ImageFiles):
    """Some images of a set, with their targets."""

    def __init__(self, table: Any, rows: Part, where: str, column: str, *shown: Any) -> None:
        super().__init__(rows.x, *shown)
        self._table, self._rows, self._where, self._column = table, rows.x, where, column

    @override
    def pixels(self, index: int) -> NDArray[Any]:
        row = int(self._rows[index])
        place = f"{self._where}, row {row}"
        return read_image(place, self._grayscale, content=bytes_of(self._table[row], self._column, place))


def _arrow(table: Any, column: str, where: str, setting: str) -> Any:
    """A column as an Arrow array, of which a memory-mapped one is not copied."""
    values = table.select_columns([column]).with_format("arrow")[:].column(0)
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy())[0])
        raise ConfigError(f"{where}, row {row}: {column!r}, which {setting} names, is empty; correct or remove the row")
    return values


def _names(table: Any, column: str, where: str, setting: str) -> Categorical:
    """A column of texts or whole numbers."""
    values, feature = _arrow(table, column, where, f"data.{setting}"), table.features[column]
    names, kind = getattr(feature, "names", None), str(values.type)
    if not kind.startswith(("int", "uint", "bool", "string", "large_string")):
        raise ConfigError(f"{where}: {column!r} is {kind}; data.{setting} must name texts or whole numbers")
    encoded = values.dictionary_encode().combine_chunks()
    held, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)
    if names is not None:
        if (wrong := next((place for place, code in enumerate(held) if not 0 <= code < len(names)), None)) is not None:
            raise ConfigError(
                f"{where}, row {(codes == wrong).argmax()}: {column!r} is {held[wrong]}, which is not a class; choose "
                "a split with labels, or remove the row"
            )
        held = [names[code] for code in held]
    return Categorical([str(name) for name in held], codes)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("HuggingFace needs datasets; install it with pip install 'lit-fed[datasets]'") from error
    return datasets


@contextmanager
def _quietly(library: Any, offline: bool) -> Iterator[None]:
    """Without progress bars, and without the network if wanted."""
    before, bars = library.config.HF_HUB_OFFLINE, library.are_progress_bars_disabled()
    library.config.HF_HUB_OFFLINE = before or offline
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = before
        if not bars:
            library.enable_progress_bars()


def _open(library: Any, name: str | Mapping[str, Any], config: str | None, split: str, cache: Any, fetch: bool) -> Any:
    """A split, memory-mapped."""
    if not isinstance(name, str):
        return _split_of(name, split, "data.name")
    path = Path(name)
    if path.is_file():
        raise ConfigError(f"data.name {name!r} is a file; name its folder")
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if looks_local and not path.is_dir():
        raise ConfigError(f"data.name {name!r} does not exist; name a folder, or a set on the hub such as 'owner/name'")
    try:
        with _quietly(library, offline=not fetch):
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                if config is not None:
                    raise ConfigError(f"data.config is {config!r}, and {name!r} holds a single one; leave it out")
                saved = library.load_from_disk(name)
                return _split_of(
                    saved if isinstance(saved, Mapping) else {str(saved.split or split): saved}, split, name
                )
            return library.load_dataset(name, config, split=split, cache_dir=cache)
    except ConfigError:
        raise
    except ConnectionError as error:
        arguments = repr(name) if config is None else f"{name!r}, {config!r}"
        missing = "cannot be fetched; connect to the network" if fetch else "is neither a folder nor in the cache here"
        raise ConfigError(
            f"data.name {name!r} {missing}{'' if fetch else '; set data.download to true'}, or run "
            f"load_dataset({arguments}).save_to_disk('folder') on a machine with network, copy the folder here, and "
            "name it"
        ) from error
    except Exception as error:  # any error of the library's readers
        raise ConfigError(f"data.name {name!r} cannot be read ({reason(error)}); correct it") from error


def _split_of(there: Mapping[str, Any], split: str, name: str) -> Any:
    if split not in there:
        raise ConfigError(f"{name} has no split {split!r}; it has {', '.join(map(str, there)) or 'none'}")
    return there[split]
