"""The state that a task keeps, tensors and Python's: a step on one sample must leave nothing in it for the others."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_fed.engine.lightning.task_trainer import TaskTrainer
from lit_fed.private_names import version_of
from lit_fed.tensors import hash_of

_NAMELESS = ("_parameters", "_buffers", "_modules")  # dicts of a module whose keys are names of its attributes
_FOREIGN = {"torch", "lightning", "lit_fed", "numpy", *sys.stdlib_module_names}
_ELSEWHERE = (type, LightningDataModule, Dataset, TaskTrainer)
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_PLAIN = {int, float, bool, str, bytes, complex, type(None)}
_GENERATORS = (random.Random, torch.Generator, np.random.RandomState, np.random.Generator)


class StateSnapshot:
    """The state of some objects, and of all that they hold, as it is now.

    It has tensors of every kind; dicts, lists, sets, arrays and generators, however nested; and attributes of modules
    and of other objects, with what their classes hold. Globals, attributes that are set on a class, variables of
    closures, and data sets are not in it.

    Args:
        roots: The objects, by the names from which those of changes begin.
        beside: Has a part of what they hold.
    """

    def __init__(self, roots: Mapping[str, Any], beside: StateSnapshot | None = None) -> None:
        self._seen: dict[int, Any] = {} if beside is None else dict(beside._seen)
        self._names: list[str] = []
        self._boxes: list[Any] = []
        self._before: list[Any] = []  # shallow copies of the boxes
        self._tensors: list[tuple[str, Tensor]] = []
        self._others: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any]] = []
        found = deque(roots.items())
        while found:
            name, one = found.popleft()
            kind: Any = type(one)
            if not _holds_nothing(kind) and id(one) not in self._seen:
                found.extend(self._take(name, one))
        self._marks: list[tuple[int, int] | None] = [None] * len(self._tensors)
        self._copies = [torch.empty(0)] * len(self._tensors)
        self.mark()

    def _take(self, name: str, one: Any) -> Iterator[tuple[str, Any]]:
        """Note an object; yields what it holds, by name."""
        self._seen[id(one)], own = one, cast("Any", type(one))
        if isinstance(one, _COLLECTIONS):
            yield from self._box(name, one)
        elif isinstance(one, Tensor):
            self._tensors.append((name, one))
        elif isinstance(one, (np.ndarray, *_GENERATORS)):
            read, write = _access(one)
            self._others.append((name, read, write, read()))
        if isinstance(one, nn.Module) or (hasattr(one, "__dict__") and not _is_foreign(own)):
            for key, value in self._box(name, vars(one)):
                if isinstance(one, nn.Module) and key.rpartition(".")[2] in _NAMELESS:
                    self._seen[id(value)] = value
                    yield from self._box(name, value)
                else:
                    yield key, value
            for kind in own.__mro__:
                if not _is_foreign(kind) and id(kind) not in self._seen:
                    self._seen[id(kind)] = kind
                    yield from ((f"{kind.__name__}.{key}", value) for key, value in vars(kind).items())

    def _box(self, name: str, box: Any) -> Iterator[tuple[str, Any]]:
        """Note what holds others; returns these by name."""
        before: Any = dict(box) if isinstance(box, dict) else box if isinstance(box, tuple) else copy(box)
        self._names.append(name)
        self._boxes.append(box)
        self._before.append(before)
        if isinstance(before, dict):
            return ((f"{name}.{key if type(key) in _PLAIN else ''}".lstrip("."), one) for key, one in before.items())
        return ((f"{name}[{idx}]", one) for idx, one in enumerate(before))

    def mark(self) -> None:
        """Take tensors as they are now; those that were written to are copied again."""
        for place, (_, tensor) in enumerate(self._tensors):
            if (mark := _mark(tensor)) != self._marks[place]:
                self._marks[place], self._copies[place] = mark, tensor.detach().clone()

    @property
    def is_whole(self) -> bool:
        """Whether it still has all that the objects hold."""
        return _same(self._boxes, self._before)

    def changed(self, values: bool = True) -> str | None:
        """The name of the first change; None for none.

        Args:
            values: Whether tensors' values are compared too, which ``.data`` changes past their versions.
        """
        if not self.is_whole:
            parts = zip(self._names, self._boxes, self._before, strict=True)
            return next(_odd(name, box, before) for name, box, before in parts if not _same(box, before))
        for name, read, _, saved in self._others:
            if read() != saved:
                return name
        for (name, tensor), mark, kept in zip(self._tensors, self._marks, self._copies, strict=True):
            if _mark(tensor) != mark or (values and not _equal(tensor, kept)):
                return name
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all changes."""
        for box, before in zip(self._boxes, self._before, strict=True):
            if not _same(box, before):
                box.clear()
                (box.extend if isinstance(box, list | deque) else box.update)(before)
        for _, _, write, saved in self._others:
            write(saved)
        for (_, tensor), kept in zip(self._tensors, self._copies, strict=True):
            if not _equal(tensor, kept):
                tensor.data = kept.clone()
        self.mark()


@cache
def _is_foreign(kind: Any) -> bool:
    is_own = kind is SimpleNamespace or "_objective_class" in vars(kind)  # of a task
    return kind.__module__.partition(".")[0] in _FOREIGN and not is_own


@cache
def _holds_nothing(kind: Any) -> bool:
    """Whether objects of a class are plain, or not a task's own."""
    if kind in _PLAIN or issubclass(kind, _ELSEWHERE):
        return True
    return _is_foreign(kind) and not issubclass(kind, (*_COLLECTIONS, Tensor, nn.Module, np.ndarray, *_GENERATORS))


def _access(one: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Reader and writer of an array, or of a generator's state."""
    if isinstance(one, np.ndarray):
        return one.tobytes, lambda saved: np.copyto(one, np.frombuffer(saved, one.dtype).reshape(one.shape))
    if isinstance(one, random.Random):
        return one.getstate, one.setstate
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return (lambda: pickle.dumps(bits.state)), (lambda saved: setattr(bits, "state", pickle.loads(saved)))  # noqa: S301
    return (lambda: pickle.dumps(one.get_state())), (lambda saved: one.set_state(pickle.loads(saved)))  # noqa: S301


def _same(one: Any, other: Any) -> bool:
    """Whether two collections hold equal objects; tensors and arrays are compared by identity."""
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared
        return False


def _odd(name: str, box: Any, before: Any) -> str:
    """Name of the first entry by which a collection differs."""
    if not isinstance(before, dict):
        return name
    odd = [key for key in [*before, *box] if not _same([box.get(key, box)], [before.get(key, box)])]
    return f"{name}.{odd[0]}".strip(".") if odd else name


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What a write to a tensor changes."""
    try:
        return version_of(tensor), tensor.data_ptr()
    except Exception:  # without a version or memory of its own
        return -1, -1


def _equal(one: Tensor, other: Tensor) -> bool:
    with suppress(Exception):  # values of a computation that has ended
        return torch.equal(one, other) or hash_of(one) == hash_of(other)
    return False
