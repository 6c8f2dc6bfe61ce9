"""Labelled texts from CSV files, as rows of token ids."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.formats.table_file import csv_rows
from lit_fed.data.population.source import Columns, TensorSource
from lit_fed.errors import ConfigError

Column = int | str
Encode = Callable[[str, int, int], Sequence[int]]
"""Ids of a text's tokens, given the size of the vocabulary and the length wanted."""
_MOST = 2**31 - 1  # ids are stored in 32 bits


class CSVText(TensorSource):
    """Texts of two CSV files, one a training and one a test set, each cut or padded to the same number of tokens.

    An input is a row of token ids, shape (length,), padded with 0. By default a token is a word in lower case or a
    punctuation mark, and its id a hash: no vocabulary to keep, and no download.

    Args:
        train_file: The training set in `root`, plain or gzipped; without the file of this name, the same with ``.gz``
            or without it.
        test_file: The test set.
        header: Whether the first row names the columns.
        label_column: The label's column, by name or position.
        text_columns: The text's columns, joined with a space.
        client_column: The column of each text's client; the partition is then `Natural`. Null without clients.
        first_label: The smallest label; Yahoo Answers counts from 1.
        num_classes: Number of classes; null for the largest training label + 1.
        length: Tokens per text.
        vocab_size: Token ids are 0 … vocab_size − 1; the network needs `vocab_size` embeddings.
        tokenizer: Folder of a tokenizer that transformers can load, such as BERT's; needs the extra ``text``.
        kwargs: The population's settings, see `FederatedDataModule`.

    Raises:
        ConfigError: A file is missing, damaged, or lacks a column, or a label is not a whole number.
    """

    def __init__(
        self,
        train_file: str = "train.csv.gz",
        test_file: str = "test.csv.gz",
        header: bool = True,
        label_column: int | str = "label",
        text_columns: Sequence[int | str] = ("text",),
        client_column: int | str | None = None,
        first_label: int = 0,
        num_classes: int | None = None,
        length: int = 64,
        vocab_size: int = 8192,
        tokenizer: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.names_clients = client_column is not None
        super().__init__(test_fraction=0.2, class_names=None, **kwargs)  # no settings: there is a file of test samples
        check_range("data.length", length, least=1, most=_MOST)
        check_range("data.vocab_size", vocab_size, least=2, most=_MOST)
        if not text_columns:
            raise ConfigError("data.text_columns is empty; name at least one column")
        self._files = {"train": _found(Path(self.root) / train_file), "test": _found(Path(self.root) / test_file)}
        self._header = header
        self._columns: list[Column] = [label_column, *([] if client_column is None else [client_column]), *text_columns]
        self._first_label = first_label
        self._num_classes_given = num_classes
        self.length, self.vocab_size = length, vocab_size
        self._tokenizer = tokenizer

    @override
    def preprocessing(self) -> None:
        """Unknown: texts become token ids on reading the files."""

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(length,)."""
        return (self.length,)

    @override
    def read(self) -> Columns:
        encode = hash_words if self._tokenizer is None else load_tokenizer(self._tokenizer, self.vocab_size)
        train, test = (self._encoded(path, encode) for path in self._files.values())
        return replace(train, test=test, source=str(self._files["train"].parent))

    def _encoded(self, path: Path, encode: Encode) -> Columns:
        labels, clients, tokens = [], [], []
        for line, (label, *cells) in self._rows(path):
            labels.append(self._label(label, f"{path}, line {line}"))
            clients += [cells.pop(0).strip()] if self.names_clients else []
            if clients and not clients[-1]:
                raise ConfigError(f"{path}, line {line} has no client; correct or remove the row")
            tokens.append(token_ids(" ".join(cells), encode, self.vocab_size, self.length))
        if not labels:
            raise ConfigError(f"{path} holds no texts; give one per row")
        return Columns(np.stack(tokens), np.asarray(labels, dtype=np.int64), clients or None)

    def _rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """Line and cells of each row: label, client if there is one, and texts."""
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; set data.root to the folder of the CSV files")
        rows = csv_rows(path)
        names = next(rows, (1, []))[1] if self._header else None
        places = [_position(column, names, path) for column in self._columns]
        for line, row in rows:
            if len(row) <= max(places):
                raise ConfigError(f"{path}, line {line} has {len(row)} columns; correct the row")
            yield line, [row[place] for place in places]

    def _label(self, text: str, where: str) -> int:
        try:
            label = int(text) - self._first_label
        except ValueError:
            label = -_MOST
        if abs(label) >= _MOST:
            raise ConfigError(f"{where}: the label is {text!r:.40}; it must be a whole number below 2**31")
        return label


def token_ids(text: str, encode: Encode, vocab_size: int, length: int) -> NDArray[np.int32]:
    """Ids (length,) of a text's tokens, and 0 after the last."""
    ids, read = np.zeros(length, dtype=np.int32), encode(text, vocab_size, length)[:length]
    ids[: len(read)] = read
    return ids


def hash_words(text: str, vocab_size: int, length: int) -> list[int]:
    """Ids in 1 … vocab_size − 1 of the first `length` words and marks: CRC-32, the same on every machine."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())[:length]
    return [1 + zlib.crc32(word.encode()) % (vocab_size - 1) for word in words]


def _found(path: Path) -> Path:
    """A file, or its gzipped or plain twin if that alone exists."""
    twin = path.with_suffix("") if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    return twin if twin.is_file() and not path.is_file() else path


def _position(column: Column, names: list[str] | None, path: Path) -> int:
    if isinstance(column, int):
        if column < 0:
            raise ConfigError(f"data.text_columns, label_column or client_column is {column}; positions count from 0")
        return column
    if names is None or column not in names:
        known = "no header" if names is None else ", ".join(names) or "nothing"
        raise ConfigError(
            f"{path} has no column {column!r} ({known}); set data.label_column, data.client_column and "
            "data.text_columns, by position if data.header is false"
        )
    return names.index(column)


def load_tokenizer(folder: str, vocab_size: int) -> Encode:
    """A tokenizer of transformers in a folder, as a function of text, `vocab_size` and length."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("data.tokenizer needs transformers; install it with pip install 'lit-fed[text]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"data.tokenizer {folder} cannot be loaded ({reason}); name a tokenizer's folder") from error
    if len(tokenizer) > vocab_size:
        raise ConfigError(f"data.vocab_size is {vocab_size}; it must be at least {len(tokenizer)} for the tokenizer")

    return partial(_tokens, tokenizer)


def _tokens(tokenizer: Any, text: str, vocab_size: int, length: int) -> Sequence[int]:
    ids: list[int] = tokenizer(text, truncation=True, max_length=length)["input_ids"]
    return ids
