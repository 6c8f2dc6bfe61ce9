"""Checks of labels, inputs and numerical targets, and strata of the latter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import IntArray
from lit_fed.data.remarks import remark
from lit_fed.errors import ConfigError
from lit_fed.printing import counted

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_MANY_CLASSES = 1000  # fewer cost nothing, even if most are empty
_LOOKED_AT = 2**14


def count_classes(labels: NDArray[Any], what: str) -> int:
    """Number of classes, the largest label + 1; errors call the labels `what`."""
    largest, occurring = int(labels.max(initial=0)), len(np.unique(labels))
    if largest >= max(_MANY_CLASSES, 10 * occurring):
        raise ConfigError(
            f"{what}: training labels go up to {largest}, but only {occurring} occur; number the classes from 0 "
            "without gaps, or set data.num_classes"
        )
    return 1 + largest


def native(array: NDArray[Any], what: str) -> NDArray[Any]:
    """An array of numbers in a dtype of tensors: native byte order, at most 64 bits."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biuf":
        raise ConfigError(f"{what} hold {array.dtype}; they must be numbers")
    wanted = np.dtype(np.float64) if kind == "f" and size > 8 else array.dtype.newbyteorder("=")
    return array.astype(wanted, copy=False)


def check_finite(inputs: Tensor, what: str) -> None:
    """Refuse inputs (n, …) with NaN or infinity, which would show late in training, or never."""
    if not inputs.is_floating_point() or inputs.numel() == 0:
        return
    if bool(torch.isfinite(torch.stack(inputs.aminmax()).float()).all()):  # a network's inputs have 32 bits
        return
    wrong = int((~torch.isfinite(inputs.reshape(len(inputs), -1).float())).any(dim=1).nonzero()[0])
    instead = ", or write a table, of which data.impute of Table replaces missing numbers" if inputs.ndim == 2 else ""
    raise ConfigError(f"{what}: sample {wrong} holds NaN or infinity; correct or remove it{instead}")


def checked_targets(targets: NDArray[Any], output_shape: tuple[int, ...], what: str) -> NDArray[Any]:
    """Targets (n, *output_shape) of a dtype of tensors, finite in float32, for an output_shape of () or (k,)."""
    array = np.asarray(targets)
    if array.dtype.kind in "iub":
        raise ConfigError(
            f"{what} are {array.dtype}; give floating-point numbers for a regression, or set num_classes for classes"
        )
    if array.dtype.kind != "f":
        raise ConfigError(f"{what} are {array.dtype}; they must be floating-point numbers")
    if array.ndim not in (1, 2):
        raise ConfigError(f"{what} have shape {array.shape}; it must be (n,), or (n, k) for k numbers per sample")
    if array.shape[1:] != tuple(output_shape):
        raise ConfigError(
            f"{what} have shape {array.shape}, and output_shape is {tuple(output_shape)}; it must be {array.shape[1:]}"
        )
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1))
    if len(wrong):
        raise ConfigError(f"{what}: that of sample {wrong[0]} is not finite; correct or remove the sample")
    return native(array, what)


def remark_merged(stored: Tensor, narrow: Callable[[Tensor], Tensor], names: Sequence[str], source: str) -> None:
    """Print a line if columns of inputs or targets (n, k, …) have fewer distinct values once they are narrowed.

    Looks at some rows, among which 32 bits merge fewer than 1 % of values spread at random.
    """
    some, merged = stored[:: max(1, len(stored) // _LOOKED_AT)], list[tuple[str, int, int]]()
    if (seen := narrow(some)).shape != some.shape:
        return
    for place in range(some.shape[1]):
        before, after = (len(values[:, place].flatten()[:_LOOKED_AT].unique()) for values in (some, seen))
        if after < 0.99 * before:
            merged.append((names[place] if names else f"column {place}", before, after))
    if merged:
        name, before, after = merged[0]
        more = f", and {counted(len(merged) - 1, 'other column')} lose some" if merged[1:] else ""
        remark(f"{source}: 32 bits merge {before} distinct values of {name} into {after}{more}; shift and scale them")


def quantile_strata(train: NDArray[Any], test: NDArray[Any], num_strata: int) -> tuple[IntArray, IntArray]:
    """Strata of training targets (n,) and test targets (m,), for partitions to cut by; 0 has the smallest targets.

    Strata have equally many training samples up to one, except that equal targets share a stratum; test strata have the
    same bounds.

    Raises:
        ConfigError: There are fewer training samples than strata.
    """
    check_range("data.strata", num_strata, least=1, most=len(train), why=" (the training samples)")
    starts = -(-np.arange(1, num_strata) * len(train) // num_strata)
    edges = np.sort(np.asarray(train, dtype=np.float64))[starts]
    first, second = (np.searchsorted(edges, np.asarray(part, dtype=np.float64), side="right") for part in (train, test))
    return first.astype(np.int64), second.astype(np.int64)


def quantiles(targets: NDArray[Any]) -> list[Any]:
    """Minimum, quartiles and maximum of targets of shape (n,), or of each of k columns; empty without samples."""
    if len(targets) == 0:
        return []
    values: list[Any] = np.quantile(np.asarray(targets, dtype=np.float64), QUANTILES, axis=0).T.tolist()
    return values
