"""Arrays in ``.npz`` and ``.npy`` files, without pickles, and new inputs from them or from images of any size."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        self._headers: dict[str, Header] = {}

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the file."""
        if not self.path.is_file():
            raise ConfigError(f"{self.path} does not exist; {self._advice}")
        try:
            with zipfile.ZipFile(self.path) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
        except _DAMAGED as error:
            raise unreadable(self.path, error) from error
        if missing := [key for key in self._needed if key not in keys]:
            raise ConfigError(f"{self.path} lacks {', '.join(missing)}; it has {', '.join(keys) or 'nothing'}")
        return keys

    def header(self, key: str) -> Header:
        """Shape and dtype of an array, without reading its values."""
        if key not in self._headers:
            _ = self.keys
            try:
                with zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as member:
                    self._headers[key] = _npy_header(member)
            except _DAMAGED as error:
                raise unreadable(self.path, error) from error
        return self._headers[key]

    def read(self, *keys: str) -> dict[str, NDArray[Any]]:
        """Arrays by key."""
        _ = self.keys
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return {key: archive[key] for key in keys}
        except _DAMAGED as error:
            raise unreadable(self.path, error) from error


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


IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm")
ARRAYS = (".npz", ".npy")


class NewInputs(NamedTuple):
    """Samples to predict on.

    Args:
        loader: Batches as a network sees them: x alone, or (x, y) if the file has targets too.
        files: The file of each sample, if every sample has a separate file.
    """

    loader: Loader
    files: list[str] | None = None


class Records(NamedTuple):
    """Predictions in the terms of their data.

    Args:
        rows: The rows of a table, all with the same columns.
        document: The content of a JSON file.
        picture: Draws the predictions.
    """

    rows: list[dict[str, Any]]
    document: Any
    picture: Callable[[], Figure]


def is_arrays(path: Path) -> bool:
    """Whether a file's ending is that of arrays."""
    return path.suffix.lower() in ARRAYS


def read_x(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Inputs as a data set stores them: ``x`` of an ``.npz`` file, or an ``.npy`` file.

    Args:
        path: The file.
        shape: Shape of one stored input; images may also be (H, W, C), or (H, W) of one channel.
        dtype: The stored dtype.
    """
    is_npy = path.suffix.lower() == ".npy" and path.is_file()
    x = read_npy(path) if is_npy else Archive(path, ["x"], "name a file with --inputs").read("x")["x"]
    if len(shape) == 3 and x.shape[1:] != tuple(shape) and x.ndim in (3, 4):
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    if x.ndim < 1 or x.shape[1:] != tuple(shape):
        raise ConfigError(f"{path}: one input of x has shape {x.shape[1:]}; it must be {tuple(shape)}")
    if not len(x):
        raise ConfigError(f"{path}: x is empty; give one input or more")
    if x.dtype.kind not in "iuf" or (x.dtype.kind == "f") != (dtype.kind == "f"):
        raise ConfigError(f"{path}: x holds {x.dtype}; it must be {dtype}, as the data set stores")
    return _cast(x, dtype, path)


def _cast(x: NDArray[Any], dtype: np.dtype[Any], path: Path) -> NDArray[Any]:
    """Inputs in the stored dtype."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = np.ascontiguousarray(x, dtype=dtype)
        _refuse(~np.isfinite(x), x, path, "NaN or infinity; correct or remove it")
        _refuse(~np.isfinite(cast), x, path, f"and the data set stores {dtype}, up to {np.finfo(dtype).max:.3g}")
        return cast
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if x.size and (int(x.min()) < least or int(x.max()) > most):
        beyond = np.array([not least <= value <= most for value in x.ravel().tolist()]).reshape(x.shape)
        _refuse(beyond, x, path, f"and the data set stores {dtype}, {least} to {most}")
    return np.ascontiguousarray(x, dtype=dtype)


def _refuse(odd: NDArray[np.bool_], x: NDArray[Any], path: Path, why: str) -> None:
    """Refuse the first odd value, with the reason."""
    if odd.any():
        row = int(odd.reshape(len(x), -1).any(axis=1).argmax())
        value = x[row][odd[row]].flat[0] if x.ndim > 1 else x[row]
        says = why if not np.isfinite(value) else f"{value:.6g}, {why}" if x.dtype.kind == "f" else f"{value}, {why}"
        raise ConfigError(f"{path}: sample {row} of x holds {says}")


def image_files(path: Path) -> list[Path]:
    """An image, or the images in a folder and its subfolders, in alphabetical order; a line counts the other files."""
    if path.is_file() and path.suffix.lower() in IMAGES:
        return [path]
    if not path.is_dir():
        what = "is not an image" if path.is_file() else "does not exist"
        raise ConfigError(f"{path} {what}; name a folder of {', '.join(IMAGES)} files, or one of them, with --inputs")
    images, others = split_images(path.rglob("*"))
    if not images:
        raise ConfigError(f"{path} holds no {', '.join(IMAGES)} files; name another folder with --inputs")
    remark_left_out(path, others, len(images), IMAGES)
    return images


def split_images(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Image files by their endings, and other files, in alphabetical order; without folders and hidden files."""
    images, others = list[Path](), list[Path]()
    for path in sorted(paths):
        if not is_hidden(path) and not path.is_dir():
            (images if path.suffix.lower() in IMAGES and path.is_file() else others).append(path)
    return images, others
