"""Whether what is to be kept is finite, and which of it is not."""

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
        state: Tensors and primitives, maybe nested; whole numbers, texts and truth values are finite.
        but: Names of entries that are not looked at.
        where: The name of the state itself, before those of its entries.
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
    once = {id(tensor): tensor for tensor in tensors.values()}  # a global model is as a rule the state's own
    if not are_finite(once.values()):
        odd += [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    return odd


def _entries(state: Any, where: str) -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(state, Tensor | float):
        yield where, state
    elif isinstance(state, Mapping | list | tuple):
        for key, entry in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _entries(entry, f"{where}.{key}" if where else str(key))
