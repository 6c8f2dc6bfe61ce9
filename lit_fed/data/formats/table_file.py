"""Files of tables as columns of cells: CSV and Parquet; errors name the line."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

Notation = Literal["whole", "decimal", "number", "text"]
"""Form of a cell: ``7``, ``7.0``, ``7.5``, or anything else."""
ENDINGS = (".csv", ".csv.gz", ".parquet")
_LARGEST = float(np.finfo(np.float32).max)
_MISSING = ("", "na", "n/a", "nan", "null", "none")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class TableFile:
    """A file's columns.

    Args:
        path: The file.
        cells: By name, texts of a CSV file or values of a Parquet file, shape (n,).
        place: For errors, names row i (counted from 0), such as ``line 7``.
    """

    path: Path
    cells: dict[str, NDArray[Any]]
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()), ()))

    def raw(self, name: str, setting: str) -> NDArray[Any]:
        """A column of single values as stored; errors name the `setting` that asks for it."""
        if name not in self.cells:
            close = get_close_matches(name, list(self.cells), n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(self.cells) or 'no column'}"
            raise ConfigError(f"{self.path} has no column {name!r}, which {setting} names; {hint}")
        column = self.cells[name]
        first = next((cell for cell in column if cell is not None), None) if column.dtype.kind == "O" else None
        if isinstance(first, np.ndarray | list | dict):
            raise ConfigError(
                f"{self.path}: {name} holds lists, and {setting} needs a number or a text in each row; write a column "
                "for each entry, or leave it out"
            )
        return column

    def texts(self, name: str, setting: str) -> list[str]:
        """A column as names of classes or clients; ``7`` and ``7.0`` are the same name."""
        column = self.raw(name, setting)
        if column.dtype.kind == "f":
            if len(wrong := np.flatnonzero(~(np.isfinite(column) & (column == np.round(column))))):
                raise self._wrong(name, column, int(wrong[0]), "a name or a whole number")
            column = column.astype(np.int64)
        texts = ["" if value is None or value != value else str(value).strip() for value in column.tolist()]
        if "" in texts:
            raise self._wrong(name, column, texts.index(""), "a name or a whole number")
        kinds = self.notations(name, setting)
        if "decimal" in kinds and kinds.keys() <= {"whole", "decimal"}:
            return [text if _WHOLE.fullmatch(text) else str(int(float(text))) for text in texts]
        return texts

    def numbers(self, name: str, setting: str, keeps_missing: bool = False) -> NDArray[np.float64]:
        """A column as numbers; with `keeps_missing`, NaN where a cell is empty or says that it is missing."""
        column = self.raw(name, setting)
        if keeps_missing and column.dtype.kind == "O":
            cells = [np.nan if str(cell).strip().lower() in _MISSING else cell for cell in column.tolist()]
            column = np.array(cells, dtype=object)
        if column.dtype.kind not in "biufO":
            raise ConfigError(f"{self.path}: {name} holds {column.dtype}, and {setting} needs numbers; leave it out")
        try:
            if column.dtype.kind == "O" and not all(map(_is_spelt, column.tolist())):
                raise ValueError("Python reads 1_0 as 10, and other programs do not")
            numbers = column.astype(np.float64)
        except (ValueError, TypeError):
            are_numbers = [_is_number(cell) for cell in column.tolist()]
            if not any(are_numbers):
                raise ConfigError(
                    f"{self.path}: {name} holds texts, such as {str(column[0])[:40]!r}, and {setting} needs numbers; "
                    f"name other columns in {setting}, or write numbers into it"
                ) from None
            raise self._wrong(name, column, are_numbers.index(False), "a number") from None
        told = np.abs(numbers) <= _LARGEST  # which NaN is not either
        if len(wrong := np.flatnonzero(~(told | (keeps_missing & np.isnan(numbers))))):
            raise self._wrong(name, column, int(wrong[0]), "a finite number of 32 bits")
        return numbers

    def notations(self, name: str, setting: str) -> dict[Notation, int]:
        """The notations in a column, each with its first row."""
        column = self.raw(name, setting)
        if column.dtype.kind in "iub":
            return {"whole": 0}
        rows_by_notation = dict[Notation, int]()
        for row, cell in enumerate(column.tolist()):
            rows_by_notation.setdefault(_notation(str(cell).strip(), column.dtype.kind == "f"), row)
        return rows_by_notation

    def _wrong(self, name: str, column: NDArray[Any], row: int, wanted: str) -> ConfigError:
        cell = column.tolist()[row]
        content = "empty" if cell is None or cell != cell or str(cell).strip() == "" else f"{str(cell)[:40]!r}"
        return ConfigError(
            f"{self.path}, {self.place(row)}: {name} is {content}, not {wanted}; correct or remove the row"
        )


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return _is_spelt(cell)


def _is_spelt(cell: Any) -> bool:
    """Whether a cell is not a text that only Python takes for a number, such as ``1_0``."""
    return not isinstance(cell, str) or ("_" not in cell and cell.isascii())


def read_table(path: Path) -> TableFile:
    """The columns of a Parquet file, or of a CSV file, whose first row names them."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; name a file that ends in {', '.join(ENDINGS)}")
    if is_table(path):
        return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    raise ConfigError(f"{path} is not a table; name a file that ends in {', '.join(ENDINGS)}")


def is_table(path: Path) -> bool:
    """Whether a file's ending is that of a table."""
    return path.name.lower().endswith(ENDINGS)


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each row of a CSV file, plain or gzipped, the header among them."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rt", newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)  # else an unclosed quote swallows the rest of the file
            for row in reader:
                yield reader.line_num, row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        line = f", line {reader.line_num}," if isinstance(error, csv.Error) else ""
        raise ConfigError(f"{path}{line} cannot be read ({error}); it must be a UTF-8 CSV file") from error


def _csv(path: Path) -> TableFile:
    content = csv_rows(path)
    names = [name.strip() for name in next(content, (1, []))[1]]
    rows, lines = list[list[str]](), list[int]()
    for line, row in content:
        if not row:  # an empty line
            continue
        if len(row) != len(names):
            raise ConfigError(f"{path}, line {line} has {len(row)} cells and line 1 has {len(names)}; correct the row")
        rows.append(row)
        lines.append(line)
    _check_names(path, names)
    if not rows:
        raise ConfigError(f"{path} has no rows{' below its header' if names else ''}; give one sample per row")
    table = np.array(rows, dtype=object)
    return TableFile(
        path, {name: table[:, column] for column, name in enumerate(names)}, lambda row: f"line {lines[row]}"
    )


def _parquet(path: Path) -> TableFile:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow; install it with pip install 'lit-fed[parquet]'") from error
    try:
        _check_names(path, parquet.read_schema(path).names)
        table = parquet.read_table(path)
        cells = {name: table.column(name).to_numpy() for name in table.column_names}
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); write it anew") from error
    if not table.num_rows:
        raise ConfigError(f"{path} has no rows; give one sample per row")
    return TableFile(path, cells, lambda row: f"row {row}")


def _check_names(path: Path, names: Sequence[str]) -> None:
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise ConfigError(f"{path} has two columns named {twice!r}; rename one")


def _notation(cell: str, is_number: bool) -> Notation:
    if not is_number and _WHOLE.fullmatch(cell):
        return "whole"
    if not _is_number(cell):
        return "text"
    return "decimal" if float(cell).is_integer() else "number"
