"""Fingerprints of data's values, which detect changed files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.partitions.csr import IntArray
from lit_fed.seeding import numpy_generator

_MOST_BYTES = 2**28  # of an array, for which SHA-256 takes 0.2 s; larger arrays are sampled
_MOST_BLOCKS = 256
_TOLERANCE = 1e-5  # processors differ by about 1e-6 through their order of operations, other data by far more


@dataclass(frozen=True)
class Contents:
    """A fingerprint of data's values.

    Args:
        sha256: Hash of integers, such as labels, pixels and tokens.
        sums: Of floating-point numbers, a seeded weighted sum of each block of samples.
        sizes: The same sums of absolute values, as the scale of differences.
    """

    sha256: str
    sums: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.sums, self.sizes)
        plain = all(isinstance(part, tuple) and all(isinstance(n, float) for n in part) for part in numbers)
        if not isinstance(self.sha256, str) or not plain or len(self.sums) != len(self.sizes):
            raise TypeError("not a fingerprint of data")

    def is_of(self, other: Contents) -> bool:
        """Whether two fingerprints are equal up to rounding."""
        if self.sha256 != other.sha256 or len(self.sums) != len(other.sums):
            return False
        one, two, size = (np.asarray(numbers) for numbers in (self.sums, other.sums, self.sizes))
        with np.errstate(invalid="ignore"):
            close = (np.abs(one - two) <= _TOLERANCE * size) | (one == two) | (np.isnan(one) & np.isnan(two))
        return bool(close.all())


def contents_of(arrays: Iterable[NDArray[Any]]) -> Contents:
    """The fingerprint of arrays (n, …) of numbers with a sample per row, in a fixed order.

    Of an array above 256 MiB a random choice of rows counts, which depends on their number alone.
    """
    digest = hashlib.sha256()
    sums, sizes = [], []
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype.kind}".encode())
        rows = array[chosen_rows(len(array), _MOST_BYTES // max(array[:1].nbytes, 1))]
        if array.dtype.kind != "f":
            digest.update(np.ascontiguousarray(rows).data if rows.size else b"")
        elif rows.size:
            starts = np.linspace(0, len(rows), min(len(rows), _MOST_BLOCKS), endpoint=False).astype(np.int64)
            sums += np.add.reduceat(_one_number_a_row(rows), starts).tolist()
            sizes += np.add.reduceat(_one_number_a_row(np.abs(rows)), starts).tolist()
    return Contents(digest.hexdigest(), tuple(sums), tuple(sizes))


def chosen_rows(count: int, most: int) -> IntArray | slice:
    """All rows, or a fixed random choice, ascending."""
    if count <= most:
        return slice(None)
    generator = numpy_generator(0, "data", "contents", count)
    return np.sort(generator.choice(count, max(most, 1), replace=False)).astype(np.int64)


def _one_number_a_row(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Each row's product with a random vector, times a random weight per row, to notice permutations of either axis."""
    flat = rows.reshape(len(rows), -1)
    if flat.dtype == np.float16:
        flat = flat.astype(np.float32)
    generator = numpy_generator(0, "data", "contents", "weights")
    across = generator.uniform(0.5, 1.5, flat.shape[1]).astype(flat.dtype)
    down = generator.uniform(0.5, 1.5, len(flat))
    with np.errstate(invalid="ignore", over="ignore"):
        weighed: NDArray[np.float64] = (flat @ across).astype(np.float64) * down
    return weighed
