"""Classes and clients that a data set calls by names: their order, and the number of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lit_fed.data.csr import IntArray

_WHOLE = re.compile(r"[+-]?\d+")


def in_order(values: Iterable[Any]) -> list[str]:
    """The different names among values, as texts: whole numbers by size where all are such, else by the alphabet."""
    found = {str(value) for value in values}
    return sorted(found, key=lambda name: (int(name), name)) if all(map(_WHOLE.fullmatch, found)) else sorted(found)


def numbered(values: Sequence[Any], names: Sequence[str]) -> IntArray:
    """The number of each value's name, shape (n,); −1 where it has none."""
    number = {name: position for position, name in enumerate(names)}
    return np.fromiter((number.get(str(value), -1) for value in values), dtype=np.int64, count=len(values))
