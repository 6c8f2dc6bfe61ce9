"""Arrays in ``.npz`` files, without pickles."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

Header = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype."""
_DAMAGED = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write_archive(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as one ``.npz`` file.

    Note:
        ``numpy.savez`` of NumPy before 2.4 leaves its archive open where a disk is full, and the garbage collector then
        prints a second error.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


class Archive:
    """One ``.npz`` file.

    Args:
        path: The file.
        needed: Keys that it must have.
        advice: For errors, how to make up for a missing file.
    """

    def __init__(self, path: Path, needed: Sequence[str], advice: str) -> None:
        self.path, self._needed, self._advice = path, needed, advice
        self._keys: list[str] | None = None
        self._headers: dict[str, Header] = {}

    @property
    def keys(self) -> list[str]:
        """The keys of the file."""
        if self._keys is None:
            if not self.path.is_file():
                raise ConfigError(f"{self.path} does not exist; {self._advice}")
            try:
                with zipfile.ZipFile(self.path) as archive:
                    keys = [name.removesuffix(".npy") for name in archive.namelist()]
            except _DAMAGED as error:
                raise self._unreadable(error) from error
            if missing := [key for key in self._needed if key not in keys]:
                raise ConfigError(f"{self.path} lacks {', '.join(missing)}; it has {', '.join(keys) or 'nothing'}")
            self._keys = keys
        return self._keys

    def header(self, key: str) -> Header:
        """Shape and dtype of an array, without reading its values."""
        if key not in self._headers:
            _ = self.keys
            try:
                with zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as member:
                    self._headers[key] = _npy_header(member)
            except _DAMAGED as error:
                raise self._unreadable(error) from error
        return self._headers[key]

    def read(self, *keys: str) -> dict[str, NDArray[Any]]:
        """Arrays by key."""
        _ = self.keys
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return {key: archive[key] for key in keys}
        except _DAMAGED as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ConfigError:
        return unreadable(self.path, error)


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an ``.npy`` file."""
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except _DAMAGED as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ConfigError:
    """The error of a damaged file."""
    why = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(f"{path} cannot be read ({why}); save plain number arrays with numpy.savez")


def check_inputs(inputs: NDArray[Any], what: str) -> None:
    """Refuse inputs that are neither bytes nor other integers up to 32 bits nor floating-point numbers."""
    if inputs.dtype.kind not in "uif" or inputs.dtype == np.uint16:
        raise ConfigError(f"{what} holds {inputs.dtype}; it must be uint8 or floating point")


def _npy_header(member: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    return tuple(shape), dtype
