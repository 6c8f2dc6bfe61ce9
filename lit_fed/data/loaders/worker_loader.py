"""Batches from map-style data sets, prepared by worker processes that all clients share.

One ``torch.utils.data.DataLoader`` with persistent workers serves all clients; a client's loader tells it the next
samples. Processes per client would cost more than most clients' training. Each sample has its own random seed, so that
it depends neither on the number of workers nor on the worker that prepares it.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_fed.data.loaders.tensor_loader import draw_order, sizes
from lit_fed.data.partitions.csr import IntArray
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed
from lit_fed.tensors import map_tensors


class Key(NamedTuple):
    """A request to a worker."""

    part: str
    """The data set."""
    sample: int
    """The sample's index there."""
    seed: int
    """Seed of its transforms."""
    position: int | None
    """Replaces all but the inputs; None returns the whole sample."""


class KeyedDataset(Dataset[Any]):
    """Several data sets as one, indexed by `Key`.

    Args:
        parts: Map-style data sets by name.
    """

    def __init__(self, parts: Mapping[str, Dataset[Any]]) -> None:
        self._parts = dict(parts)

    def __getitem__(self, key: Key) -> Any:
        with isolated_randomness(key.seed):
            sample = self._parts[key.part][key.sample]
        if key.position is None:
            return sample
        if not isinstance(sample, tuple | list) or len(sample) < 2:
            raise ConfigError(
                f"a public set needs samples (x, y), and one is a {type(sample).__name__}; let the data set give pairs"
            )
        return sample[0], key.position


class WorkerPool:
    """Persistent worker processes, started at the first batch.

    Args:
        parts: Map-style data sets by name.
        num_workers: Processes; 0 prepares the batches in the calling process.
        pin_memory: Whether batches go to an accelerator.
        collate: The collate function; None for PyTorch's default.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset[Any]],
        num_workers: int,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._plan = list[list[Key]]()  # a batch sampler whose batches change in place
        self._iterations = 0
        self._loader: DataLoader[Any] = DataLoader(
            KeyedDataset(parts),
            batch_sampler=self._plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            collate_fn=collate,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator(),  # else every start would advance the global one
        )

    def batches(self, keys: Sequence[list[Key]]) -> Iterator[Any]:
        """Prepare batches, one per list of keys.

        Raises:
            RuntimeError: Another iteration over the same workers began before the end of this one.
        """
        self._iterations += 1
        mine = self._iterations
        self._plan[:] = keys
        for batch in self._prepared():
            yield batch
            if mine != self._iterations:
                raise RuntimeError(
                    "two loaders that share their workers were iterated at the same time; finish one before the other"
                )

    def _prepared(self) -> Iterator[Any]:
        try:
            yield from self._loader
        except ConfigError as error:
            # A worker's error carries its traceback; the last line is the message.
            raise ConfigError(str(error).strip().splitlines()[-1].split("ConfigError: ")[-1]) from error


def _leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal; the main process ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _tell_unless_nobody_reads


def _tell_unless_nobody_reads(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Silence the errors of multiprocessing's threads after the main process has died."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


class WorkerLoader:
    """Batches of chosen samples, prepared by a `WorkerPool`.

    Args:
        pool: The workers.
        part: The data set in the pool.
        indices: The samples, shape (n,).
        batch_size: Samples per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and to seed the transforms with; None keeps the order and seeds every
            sample by its index.
        finish: Transforms the inputs on the device: the first entry of a batch, or a batch without entries.
        device: The device of the batches.
        drop_last: Drop a smaller last batch, unless it is the only one.
        unlabeled: Replace the label with the position in `indices`.
        fresh: Make every batch the first of a new shuffle, see `TensorLoader`.
    """

    def __init__(
        self,
        pool: WorkerPool,
        part: str,
        indices: IntArray,
        batch_size: int,
        generator: torch.Generator | None,
        finish: Callable[[Any], Any],
        device: torch.device,
        drop_last: bool = False,
        unlabeled: bool = False,
        fresh: bool = False,
    ) -> None:
        self._pool, self._part, self._indices = pool, part, indices
        self._generator, self._finish, self._device, self._unlabeled = generator, finish, device, unlabeled
        self._fresh = fresh
        self.batch_size, self.num_samples = sizes(len(indices), batch_size, drop_last, fresh)

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One pass over the samples, in batches like the samples."""
        if self.num_samples == 0:
            return
        for prepared in self._pool.batches(self._keys()):
            yield self._finished(prepared)

    def batches_of(self, chosen: Iterable[Tensor]) -> Iterator[Any]:
        """Batches of some positions in `indices`, of any number, also none; each sample's transforms seeded anew."""
        sizes, keys = list[int](), list[list[Key]]()
        for positions in chosen:
            sizes.append(len(positions))
            indices = self._indices[positions.numpy()] if len(positions) else self._indices[:1]  # for its form
            seeds = torch.randint(2**62, (len(indices),), generator=self._generator).tolist()
            keys.append([Key(self._part, idx, seed, None) for idx, seed in zip(indices.tolist(), seeds, strict=True)])
        for size, prepared in zip(sizes, self._pool.batches(keys), strict=True):
            batch = self._finished(prepared)
            yield batch if size else map_tensors(batch, lambda tensor: tensor[:0])

    def _finished(self, prepared: Any) -> Any:
        batch = move_data_to_device(prepared, self._device)
        return (self._finish(batch[0]), *batch[1:]) if isinstance(batch, tuple | list) else self._finish(batch)

    def _keys(self) -> list[list[Key]]:
        count, generator = self.num_samples, self._generator
        if generator is None:
            order = list(range(count))
            indices = self._indices[:count].tolist()
            seeds = [derive_seed(0, "sample", index) for index in indices]
        else:
            order = draw_order(len(self._indices), count, self.batch_size, self._fresh, generator).tolist()
            indices = self._indices[order].tolist()
            seeds = torch.randint(2**62, (count,), generator=generator).tolist()
        keys = [
            Key(self._part, index, seed, position if self._unlabeled else None)
            for index, seed, position in zip(indices, seeds, order, strict=True)
        ]
        return [keys[start : start + self.batch_size] for start in range(0, count, self.batch_size)]


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators for a while, then restore them; 0 ≤ seed < 2**63."""
    # Other packages' transforms draw from the global generators, among them NumPy's legacy one (NPY002), and would
    # disturb ours without workers. torch.manual_seed would also reseed the accelerators.
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.random.set_rng_state(cpu)
