"""The batches of a group of clients, stacked step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.data.loaders.tensor_loader import TensorLoader, draw_order, sizes
from lit_fed.data.partitions.csr import IntArray
from lit_fed.engine.clients.local import num_batches
from lit_fed.engine.method.client import Phase
from lit_fed.engine.vectorized.objective import NotVectorizable, differing
from lit_fed.engine.wire.batches import batch_size_of
from lit_fed.private_names import tree_flatten, tree_leaves, tree_map, tree_unflatten


class GroupBatches(ABC):
    """A group's training data: for every step, the batches of the clients that still train, the first ones."""

    num_steps: Sequence[int]
    """Steps of every client, descending."""

    each: Sequence[int]
    """Steps of every client in one pass over its data."""

    by_rows = True
    """Whether every tensor of every batch so far had a row a sample."""

    targets: Tensor | None = None
    """All values that may be in the second leaf of a batch; None where they are not known."""

    @abstractmethod
    def take(self, step: int, active: int, pad_to: int) -> tuple[Any, list[int]]:
        """The batches of a step, stacked and padded to the largest, and their sizes.

        Args:
            step: Counted from 0; every step is taken once, in order.
            active: Number of clients.
            pad_to: Pad smaller batches to at least this many samples.
        """


class Collected(GroupBatches):
    """Batches of any loaders, one client after the other.

    Args:
        phases: The same phase of every client.
        num_steps: Steps of every client, descending.
        to_device: Moves a loader's batch.
    """

    def __init__(self, phases: Sequence[Phase], num_steps: Sequence[int], to_device: Any) -> None:
        self.num_steps = num_steps
        self._loaders = [phase.loader for phase in phases]
        self.each = [len(loader) for loader in self._loaders]  # type: ignore[arg-type]  # `total_steps` has looked
        self._batches = [_endless(loader) for loader in self._loaders]
        self._to_device = to_device

    @override
    def take(self, step: int, active: int, pad_to: int) -> tuple[Any, list[int]]:
        batches = [self._to_device(next(self._batches[idx]), self._loaders[idx]) for idx in range(active)]
        sizes = [batch_size_of(batch) for batch in batches]
        for batch, size in zip(batches, sizes, strict=True):
            tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            self.by_rows &= all(leaf.ndim > 0 and leaf.shape[0] == size for leaf in tensors)
        return _stack(batches, sizes, _width(sizes, pad_to)), sizes


class Rows(NamedTuple):
    """The samples of several clients, as rows of one tensor.

    Args:
        like: A loader that reads the tensor in batches of the clients' size.
        indices: The clients' rows, one client after the other.
        counts: Rows by client.
        taken: Samples in one pass by client.
        orders: Draws the orders of each client's next passes, whose numbers it takes.
    """

    like: TensorLoader
    indices: Tensor
    counts: IntArray
    taken: IntArray
    orders: Callable[[Sequence[int]], list[Tensor]]

    @classmethod
    def of_loaders(cls, loaders: Sequence[TensorLoader]) -> Rows:
        """The rows of one loader a client."""

        def orders(passes: Sequence[int]) -> list[Tensor]:
            return [one.order() for one, count in zip(loaders, passes, strict=True) for _ in range(count)]

        counts, taken = np.array([(one.indices.shape[0], one.num_samples) for one in loaders]).T
        return cls(loaders[0], torch.cat([one.indices for one in loaders]), counts, taken, orders)

    @classmethod
    def of_cohort(cls, loader: TensorLoader, counts: IntArray, seeds: Sequence[int]) -> Rows:
        """The rows of one loader over all clients' samples, which a generator of a seed by client shuffles."""
        size, drop_last = loader.batch_size, loader.drop_last
        taken = np.array([sizes(count, size, drop_last, fresh=False)[1] for count in counts.tolist()])

        def orders(passes: Sequence[int]) -> list[Tensor]:
            generator, found = torch.Generator(), list[Tensor]()
            for seed, count, own, times in zip(seeds, counts.tolist(), taken.tolist(), passes, strict=True):
                generator.manual_seed(seed)
                found += [draw_order(count, own, size, False, generator) for _ in range(times)]
            return found

        return cls(loader, loader.indices, counts, taken, orders)


class Gathered(GroupBatches):
    """Batches over rows of one tensor, fetched for all clients at once.

    Args:
        rows: The clients'.
        num_steps: Steps of every client, descending; the first is not 0.
    """

    def __init__(self, rows: Rows, num_steps: Sequence[int]) -> None:
        self.num_steps = num_steps
        self._like, self.targets = rows.like, rows.like.targets
        size, longest, taken = self._like.batch_size, num_steps[0], rows.taken
        self.each = (-(-taken // size)).tolist()
        steps, each = np.array(num_steps), np.maximum(self.each, 1)
        self._sizes = _sizes(size, steps, each, taken)
        # Every pass of every client: the client, the pass's first step, and its number of samples.
        passes = -(-steps // each)
        whose = np.arange(len(steps)).repeat(passes)
        begins = (np.arange(len(whose)) - (passes.cumsum() - passes)[whose]) * each[whose]
        lengths = np.minimum(taken[whose], (steps[whose] - begins) * size)
        orders = rows.orders(passes.tolist())
        if (lengths < taken[whose]).any():
            orders = [order[:length] for order, length in zip(orders, lengths.tolist(), strict=True)]
        indices, firsts = rows.indices, rows.counts.cumsum() - rows.counts
        chosen = indices[torch.cat(orders) + torch.from_numpy(firsts[whose].repeat(lengths))]
        # Start of each pass, and the places after it: one copy for all.
        places = ((whose * longest + begins) * size - lengths.cumsum() + lengths).repeat(lengths)
        # Padding is the client's own sample: its loss may not know the label of another's.
        padded = indices[torch.from_numpy(np.minimum(firsts, len(indices) - 1))].repeat_interleave(longest * size)
        padded[torch.from_numpy(places + np.arange(len(places)))] = chosen
        self._rows = padded.view(len(steps), longest, size).to(self._like.device)

    @override
    def take(self, step: int, active: int, pad_to: int) -> tuple[Any, list[int]]:
        sizes = self._sizes[:active, step].tolist()
        longest = _width(sizes, pad_to)
        x, y = self._like.fetch(self._rows[:active, step, :longest].reshape(-1))
        return self._like.form((x.unflatten(0, (active, longest)), y.unflatten(0, (active, longest)))), sizes


def can_gather(loaders: Iterable[Any]) -> bool:
    """Whether loaders read rows of one tensor, without drawing anything for a sample."""
    sequence = list(loaders)
    return all(type(same) is TensorLoader and same.reads_as(sequence[0]) for same in sequence)


def total_steps(phase: Phase) -> int:
    """Batches of a phase in all.

    Raises:
        NotVectorizable: If its loader has no length.
    """
    if type(phase.loader) is not TensorLoader and not isinstance(phase.loader, Sized):
        raise NotVectorizable("a loader has no length")
    if not (each := len(phase.loader)):
        return 0
    steps = num_batches(phase)
    return int(phase.epochs or 0) * each if steps is None else steps


def cut(batch: Any, rows: Tensor, size: int, longest: int) -> Any:
    """The batches of some clients with one size, without their padding to the longest."""

    def one(leaf: Any) -> Any:
        chosen = leaf[rows] if isinstance(leaf, Tensor) else leaf
        is_padded = isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == longest
        return chosen[:, :size] if is_padded else chosen

    return tree_map(one, batch)


def _sizes(size: int, steps: IntArray, each: IntArray, taken: IntArray) -> IntArray:
    """Samples of every client's batches, (clients, steps); 0 after its last.

    Args:
        size: Samples of a batch that is not a pass's last.
        steps: Batches by client.
        each: Batches in one pass by client.
        taken: Samples in one pass by client.
    """
    step = np.arange(steps[0])
    ends_pass = (step + 1) % each[:, None] == 0
    sizes: IntArray = np.where(ends_pass, (taken - (each - 1) * size)[:, None], size) * (step < steps[:, None])
    return sizes


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(repeat(loader))


def _width(sizes: Sequence[int], pad_to: int) -> int:
    return max(sizes) if min(sizes) >= pad_to else max(*sizes, pad_to)


def _stack(batches: Sequence[Any], sizes: Sequence[int], longest: int) -> Any:
    """One batch of tensors (n, B, …) from batches of any nesting, padded where they have a row a sample."""
    flat = [tree_flatten(batch, is_leaf=_is_plain) for batch in batches]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise NotVectorizable("the batches of a group's clients are nested differently")
    leaves = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(column[0], Tensor):
            alike = all(value == column[0] for value in column)
            leaves.append(column[0] if alike else differing("a value of its batch that is not a tensor"))
            continue
        padded = [_pad(tensor, size, longest) for tensor, size in zip(column, sizes, strict=True)]
        if len({tensor.shape for tensor in padded}) > 1:
            raise NotVectorizable("the samples of a group's clients have different shapes")
        leaves.append(torch.stack(padded))
    return tree_unflatten(leaves, spec)


def _is_plain(value: Any) -> bool:
    """Whether a value is a list without tensors, such as the names of a batch's clients."""
    return isinstance(value, list | tuple) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _pad(tensor: Tensor, size: int, longest: int) -> Tensor:
    if size == longest or not tensor.ndim or tensor.shape[0] != size:
        return tensor
    return torch.cat([tensor, tensor[:1].expand(longest - size, *tensor.shape[1:])])
