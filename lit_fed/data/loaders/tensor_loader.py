"""Batches from data that live in memory as one tensor on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from typing import Protocol as Interface

import torch
from torch import Tensor

from lit_fed.data.loaders.transforms import RandomTransform

Batch = tuple[Tensor, Tensor]

# Several small batches are fetched and transformed in one go, up to this many values (256 kB of float32): the time then
# goes into training steps and not into starting many small operations. Large batches are fetched one by one: a network
# on the CPU was measured 4 to 6 % slower on slices of a large chunk. The values do not depend on it.
_CHUNK_VALUES = 2**16


class Loader(Interface):
    """What a data module hands out: an iterable of batches that can be iterated any number of times."""

    num_samples: int
    """Samples in one iteration."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int:
        """Batches in one iteration."""
        ...


class TensorLoader:
    """Iterates over chosen rows of a tensor in batches; cheap enough to be made anew for every client in every round.

    With a generator every iteration is shuffled, drawing on from it: all random numbers of an epoch at once, moved to
    the device together with the order of the samples. Without one the order is that of `indices`.

    Args:
        inputs: All samples, shape (N, …), on any device; never changed.
        targets: What comes with them, shape (N, …), on the same device.
        indices: The rows to iterate over, int64 on the CPU, shape (n,).
        batch_size: Samples per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and augment with.
        augmentation: Random transform of the stored samples; needs a generator.
        normalize: Applied last, such as `Normalize`.
        drop_last: Leave out the last batch where it is smaller than the others; data that do not fill a single batch
            are kept, for a client that never trains is no client.
        values_per_sample: How many values a sample has after `normalize`, where that differs from before (resizing).
        fresh: Every batch is the first of a shuffle of its own, so that no sample is twice in a batch and any may be in
            several; all batches are then of the same size. Needs a generator.
    """

    __slots__ = (
        "_augmentation",
        "_fresh",
        "_generator",
        "_indices",
        "_inputs",
        "_normalize",
        "_targets",
        "_values_per_sample",
        "batch_size",
        "drop_last",
        "num_samples",
    )

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        indices: Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        augmentation: RandomTransform | None = None,
        normalize: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        values_per_sample: int = 0,
        fresh: bool = False,
    ) -> None:
        self._inputs, self._targets, self._indices = inputs, targets, indices
        self._generator, self._augmentation, self._normalize = generator, augmentation, normalize
        self._values_per_sample = values_per_sample
        self.drop_last, self._fresh = drop_last, fresh
        self.batch_size, self.num_samples = sizes(indices.shape[0], batch_size, drop_last, fresh)

    @property
    def device(self) -> torch.device:
        """Where the batches are made."""
        return self._inputs.device

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """One pass over the samples in (x, y) batches."""
        if self.num_samples == 0:
            return
        size, inputs = self.batch_size, self._inputs
        order, draws = self._plan()
        taken = order.shape[0]
        per_sample = max(self._values_per_sample, math.prod(inputs.shape[1:]))
        chunk = size * max(1, _CHUNK_VALUES // (per_sample * size))
        for start in range(0, taken, chunk):
            chosen = order if taken <= chunk else order[start : start + chunk]
            x = inputs.index_select(0, chosen)
            y = self._targets.index_select(0, chosen)
            if draws is not None and self._augmentation is not None:
                x = self._augmentation.apply(x, draws[:, start : start + chunk])
            if self._normalize is not None:
                x = self._normalize(x)
            if chosen.shape[0] <= size:
                yield x, y
            else:
                yield from zip(torch.split(x, size), torch.split(y, size), strict=True)

    # A group of clients fetches its batches together: what follows takes an iteration apart.

    def reads_as(self, other: TensorLoader) -> bool:
        """Whether this loader's rows are of the same tensors, and without random numbers for every sample."""
        augmented = self._augmentation is not None or other._augmentation is not None
        return self.reads_same(other) and not augmented and self.batch_size == other.batch_size

    def reads_same(self, other: TensorLoader) -> bool:
        """Whether both loaders' rows are of the same tensors."""
        same = self._inputs is other._inputs and self._targets is other._targets
        return same and self._normalize is other._normalize

    @property
    def is_fixed(self) -> bool:
        """Whether every iteration is over all of `indices` in their order."""
        return self._generator is None and self.num_samples == self._indices.shape[0]

    @property
    def indices(self) -> Tensor:
        """The rows to iterate over, on the CPU."""
        return self._indices

    def order(self) -> Tensor:
        """Which of `indices` the next iteration takes, in order, on the CPU; it draws on the generator as that does."""
        count, generator = self._indices.shape[0], self._generator
        if generator is None:
            return torch.arange(self.num_samples)
        return draw_order(count, self.num_samples, self.batch_size, self._fresh, generator)

    def fetch(self, rows: Tensor) -> Batch:
        """Rows of the tensors as a batch, without augmentation."""
        x, y = self._inputs.index_select(0, rows), self._targets.index_select(0, rows)
        return (x if self._normalize is None else self._normalize(x)), y

    def _plan(self) -> tuple[Tensor, Tensor | None]:
        """The epoch's order of rows and its augmentation's random numbers, on the data's device."""
        order = self._indices[: self.num_samples]
        if self._generator is not None:
            order = self._indices.index_select(0, self.order())
        if self._augmentation is None or self._generator is None:
            return _move(order, self._inputs.device), None
        draws = self._augmentation.draw(self.num_samples, self._generator)
        plan = _move(torch.cat([order.unsqueeze(0), draws]), self._inputs.device)
        return plan[0], plan[1:]


def sizes(count: int, batch_size: int, drop_last: bool, fresh: bool) -> tuple[int, int]:
    """A loader's batch size and the samples of one iteration, from the number of samples that there are."""
    taken = count - count % batch_size if drop_last and count > batch_size else count
    if not fresh or count == 0:
        return batch_size, taken
    size = min(batch_size, count)
    return size, -(-taken // batch_size) * size


def draw_order(count: int, taken: int, batch_size: int, fresh: bool, generator: torch.Generator) -> Tensor:
    """The positions of one iteration's samples, int64 of shape (taken,): of one shuffle, or of one for every batch."""
    if not fresh:
        order = torch.randperm(count, generator=generator)
        return order if taken == count else order[:taken]
    shuffles = (torch.randperm(count, generator=generator)[:batch_size] for _ in range(taken // batch_size))
    return torch.cat(list(shuffles))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without making the host wait for the work that is queued there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
