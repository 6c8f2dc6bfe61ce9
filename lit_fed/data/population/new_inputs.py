"""Inputs that are none of a data set's, from files: arrays as it stores them, images of any size."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lit_fed.data.loaders.image_files import ImageFiles
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.remarks import is_hidden, remark_left_out
from lit_fed.errors import ConfigError

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm")
ARRAYS = (".npz", ".npy")


class NewInputs(NamedTuple):
    """Samples to predict on.

    Args:
        loader: Batches as a network sees them: x alone, or (x, y) where a file has targets too.
        files: The file of each sample, where every one has its own.
    """

    loader: Loader
    files: list[str] | None = None


def is_arrays(path: Path) -> bool:
    """Whether a path is that of a file of arrays."""
    return path.suffix.lower() in ARRAYS


def read_x(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The inputs of a file of arrays, as a data set stores them: ``x`` of an ``.npz`` file, or an ``.npy`` file.

    Args:
        path: The file.
        shape: The shape of one stored input; images may also be (H, W, C), or (H, W) of one channel.
        dtype: The type of what is stored.

    Raises:
        ConfigError: It is missing or damaged, or its inputs are not like those of the data set, or a value is none that
            the type has.
    """
    x = _load(path)
    if len(shape) == 3 and x.shape[1:] != tuple(shape) and x.ndim in (3, 4):
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    if x.ndim < 1 or x.shape[1:] != tuple(shape):
        raise ConfigError(f"{path}: one input of x has shape {x.shape[1:]}, and the data set's have {tuple(shape)}")
    if not len(x):
        raise ConfigError(f"{path}: x is empty: give one input or more")
    if x.dtype.kind not in "iuf" or (x.dtype.kind == "f") != (dtype.kind == "f"):
        raise ConfigError(f"{path}: x holds {x.dtype}, and the data set stores {dtype}: give the same")
    return _cast(x, dtype, path)


def _cast(x: NDArray[Any], dtype: np.dtype[Any], path: Path) -> NDArray[Any]:
    """Inputs in the type that is stored.

    Raises:
        ConfigError: A value is not finite, or the type has no such value: it would be infinite, or another one.
    """
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = np.ascontiguousarray(x, dtype=dtype)
        _refuse(~np.isfinite(x), x, path, "NaN or infinity: correct or remove it")
        _refuse(~np.isfinite(cast), x, path, f"and the data set stores {dtype}, up to {np.finfo(dtype).max:.3g}")
        return cast
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if x.size and (int(x.min()) < least or int(x.max()) > most):
        beyond = np.array([not least <= value <= most for value in x.ravel().tolist()]).reshape(x.shape)
        _refuse(beyond, x, path, f"and the data set stores {dtype}, {least} to {most}")
    return np.ascontiguousarray(x, dtype=dtype)


def _refuse(odd: NDArray[np.bool_], x: NDArray[Any], path: Path, why: str) -> None:
    """Name the first value that cannot be."""
    if odd.any():
        row = int(odd.reshape(len(x), -1).any(axis=1).argmax())
        value = x[row][odd[row]].flat[0] if x.ndim > 1 else x[row]
        told = why if not np.isfinite(value) else f"{value:.6g}, {why}" if x.dtype.kind == "f" else f"{value}, {why}"
        raise ConfigError(f"{path}: sample {row} of x holds {told}")


def _load(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: name a file with --inputs")
    try:
        if path.suffix.lower() == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        with np.load(path, allow_pickle=False) as found:
            if "x" not in found:
                raise ConfigError(f"{path} lacks x; it has {', '.join(found) or 'nothing'}")
            return np.asarray(found["x"])
    except ConfigError:
        raise
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path} cannot be read ({why}): write plain numbers with numpy.savez(path, x=…)") from error


def image_files(path: Path) -> list[Path]:
    """An image, or those of a folder and all folders in it, by the alphabet; other files there are said to be left out.

    Raises:
        ConfigError: There are none.
    """
    if path.is_file() and path.suffix.lower() in IMAGES:
        return [path]
    if not path.is_dir():
        what = "is no image" if path.is_file() else "does not exist"
        raise ConfigError(f"{path} {what}: name a folder of {', '.join(IMAGES)} files, or one of them, with --inputs")
    found, others = split_images(path.rglob("*"))
    if not found:
        raise ConfigError(f"{path} holds no {', '.join(IMAGES)} files: name another folder with --inputs")
    remark_left_out(path, others, len(found), IMAGES)
    return found


def split_images(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Files that are images by their endings, and other files, by the alphabet; without folders and hidden files."""
    images, others = list[Path](), list[Path]()
    for path in sorted(paths):
        if not is_hidden(path) and not path.is_dir():
            (images if path.suffix.lower() in IMAGES and path.is_file() else others).append(path)
    return images, others


class Images(Dataset[Tensor]):
    """Images in files as bytes, (channels, side, side), without labels.

    Args:
        paths: The files.
        side: Pixels a side, to which they are resized.
        grayscale: Decode to one channel and not to three.
    """

    def __init__(self, paths: Sequence[Path], side: int, grayscale: bool) -> None:
        self._files = ImageFiles([str(path) for path in paths], [0] * len(paths), side, grayscale, None)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        return self._files[index][0]


class Rows(Dataset[Tensor]):
    """The rows of a tensor as samples.

    Args:
        x: Of shape (n, …).
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Tensor:
        return self._x[index]
