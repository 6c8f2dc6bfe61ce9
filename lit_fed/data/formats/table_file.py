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
FEATURES = "data.features"
"""The setting of columns in which numbers may be missing, and which may be categories."""
ENDINGS = (".csv", ".csv.gz", ".parquet")
_LARGEST = float(np.finfo(np.float32).max)
_MISSING = ("", "na", "n/a", "nan", "null", "none")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.]\d\d?[-/.](\d{4}|\d\d)( .*)?")
_WRITES = "(lit-fed statistics --write finds them)"


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

    def given(self, name: str, setting: str, levels: Sequence[str] = ()) -> tuple[NDArray[np.int64], TableFile]:
        """Rows of a column that are not missing (empty, or such as ``NA`` and no level), and their cells alone."""
        column = self.raw(name, setting)
        cells = [str(cell).strip() for cell in column.tolist()]
        rows = np.flatnonzero([cell.lower() not in _MISSING or cell in levels for cell in cells])
        return rows, TableFile(self.path, {name: column[rows]}, lambda row: self.place(int(rows[row])))

    def is_category(self, name: str, setting: str) -> bool:
        """Whether a column has texts and no number; raise `ConfigError` if the texts are dates."""
        cells = [str(cell).strip() for cell in self.given(name, setting)[1].cells[name].tolist()]
        if cells and (self.cells[name].dtype.kind == "M" or all(map(_DATE.fullmatch, cells))):
            raise ConfigError(
                f"{self.path}: {name} holds dates, such as {cells[0][:40]!r}; write a number in their place, such as "
                f"days since admission, or leave the column out of {setting}"
            )
        return self.cells[name].dtype.kind == "O" and bool(cells) and not any(map(_is_number, cells))

    def numbers(self, name: str, setting: str) -> NDArray[np.float64]:
        """A column as numbers."""
        column = self.raw(name, setting)
        if column.dtype.kind not in "biufO" and not self.is_category(name, setting):
            raise ConfigError(f"{self.path}: {name} holds {column.dtype}, and {setting} needs numbers; leave it out")
        try:
            if column.dtype.kind == "O" and not all(map(_is_spelt, column.tolist())):
                raise ValueError("Python reads 1_0 as 10, and other programs do not")
            numbers = column.astype(np.float64)
        except (ValueError, TypeError):
            are_numbers = [_is_number(cell) for cell in column.tolist()]
            if self.is_category(name, setting):
                instead = f"its levels in data.levels {_WRITES}" if setting == FEATURES else "write numbers into it"
                raise ConfigError(
                    f"{self.path}: {name} holds texts, such as {str(column[0])[:40]!r}, and {setting} needs numbers; "
                    f"name other columns in {setting}, or {instead}"
                ) from None
            raise self._wrong(name, column, are_numbers.index(False), "a number", setting) from None
        if len(wrong := np.flatnonzero(~(np.abs(numbers) <= _LARGEST))):  # also of NaN
            raise self._wrong(name, column, int(wrong[0]), "a finite number of 32 bits", setting)
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

    def _wrong(self, name: str, column: NDArray[Any], row: int, wanted: str, setting: str = "") -> ConfigError:
        cell, advice = str(column.tolist()[row]).strip(), "correct or remove the row"
        if cell.lower() in _MISSING and setting == FEATURES:
            advice = f"set data.impute to median, or to a number for each column {_WRITES}, or correct the cell"
        content = "empty" if cell in ("", "None", "nan") else f"{cell[:40]!r}"
        return ConfigError(f"{self.path}, {self.place(row)}: {name} is {content}, not {wanted}; {advice}")


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
