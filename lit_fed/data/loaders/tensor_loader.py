"""Batches of tensors in memory, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from typing import Protocol as Interface

import torch
from torch import Tensor

from lit_fed.data.loaders.transforms import RandomTransform

Batch = tuple[Tensor, Tensor]

# Small batches are fetched and transformed together, up to this many values (256 kB of float32), to launch fewer
# operations. Large batches are fetched one by one: a network on the CPU was measured 4 to 6 % slower on slices of a
# large chunk. The values do not depend on it.
_CHUNK_VALUES = 2**16


class Loader(Interface):
    """A re-iterable of batches."""

    num_samples: int
    """Samples in one iteration."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int:
        """Batches in one iteration."""
        ...


class TensorLoader:
    """Batches of chosen rows of a tensor; cheap enough to be made for every client in every round.

    With a generator every iteration is a new shuffle: all random numbers of an epoch are drawn at once and move to the
    device with the order of the samples. Without a generator the order is that of `indices`.

    Args:
        inputs: All samples, shape (N, …), on any device; never changed.
        targets: Their targets, shape (N, …), on the same device.
        indices: The rows to iterate over, int64 on the CPU, shape (n,).
        batch_size: Samples per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and augment with.
        augmentation: Random transform of the stored samples; needs a generator.
        normalize: The last transform, such as `Normalize`.
        drop_last: Drop a smaller last batch, unless it is the only one: every client must train.
        values_per_sample: Values of a sample after `normalize`, if it resizes.
        fresh: Make every batch the first of a new shuffle: a sample may be in several batches, but only once in each,
            and all batches have the same size. Needs a generator.
        collated: Make batches as PyTorch collates samples of a ``TensorDataset``, which are lists, and draw a seed for
            each sample as `WorkerLoader` does. Else numerical targets become float32.
    """

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
        collated: bool = False,
    ) -> None:
        self.form: Callable[[Batch], Any] = list if collated else tuple
        self._inputs, self.targets, self.indices = inputs, targets, indices
        self._generator, self._augmentation, self._normalize = generator, augmentation, normalize
        self._values_per_sample = values_per_sample
        self.drop_last, self._fresh = drop_last, fresh
        self.batch_size, self.num_samples = sizes(indices.shape[0], batch_size, drop_last, fresh)

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._inputs.device

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
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
            y = self._targets_at(chosen)
            if draws is not None and self._augmentation is not None:
                x = self._augmentation.apply(x, draws[:, start : start + chunk])
            if self._normalize is not None:
                x = self._normalize(x)
            if chosen.shape[0] <= size:
                yield self.form((x, y))
            else:
                yield from map(self.form, zip(torch.split(x, size), torch.split(y, size), strict=True))

    def shortened(self, num_batches: int) -> TensorLoader:
        """A loader of fewer rows, spread over the indices: at most some batches, the last as small as before."""
        rest = self.indices.shape[0] % self.batch_size or self.batch_size
        count = min((num_batches - 1) * self.batch_size + rest, self.indices.shape[0])
        places = torch.linspace(0, self.indices.shape[0] - 1, count).long()
        return TensorLoader(
            self._inputs, self.targets, self.indices[places], self.batch_size, self._generator, self._augmentation,
            self._normalize, self.drop_last, self._values_per_sample, self._fresh, self.form is list,
        )  # fmt: skip

    def batches_of(self, chosen: Iterable[Tensor]) -> Iterator[Any]:
        """Batches of some positions in `indices`, of any number, also none; augmented as in an iteration."""
        for positions in chosen:
            x, y = self._raw(_move(self.indices[positions], self.device))
            if self._augmentation is not None and self._generator is not None and len(positions):
                x = self._augmentation.apply(
                    x, _move(self._augmentation.draw(len(positions), self._generator), x.device)
                )
            yield self.form((x if self._normalize is None else self._normalize(x), y))

    # The parts of an iteration, for a group of clients that fetches its batches together.

    def reads_as(self, other: TensorLoader) -> bool:
        """Whether both loaders read the same tensors in batches of one size, without augmentation."""
        augmented = self._augmentation is not None or other._augmentation is not None
        return self.reads_same(other) and not augmented and self.batch_size == other.batch_size

    def reads_same(self, other: TensorLoader) -> bool:
        """Whether both loaders read the same tensors."""
        same = self._inputs is other._inputs and self.targets is other.targets
        return same and self._normalize is other._normalize

    @property
    def is_fixed(self) -> bool:
        """Whether every iteration takes all of `indices` in order."""
        return self._generator is None and self.num_samples == self.indices.shape[0]

    def order(self) -> Tensor:
        """Positions in `indices` of the next iteration's samples, on the CPU; advances the generator likewise."""
        count, generator = self.indices.shape[0], self._generator
        if generator is None:
            return torch.arange(self.num_samples)
        order = draw_order(count, self.num_samples, self.batch_size, self._fresh, generator)
        if self.form is list:
            draw_seeds(self.num_samples, generator)
        return order

    def fetch(self, rows: Tensor) -> Batch:
        """Rows of the tensors as a batch, without augmentation."""
        x, y = self._raw(rows)
        return (x if self._normalize is None else self._normalize(x)), y

    def _raw(self, rows: Tensor) -> Batch:
        return self._inputs.index_select(0, rows), self._targets_at(rows)

    def _targets_at(self, rows: Tensor) -> Tensor:
        targets = self.targets.index_select(0, rows)
        return targets.float() if targets.is_floating_point() and self.form is tuple else targets

    def _plan(self) -> tuple[Tensor, Tensor | None]:
        """An epoch's rows in order and its augmentation's random numbers, on the data's device."""
        order = self.indices[: self.num_samples]
        if self._generator is not None:
            order = self.indices.index_select(0, self.order())
        if self._augmentation is None or self._generator is None:
            return _move(order, self._inputs.device), None
        draws = self._augmentation.draw(self.num_samples, self._generator)
        plan = _move(torch.cat([order.unsqueeze(0), draws]), self._inputs.device)
        return plan[0], plan[1:]


def sizes(count: int, batch_size: int, drop_last: bool, fresh: bool) -> tuple[int, int]:
    """Batch size and samples of one iteration over `count` samples."""
    taken = count - count % batch_size if drop_last and count > batch_size else count
    if not fresh or count == 0:
        return batch_size, taken
    size = min(batch_size, count)
    return size, -(-taken // batch_size) * size


def draw_order(count: int, taken: int, batch_size: int, fresh: bool, generator: torch.Generator) -> Tensor:
    """Positions of one iteration's samples, int64 of shape (taken,): one shuffle, or a fresh one per batch."""
    if not fresh:
        order = torch.randperm(count, generator=generator)
        return order if taken == count else order[:taken]
    shuffles = (torch.randperm(count, generator=generator)[:batch_size] for _ in range(taken // batch_size))
    return torch.cat(list(shuffles))


def draw_seeds(count: int, generator: torch.Generator | None) -> Tensor:
    """Seeds of samples' transforms, int64 of shape (count,)."""
    return torch.randint(2**62, (count,), generator=generator)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without blocking the host."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
