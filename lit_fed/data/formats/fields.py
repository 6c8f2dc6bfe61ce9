"""Fields of a map-style data set's samples: the target and the client."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lit_fed.data.loaders.worker_loader import isolated_randomness
from lit_fed.errors import ConfigError, own_traceback, reason

Key = int | str
"""A position in a tuple, or a key of a dictionary."""
_USUAL_KEYS = ("label", "labels", "target", "targets", "y")
_LOOKED_AT = 8  # samples to compare with a list beside the data set


def sample_of(dataset: Dataset[Any], index: int, what: str) -> Any:
    """One sample."""
    try:
        with isolated_randomness(index):
            return dataset[index]
    except Exception as error:  # any error of a user's data set
        told = ConfigError(f"{what}: sample {index} cannot be read ({reason(error)}); correct its data set")
        told.details = own_traceback(error)
        raise told from error


def usual_target(sample: Any) -> Key | None:
    """The likely place of a target: the second entry of a tuple, or a dictionary's ``label`` and the like."""
    if isinstance(sample, tuple | list):
        return 1 if len(sample) > 1 else None
    if isinstance(sample, Mapping):
        return next((key for key in _USUAL_KEYS if key in sample), None)
    return None


def value_of(sample: Any, key: Key, what: str) -> Any:
    """A field of a sample."""
    if isinstance(sample, Mapping) and key in sample:
        return sample[key]
    if isinstance(sample, tuple | list) and isinstance(key, int) and -len(sample) <= key < len(sample):
        return sample[key]
    if isinstance(sample, Mapping):
        there = f"is a dictionary of {', '.join(map(str, sample))}"
    elif isinstance(sample, tuple | list):
        there = f"is a {type(sample).__name__} of {len(sample)}"
    else:
        there = f"is a {type(sample).__name__}, neither a tuple nor a dictionary"
    raise ConfigError(f"{what}: a sample has no field {key!r}, as it {there}; correct the setting")


def column(dataset: Dataset[Any], key: Key, what: str) -> NDArray[Any]:
    """A field of all samples, as an array with a row per sample.

    Taken from the usual attributes (``targets``, ``labels``, the field's name, the tensors of a `TensorDataset`, also
    within `Subset` and `ConcatDataset`) if some samples agree with them; else every sample is read.
    """
    if (found := kept(dataset, key, what)) is not None:
        return found
    rows = [plain(value_of(sample_of(dataset, index, what), key, what)) for index in range(size_of(dataset, what))]
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise ConfigError(f"{what}: the samples' field {key!r} differs in shape; correct the setting") from error


def kept(dataset: Dataset[Any], key: Key, what: str) -> NDArray[Any] | None:
    """A field from an attribute of the data set, if some samples agree with it; else None."""
    count, found = size_of(dataset, what), _kept(dataset, key)
    if found is None or len(found) != count:
        return None
    looked_at = np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(np.int64)).tolist()
    said = [plain(value_of(sample_of(dataset, index, what), key, what)) for index in looked_at]
    return found if all(np.array_equal(own, found[at]) for own, at in zip(said, looked_at, strict=True)) else None


def size_of(dataset: Dataset[Any], what: str) -> int:
    """Number of samples."""
    count = len(dataset) if isinstance(dataset, Sized) else 0
    if not count:
        lacks = "samples; add some" if isinstance(dataset, Sized) else "__len__; implement it"
        raise ConfigError(f"{what}: its data set has no {lacks}")
    return count


def plain(value: Any) -> Any:
    """A value with tensors as NumPy arrays."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _kept(dataset: Dataset[Any], key: Key) -> NDArray[Any] | None:
    """A field in an attribute of the data set; None without such an attribute."""
    if isinstance(dataset, Subset):
        whole = _kept(dataset.dataset, key)
        return None if whole is None else whole[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_kept(part, key) for part in dataset.datasets]
        there = [part for part in parts if part is not None]
        return (
            np.concatenate(there) if len(there) == len(parts) and len({one.shape[1:] for one in there}) == 1 else None
        )
    if isinstance(dataset, TensorDataset):
        at = isinstance(key, int) and -len(dataset.tensors) <= key < len(dataset.tensors)
        return dataset.tensors[key].cpu().numpy() if at and isinstance(key, int) else None
    names = [key] if isinstance(key, str) else ["targets", "labels"]
    for name in names:
        found = getattr(dataset, name, None)
        if isinstance(found, Tensor | np.ndarray | list | tuple):
            array = found.cpu().numpy() if isinstance(found, Tensor) else np.asarray(found)
            return array if array.ndim and array.dtype != object else None
    return None


def kind_of(value: Any) -> str | None:
    """``class`` for an integer, ``number`` for one or more floating-point numbers, else None."""
    array = np.asarray(plain(value)) if isinstance(value, Tensor | np.ndarray | np.generic | int | float) else None
    if array is None or array.ndim > 1:
        return None
    if array.dtype.kind in "iub":
        return "class" if array.ndim == 0 else None
    return "number" if array.dtype.kind == "f" or (torch.is_tensor(value) and value.is_floating_point()) else None
