"""Cells of a data set's columns as inputs of a network: texts, numbers, arrays and sound."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.data.formats.csv_text import Encode, token_ids
from lit_fed.errors import ConfigError, reason

IMPUTE = ", or set data.impute to median, or to a number for each column"
"""The end of a line about a missing number."""
Content = Literal["images", "audio", "text", "numbers", "arrays"]
Reader = Callable[[Mapping[str, Any], str], Tensor]
"""Reads the inputs of a row, given its cells by column, and its place for errors."""


def content_of(feature: Any) -> Content | None:
    """The kind of inputs that the type of a column of ``datasets`` makes; None for none."""
    name, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if name in ("Image", "Audio"):
        return "images" if name == "Image" else "audio"
    if name == "Value" and dtype in ("string", "large_string"):
        return "text"
    if name in ("Value", "ClassLabel"):
        return "numbers" if dtype.startswith(("int", "uint", "float", "bool")) else None
    if name in ("List", "LargeList", "Sequence"):
        return "arrays" if content_of(feature.feature) in ("numbers", "arrays") else None
    return "arrays" if name.startswith("Array") and name.endswith("D") else None


def filled(row: Mapping[str, Any], column: str, place: str, advice: str = "") -> Any:
    """A cell; raise `ConfigError` if it is empty, which `advice` ends."""
    if row[column] is None:
        raise ConfigError(f"{place}: {column!r} is empty; correct or remove the row{advice}")
    return row[column]


def bytes_of(row: Mapping[str, Any], column: str, place: str) -> bytes:
    """The file in a cell, or the file beside the set that the cell names."""
    cell = filled(row, column, place)
    if cell.get("bytes") is not None:
        return bytes(cell["bytes"])
    try:
        return Path(filled(cell, "path", place)).read_bytes()
    except OSError as error:
        raise ConfigError(f"{place}: {cell['path']} cannot be read ({error.strerror}); restore it") from error


def read_text(
    columns: list[str], encode: Encode, vocab_size: int, length: int, row: Mapping[str, Any], place: str
) -> Tensor:
    """Token ids (length,) of texts, joined with a space, and 0."""
    text = " ".join(filled(row, column, place) for column in columns)
    return torch.from_numpy(token_ids(text, encode, vocab_size, length)).long()


def place_of(levels: list[str], names: list[str] | None, cell: Any) -> int:
    """The position of a category's cell among its levels; −1 if it is none, or empty.

    Args:
        levels: The levels.
        names: Names of the classes that the cells are numbers of; None for cells that are names or whole numbers.
        cell: The cell.
    """
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    text = str(cell).strip() if names is None or cell is None or cell < 0 else names[cell]
    return levels.index(text) if cell is not None and text in levels else -1


def read_numbers(
    columns: list[str],
    open_to: set[str],
    places: Mapping[str, Callable[[Any], int]],
    row: Mapping[str, Any],
    place: str,
) -> Tensor:
    """A number of each column, shape (columns,).

    Args:
        columns: The columns.
        open_to: Columns in which a number may be missing, which is NaN.
        places: The number of a cell by column that is a category, see `place_of`.
        row: The cells.
        place: The row, for errors.
    """
    numbers = [
        places[column](row[column])
        if column in places
        else np.nan
        if column in open_to and row[column] is None
        else filled(row, column, place, IMPUTE)
        for column in columns
    ]
    values = np.asarray(numbers, dtype=np.float64)
    is_gap = np.isnan(values) & [column in open_to for column in columns]
    _finite(np.where(is_gap, 0.0, values), place, IMPUTE)
    return torch.from_numpy(values)


def read_array(
    column: str, length: int | None, shape: tuple[int, ...] | None, row: Mapping[str, Any], place: str
) -> Tensor:
    """An array of a `shape`, or of any with None; with a `length`, a list as a signal (1, length)."""
    try:
        values = np.asarray(filled(row, column, place), dtype=np.float64)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}: {column!r} is not an array of numbers; correct or remove the row") from error
    if length is not None:
        if values.ndim != 1:
            raise ConfigError(f"{place}: {column!r} has shape {values.shape}; data.length is for lists, leave it out")
        return _finite(_cut(values, length), place)
    if shape is not None and values.shape != shape:
        raise ConfigError(
            f"{place}: {column!r} has shape {values.shape}, and row 0 has {shape}; set data.length for lists of "
            "different lengths"
        )
    return _finite(values, place)


def read_sound(column: str, length: int, rate: int | None, row: Mapping[str, Any], place: str) -> Tensor:
    """A WAV file as a signal (1, length): the mean of its channels, integers scaled to [−1, 1]."""
    from scipy.io import wavfile

    content = bytes_of(row, column, place)
    try:
        found, values = wavfile.read(io.BytesIO(content))
    except Exception as error:  # any error of a damaged file
        raise ConfigError(
            f"{place}: {column!r} is not a WAV file ({reason(error)}); store sound as WAV, or as a column of numbers"
        ) from error
    if rate is not None and found != rate:
        raise ConfigError(f"{place}: {column!r} has {found} values a second, and the column {rate}; resample it")
    wide = values.astype(np.float64)
    if values.dtype == np.uint8:
        wide = (wide - 128) / 128
    elif values.dtype.kind == "i":
        wide /= 2.0 ** (8 * values.dtype.itemsize - 1)
    return _finite(_cut(wide if wide.ndim == 1 else wide.mean(axis=1), length), place)


def _cut(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """A signal (1, length), cut or with zeros at its end."""
    out = np.zeros((1, length))
    out[0, : len(values)] = values[:length]
    return out


def _finite(values: NDArray[np.float64], place: str, advice: str = "") -> Tensor:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise ConfigError(f"{place} holds NaN or infinity; correct or remove it{advice}")
    return torch.from_numpy(values)
