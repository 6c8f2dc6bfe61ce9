"""Batches of any nesting: their size, parts and end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from lit_fed.tensors import map_tensors


def mark_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Pair each batch with whether it is the last, whose left-over accumulated gradients still make a step."""
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def batch_size_of(batch: Any) -> int:
    """Number of samples in a batch: the length of its first tensor."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, dict):
            batch = next(iter(batch.values()))
        elif isinstance(batch, tuple | list) and batch:
            batch = batch[0]
        else:
            return 1
    return batch.shape[0] if batch.ndim else 1


def slice_batch(batch: Any, rank: int, world_size: int) -> tuple[Any, float]:
    """The current rank's share of a batch for ``ddp``, and the weight of its mean loss.

    Gradients are averaged over processes with equal weight; the factor ``n_rank * world_size / n`` turns that into the
    gradient of the whole batch's mean for unequal parts. A process without a sample gets one at weight 0, to take part
    in the exchange.
    """
    size = batch_size_of(batch)
    start, stop = size * rank // world_size, size * (rank + 1) // world_size
    part = slice(start, stop) if stop > start else slice(0, 1)
    return _cut(batch, part, size), (stop - start) * world_size / size


def halve_batch(batch: Any) -> tuple[Any, Any]:
    """Halve a batch along its first dimension, the odd sample first; a batch of one sample is both halves."""
    size = batch_size_of(batch)
    if size < 2:
        return batch, batch
    half = (size + 1) // 2
    return _cut(batch, slice(half), size), _cut(batch, slice(half, size), size)


def first_samples(batch: Any, count: int) -> Any:
    """The first samples of a batch."""
    return _cut(batch, slice(count), batch_size_of(batch))


def _cut(batch: Any, part: slice, size: int) -> Any:
    """Slice every tensor that has a sample in each row."""
    return map_tensors(batch, lambda tensor: tensor[part] if tensor.ndim and tensor.shape[0] == size else tensor)
