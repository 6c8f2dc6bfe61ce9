r"""A sum of clipped updates that no order of clients and no number of processes changes by a bit.

.. math:: S = \sum_k \min(1, C / \lVert \Delta_k \rVert)\, \Delta_k, \qquad \Delta_k = x_k - x

Clipped updates are cut, towards zero, to multiples of :math:`2^{\lceil \log_2 \max(C, \sigma) \rceil - 40}`, with the
noise's standard deviation :math:`\sigma`: their norms stay within C, and sums of up to 8,192 of them are exact in
float64. The noise is rounded to the same grid before it is added, so that no bit below the grid tells of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.wire.payload import ClientUpdate, Flat, FlatPayload, Layout, Payload, joined, stacked
from lit_fed.engine.wire.workers import Workers

GRID_BITS = 40
_BLOCK_VALUES = 2**17  # vectors that wait to be summed hold about this many values, which stay in a processor's cache
_ROUNDING = 1e-3  # an update that its client has clipped is at the bound but for the rounding of its type


@dataclass(frozen=True)
class Released:
    """The result of a round.

    Args:
        total: The sum of clipped updates, (d,) in float64: all tensors, one after the other.
        origin: The broadcast in the same form; 0 for names that it does not have.
        clipped: How many updates were at the bound.
        count: How many there were.
        grid: The sum's coordinates are multiples of it.
    """

    total: Tensor
    origin: Tensor
    clipped: int
    count: int
    grid: float

    def noised(self, noise: Tensor) -> Tensor:
        """The sum with noise (d,), both on the grid: no bit below the grid depends on the sum."""
        return self.total + (noise / self.grid).round_() * self.grid


class Frame:
    """A round's updates as vectors of d values, in the order of their names.

    Args:
        layout: What an update looks like.
        received: The broadcast that the updates are trained from.
        places: Of the d values, in all tensors one after the other, at which updates differ from the broadcast; None
            for all.
    """

    def __init__(self, layout: Layout, received: Payload, places: Tensor | None = None) -> None:
        self._places, self._whole = places, None if places is None else Frame(layout, received)
        self.shapes: Mapping[str, torch.Size] = {name: shape for name, (_, shape) in layout.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: dtype for name, (dtype, _) in layout.items()}
        self._dtype = next(iter(self.dtypes.values())) if len(set(self.dtypes.values())) == 1 else None
        self.received = received
        self._origin: Tensor | None = None
        self._alike: Mapping[str, torch.Size] | None = None

    @property
    def whole(self) -> Frame:
        """The same of all values."""
        return self._whole or self

    def origin(self, device: torch.device) -> Tensor:
        """The broadcast, (d,) in float64; 0 for names that it does not have."""
        if self._origin is None or self._origin.device != device:
            origin = joined(self.received, self.shapes, device)
            self._origin = origin if self._places is None else origin[self._places.to(device)]
        return self._origin

    def vector(self, update: ClientUpdate) -> Tensor:
        """An update's tensors, (d,), in the widest of their types."""
        if self._places is not None:
            values = self.whole.vector(update)
            return values[self._places.to(values.device)]
        flat = update.flat
        if flat is not None and (flat.layout is self._alike or list(flat.layout) == list(self.shapes)):
            self._alike = flat.layout  # thousands of clients share it
            return flat.values
        if update.payload.keys() != self.shapes.keys():
            odd = sorted(update.payload.keys() ^ self.shapes.keys())
            raise ValueError(f"client {update.client_id} sends other tensors than were expected; they differ in {odd}")
        return torch.cat([update.payload[name].detach().reshape(-1) for name in self.shapes])

    def payload(self, values: Tensor) -> tuple[Payload, Flat | None]:
        """A vector as tensors of an update's names and types, and as one vector where they have one type."""
        if self._places is not None:
            origin = self.whole.origin(values.device)
            return self.whole.payload(origin.index_copy(0, self._places.to(values.device), values.to(origin)))
        if self._dtype is not None:
            flat = Flat(self.shapes, values.to(self._dtype))
            return FlatPayload(flat), flat
        parts = Flat(self.shapes, values).split(values)
        return {name: part.to(self.dtypes[name]) for name, part in parts.items()}, None


def clip(updates: Sequence[ClientUpdate], frame: Frame, norm: float) -> list[ClientUpdate]:
    """Scale updates, all tensors of one together, to a distance of at most a norm from the broadcast."""
    vectors = [frame.vector(update) for update in updates]
    origin = frame.origin(vectors[0].device)
    moved = _away(vectors, origin)
    lengths = torch.linalg.vector_norm(moved, dim=1)
    near = ~(lengths > norm)  # also where it is not finite: others look at that
    if near.all():
        return list(updates)
    clipped = moved.mul_((norm / lengths).unsqueeze(1)).add_(origin).to(vectors[0].dtype)
    clipped[near] = stacked(vectors)[near]
    rows = clipped.unbind(0)
    return [update.with_payload(*frame.payload(row)) for update, row in zip(updates, rows, strict=True)]


def _away(vectors: Sequence[Tensor], origin: Tensor) -> Tensor:
    """Differences of vectors to one in float64, as rows of a new matrix."""
    return stacked(vectors).to(torch.float64, copy=True).sub_(origin)


def grid_of(bound: float) -> float:
    """The grid of vectors within a bound: their coordinates are at most 2^40 times it."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5) - GRID_BITS)


def moved_on_grid(vectors: Sequence[Tensor], origin: Tensor, norm: float, grid: float) -> tuple[Tensor, Tensor]:
    """Clipped differences of vectors to one, (k, d) in whole multiples of a grid, and their norms before, (k, 1)."""
    moved = _away(vectors, origin)
    norms = moved.norm(dim=1, keepdim=True)
    scale = (norm / norms).clamp_(max=1.0)
    return moved.mul_(scale / grid).trunc_(), norms


def is_at_bound(norms: Tensor, norm: float) -> Tensor:
    """Which updates are at a bound, but for rounding."""
    return norms > norm * (1 - _ROUNDING)


class BoundedSum(Reducer[Released]):
    """Sums updates, each clipped and with weight 1; an empty round gives zeros.

    Args:
        frame: Of the round.
        norm: C, the bound of each.
        device: Where to sum.
        std: Standard deviation of the noise that the sum will get.
    """

    def __init__(self, frame: Frame, norm: float, device: torch.device, std: float = 0.0) -> None:
        self.frame = frame
        self.norm = norm
        self._origin = frame.origin(device)
        self._sum = torch.zeros_like(self._origin)
        self.grid = grid_of(max(norm, std))
        self._waiting: list[Tensor] = []
        self._most = -(-_BLOCK_VALUES // max(len(self._origin), 1))
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, update: ClientUpdate) -> None:
        """Take in one update, whatever its weight."""
        values = self.frame.vector(update)
        self._waiting.append(values if update.flat is not None and values is update.flat.values else values.clone())
        if len(self._waiting) >= self._most:
            self._sum_up()

    def _sum_up(self) -> None:
        if not self._waiting:
            return
        moved, norms = moved_on_grid(self._waiting, self._origin, self.norm, self.grid)
        self._sum.add_(moved.sum(0))
        self._counts[0] += is_at_bound(norms, self.norm).sum()
        self._counts[1] += len(self._waiting)
        self._waiting = []

    def result(self, workers: Workers) -> Released:
        """The sum over all processes."""
        self._sum_up()
        merged = workers.all_reduce(torch.cat([self._sum, self._counts]))
        clipped, count = merged[-2:].tolist()
        return Released(merged[:-2] * self.grid, self._origin, int(clipped), int(count), self.grid)
