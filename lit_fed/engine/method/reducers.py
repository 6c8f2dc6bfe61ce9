"""Combine client updates as they arrive.

A reducer needs memory for one model, for a cohort of any size, and partial results of several processes merge into the
result of a single process. `Gather` is the exception, for methods that need every update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.engine.wire.payload import (
    MOST_VALUES,
    ClientUpdate,
    Flat,
    Payload,
    add_prefix,
    split_prefix,
)
from lit_fed.engine.wire.updates import Updates, together
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import NothingToAverage

T = TypeVar("T")
_BLOCK_VALUES = 2**18  # values, approximately, in vectors that wait to be summed
_PART = 2**17  # values of a vector added at once


class Reducer(ABC, Generic[T]):
    """Turns the updates of a round into the aggregate that the server steps on."""

    @abstractmethod
    def add(self, update: ClientUpdate) -> None:
        """Add an update; its tensors may be overwritten after the call."""

    def extend(self, updates: Updates) -> None:
        """Add several updates: by default one after the other."""
        for update in updates:
            self.add(update)

    def adds_as(self, kind: type[Reducer[Any]]) -> bool:
        """Whether `add` is that of a class, and none of a subclass or put in its place on this object."""
        return getattr(self.add, "__func__", None) is kind.add

    @abstractmethod
    def result(self, workers: Workers) -> T | None:
        """The aggregate over all processes, equal on each; None without updates."""

    def parts(self) -> list[WeightedMean] | None:
        """The weighted means that this reducer consists of; None for any other reducer.

        A caller that bounds or replaces a sum of updates, such as `trainer.privacy`, uses this instead of the class.
        """
        return None


class WeightedMean(Reducer[Payload]):
    r"""The weighted mean :math:`\sum_k n_k x_k / \sum_k n_k` of every named tensor.

    Sums run in float64 with unnormalised weights: a float32 value times an integer count is exact there, so that the
    order of the clients and their division among processes change the result by at most float64 rounding. Integer
    tensors, such as batch-norm's step counter, are averaged and rounded to the nearest integer.

    Args:
        uniform: Weight 1 for every client instead of ``update.weight``.

    Raises:
        ValueError: If clients send different tensor names or shapes.
        NothingToAverage: If weights sum to 0.
    """

    def __init__(self, uniform: bool = False) -> None:
        self.uniform = uniform
        self._sum: Tensor | None = None  # all tensors concatenated, unless too large
        self._sums: dict[str, Tensor] = {}  # by name; views of the vector, where there is one
        self._dtypes: dict[str, torch.dtype] = {}
        self._total = 0.0
        self._alike: Mapping[str, torch.Size] | None = None
        self._waiting: list[Tensor] = []  # rows of matrices
        self._weights: list[float] = []
        self._most = 0  # rows that may wait

    @override
    def parts(self) -> list[WeightedMean] | None:
        """Itself, unless a subclass adds something other than the sent tensors."""
        return [self] if type(self).add is WeightedMean.add else None

    @override
    def add(self, update: ClientUpdate) -> None:
        self._take(Updates.of([update]))

    @override
    def extend(self, updates: Updates) -> None:
        if self.adds_as(WeightedMean):
            self._take(updates)
        else:
            super().extend(updates)

    def _take(self, updates: Updates) -> None:
        vectors, weights = updates.vectors, [1.0 if self.uniform else float(weight) for weight in updates.weights]
        for weight in weights:
            self._total += weight
        if vectors is None or vectors.layout is not self._alike:
            for update in updates if vectors is None else [next(iter(updates))]:
                self._check(update)
            self._sum_up()
            fits = vectors is not None and self._sum is not None and list(vectors.layout) == list(self._sums)
            self._alike = vectors.layout if vectors is not None and fits else None
        if vectors is None or self._alike is None:
            for update, weight in zip(updates, weights, strict=True):
                for name, tensor in update.payload.items():
                    _add(self._sums[name].view(-1), tensor.detach().reshape(-1), weight)
            return
        self._waiting.append(vectors.values)
        self._weights += weights
        if len(self._weights) >= self._most:
            self._sum_up()

    def _check(self, update: ClientUpdate) -> None:
        """Refuse an update with other names or shapes than before: adding would broadcast silently."""
        payload = update.payload
        if not self._sums:
            self._dtypes = {name: tensor.dtype for name, tensor in payload.items()}
            shapes = {name: tensor.shape for name, tensor in payload.items()}
            self._begin(shapes, next((tensor.device for tensor in payload.values()), torch.device("cpu")))
        elif payload.keys() != self._sums.keys():
            odd = sorted(payload.keys() ^ self._sums.keys())
            raise ValueError(
                f"client {update.client_id} sends different tensors from the clients before it; they differ in {odd}"
            )
        for name, tensor in payload.items():
            if tensor.shape != self._sums[name].shape:
                raise ValueError(
                    f"client {update.client_id} sends {name!r} in shape {tuple(tensor.shape)}, the clients before it in"
                    f" {tuple(self._sums[name].shape)}"
                )

    def _begin(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        """Make zeros: one vector, or a tensor each for a large model, to be freed one by one in `result`."""
        count = sum(map(torch.Size.numel, shapes.values()))
        if count > MOST_VALUES:
            self._sums = {
                name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()
            }
            return
        self._sum = torch.zeros(count, dtype=torch.float64, device=device)
        self._sums = Flat(shapes, self._sum).split(self._sum)
        self._most = -(-_BLOCK_VALUES // max(count, 1))

    def _sum_up(self) -> None:
        """Add the waiting vectors in one operation."""
        if self._sum is None:
            return
        if len(self._weights) == 1:
            _add(self._sum, self._waiting[0][0], self._weights[0])
        elif self._waiting:
            values = together(self._waiting).double()
            weights = torch.tensor(self._weights, dtype=torch.float64, device=values.device)
            self._sum.add_(weights @ values)
        self._waiting, self._weights = [], []

    @override
    def result(self, workers: Workers) -> Payload | None:
        """The mean over all processes, each tensor in its original dtype; the sums are freed."""
        self._sum_up()
        self._merge(workers)
        if not self._sums:
            return None
        if self._total <= 0:
            raise NothingToAverage("the weights of this round's updates sum to 0; a mean needs a positive weight")
        for total in self._sums.values() if self._sum is None else (self._sum,):
            total.div_(self._total)  # in place: a new vector would cost as much as several updates
        return {name: _as(self._dtypes[name], self._sums.pop(name)) for name in list(self._sums)}

    def _merge(self, workers: Workers) -> None:
        if workers.world_size == 1:
            return
        shapes = {name: tensor.shape for name, tensor in self._sums.items()}
        specs = [spec for spec in workers.gather((shapes, self._dtypes)) if spec[0]]
        if not specs:
            return
        odd = sorted({name for spec in specs for name in dict(spec[0].items() ^ specs[0][0].items())})
        if odd:
            raise ValueError(f"clients of different processes send different tensors; they differ in {odd}")
        shapes, self._dtypes = specs[0]  # for a process without a client
        if not self._sums:
            self._begin(shapes, workers.fabric.device)
        total = torch.tensor([self._total], dtype=torch.float64, device=workers.fabric.device)
        if self._sum is None:
            for name in shapes:  # in one order on every process, one at a time
                self._sums[name] = workers.all_reduce(self._sums[name])
            self._total = float(workers.all_reduce(total).item())
            return
        merged = workers.all_reduce(torch.cat([self._sum, total]))
        self._sum, self._total = merged[:-1], float(merged[-1].item())
        self._sums = Flat(shapes, self._sum).split(self._sum)


def _add(total: Tensor, values: Tensor, weight: float) -> None:
    """Add a weighted vector by parts, whose values in float64 stay in the processor's cache."""
    for part, piece in zip(total.split(_PART), values.split(_PART), strict=True):
        part.add_(piece, alpha=weight)


def _as(dtype: torch.dtype, mean: Tensor) -> Tensor:
    """A mean in the dtype that was sent, in new memory; integers are rounded."""
    return mean.to(dtype, copy=True) if dtype.is_floating_point else mean.round().to(dtype)


_Place = tuple[Mapping[str, torch.Size], int, int]
"""A part of a vector: its layout, start and length."""


class ByPrefix(Reducer[Payload]):
    """Several reducers, each for the tensors with its prefix.

    Args:
        rest: Takes tensors without a prefix.
        parts: The others by prefix, such as ``control.``.
    """

    def __init__(self, rest: Reducer[Payload], parts: Mapping[str, Reducer[Payload]]) -> None:
        self.rest = rest
        self.by_prefix = parts
        self._alike: Mapping[str, torch.Size] | None = None
        self._places: dict[str, _Place] = {}

    @override
    def parts(self) -> list[WeightedMean] | None:
        reducers_parts = [reducer.parts() for reducer in (self.rest, *self.by_prefix.values())]
        return None if None in reducers_parts else [part for parts in reducers_parts if parts for part in parts]

    @override
    def add(self, update: ClientUpdate) -> None:
        self._take(Updates.of([update]))

    @override
    def extend(self, updates: Updates) -> None:
        if self.adds_as(ByPrefix):
            self._take(updates)
        else:
            super().extend(updates)

    def _take(self, updates: Updates) -> None:
        vectors = updates.vectors
        if vectors is not None and vectors.layout is not self._alike:
            self._alike, self._places = vectors.layout, self._find(vectors.layout)
        if vectors is not None and self._places:
            for prefix, reducer in (*self.by_prefix.items(), ("", self.rest)):
                reducer.extend(updates.part(*self._places[prefix]))
            return
        for update in updates:
            rest = update.payload
            for prefix, reducer in self.by_prefix.items():
                matching, rest = split_prefix(prefix, rest)
                reducer.add(update.with_payload(matching))
            self.rest.add(update.with_payload(rest))

    def _find(self, layout: Mapping[str, torch.Size]) -> dict[str, _Place]:
        """Place of each part in a vector of this layout, by prefix; empty where a part is scattered."""
        numbers = torch.arange(sum(map(torch.Size.numel, layout.values())))
        rest = Flat(layout, numbers).split(numbers)
        places: dict[str, _Place] = {}
        for prefix in (*self.by_prefix, ""):  # every name begins with nothing
            matching, rest = split_prefix(prefix, rest)
            at = torch.cat([numbers[:0], *(tensor.flatten() for tensor in matching.values())])
            first = int(at[0]) if len(at) else 0
            if not at.equal(numbers[first : first + len(at)]):
                return {}
            places[prefix] = {name: tensor.shape for name, tensor in matching.items()}, first, len(at)
        return places

    @override
    def result(self, workers: Workers) -> Payload | None:
        results = {prefix: reducer.result(workers) for prefix, reducer in self.by_prefix.items()}
        rest = self.rest.result(workers)
        if rest is None:
            return None
        named = (add_prefix(prefix, part) for prefix, part in results.items() if part is not None)
        return {**rest, **{name: tensor for part in named for name, tensor in part.items()}}


class Gather(Reducer[list[ClientUpdate]]):
    """Keeps every update; memory grows with the cohort."""

    def __init__(self) -> None:
        self._updates: list[ClientUpdate] = []

    @override
    def add(self, update: ClientUpdate) -> None:
        self._updates.append(update.detached())

    @override
    def result(self, workers: Workers) -> list[ClientUpdate] | None:
        """All updates of all processes, sorted by client."""
        parts = workers.gather(
            [update.to("cpu") for update in self._updates] if workers.world_size > 1 else self._updates
        )
        gathered = [update.to(workers.fabric.device) for part in parts for update in part]
        return sorted(gathered, key=lambda update: update.client_id) or None
