"""Find NaN and infinity in a state before it is kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_fed.engine.wire.payload import are_finite


def not_finite(state: Any, but: Collection[str] = (), where: str = "") -> list[str]:
    """Names of the entries of a state that hold NaN or infinity; one device synchronisation where there are none.

    Args:
        state: Nested tensors and primitives; integers, texts and booleans are finite.
        but: Names of entries to skip.
        where: Prefix of the entries' names.
    """
    numbers, tensors = dict[str, float](), dict[str, Tensor]()
    for name, entry in _entries(state, where):
        if name in but:
            continue
        if isinstance(entry, Tensor):
            tensors[name] = entry
        else:
            numbers[name] = entry
    odd = [name for name, number in numbers.items() if not math.isfinite(number)]
    once = {id(tensor): tensor for tensor in tensors.values()}  # a global model usually is the state's own
    if not are_finite(once.values()):
        odd += [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    return odd


def _entries(state: Any, where: str) -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(state, Tensor | float):
        yield where, state
    elif isinstance(state, Mapping | list | tuple):
        for key, entry in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _entries(entry, f"{where}.{key}" if where else str(key))
