"""Batches from map-style data sets, prepared by worker processes that all clients share.

One ``torch.utils.data.DataLoader`` with persistent workers serves all clients; a client's loader tells it the next
samples. Processes per client would cost more than most clients' training. Each sample has its own random seed, so that
it depends neither on the number of workers nor on the worker that prepares it.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lit_fed.data.loaders.tensor_loader import draw_order, draw_seeds, sizes
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


_NONE = object()


class KeyedDataset(Dataset[Any]):
    """Several data sets as one, indexed by `Key`, whose batches are of one data set each.

    Args:
        parts: Map-style data sets by name.
        collates: Collate functions by data set; PyTorch's default for others.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset[Any]],
        collates: Mapping[str, Callable[[list[Any]], Any] | None],
    ) -> None:
        self._parts, self._collates = dict(parts), dict(collates)
        self._random = set[str]()  # data sets that draw from the global generators, of which each sample is seeded

    def __getitem__(self, key: Key) -> Any:
        with isolated_randomness(key.seed):
            return self._read(key)

    def __getitems__(self, keys: list[Key]) -> Any:
        """The collated samples."""
        part = keys[0].part
        collate = self._collates.get(part) or default_collate
        if part not in self._random:  # seeding takes 0.1 ms a sample
            states, batch = _states(), _NONE
            try:
                batch = collate([self._read(key) for key in keys])
            except Exception:  # raised again below, if it does not depend on what was drawn
                pass
            finally:
                drawn = not _restored(states)
            if not drawn and batch is not _NONE:
                return batch
            self._random |= {part} if drawn else set()
        samples = [self[key] for key in keys]
        with isolated_randomness(derive_seed(keys[0].seed, "collate")):
            return collate(samples)

    def _read(self, key: Key) -> Any:
        sample = self._parts[key.part][key.sample]
        if key.position is None:
            return sample
        if not isinstance(sample, tuple | list) or len(sample) < 2:
            raise ConfigError(
                f"a public set needs samples (x, y), and one is a {type(sample).__name__}; let the data set give pairs"
            )
        return sample[0], key.position


class _Pass:
    """One iteration over a pool's data: batches still to prepare, and batches prepared before their turn."""

    def __init__(self, keys: Iterable[list[Key]]) -> None:
        self.wanted, self.ready = deque(keys), deque[Any]()
        self.ahead = 0  # batches sent to the workers and not yet yielded


class _Turns:
    """A batch sampler over all open iterations in turn; it ends if no batch is wanted, and continues once one is."""

    def __init__(self, most_ahead: int) -> None:
        self.open, self.sent = deque[_Pass](), deque[tuple[_Pass, list[Key]]]()
        self.asking: _Pass | None = None
        self._most_ahead = most_ahead

    def __iter__(self) -> Iterator[list[Key]]:
        return self

    def __next__(self) -> list[Key]:
        asking = self.asking
        one = asking if asking is not None and asking.wanted and not asking.ahead else self._in_turn()
        one.ahead += 1
        self.sent.append((one, one.wanted.popleft()))
        return self.sent[-1][1]

    def _in_turn(self) -> _Pass:
        for _ in range(len(self.open)):
            self.open.rotate(-1)
            if (one := self.open[-1]).wanted and one.ahead < self._most_ahead:
                return one
        raise StopIteration

    def take_back(self) -> None:
        """Want the batches again that workers have and have not returned."""
        while self.sent:
            one, keys = self.sent.pop()
            one.wanted.appendleft(keys)
            one.ahead -= 1


class WorkerPool:
    """Persistent worker processes, started at the first batch.

    Several iterations may be open at once. The workers then prepare their batches in turn, and a batch that returns
    before its iteration asks for it is kept.

    Args:
        parts: Map-style data sets by name.
        num_workers: Processes; 0 prepares the batches in the calling process.
        pin_memory: Whether batches go to an accelerator.
        collates: Collate functions by data set; PyTorch's default for others.
        worker_init_fn: Called in each worker with its number; None for nothing.
        options: Other arguments of the ``DataLoader``, for worker processes only.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset[Any]],
        num_workers: int,
        pin_memory: bool = False,
        collates: Mapping[str, Callable[[list[Any]], Any] | None] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self._turns = _Turns(1 + num_workers * (options.get("prefetch_factor") or 2))  # as the loader prefetches
        self._running: Iterator[Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            KeyedDataset(parts, collates or {}),
            batch_sampler=self._turns,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            collate_fn=_collated,
            worker_init_fn=partial(_begin, worker_init_fn),
            generator=torch.Generator(),  # else every start would advance the global one
            **(options if num_workers else {}),
        )

    def batches(self, keys: Sequence[list[Key]]) -> Iterator[Any]:
        """Prepare batches, one per list of keys."""
        turns, mine = self._turns, _Pass(keys)
        turns.open.append(mine)
        try:
            for _ in keys:
                turns.asking = mine
                while not mine.ready:
                    self._receive()
                mine.ahead -= 1
                yield mine.ready.popleft()
        finally:
            turns.open.remove(mine)

    def _receive(self) -> None:
        """Take the next batch from the workers, and start them again if they have none."""
        try:
            if self._running is None:
                self._running = iter(self._loader)
            batch = next(self._running, _NONE)
            if batch is _NONE and self._turns.sent:
                raise RuntimeError("the data set raised StopIteration for a sample that it should have")
        except BaseException as error:  # also a time-out, after which the workers' order is unknown
            self._running = None
            self._turns.take_back()
            if isinstance(error, ConfigError):  # a worker's error carries its traceback; the last line is the message
                raise ConfigError(str(error).strip().splitlines()[-1].split("ConfigError: ")[-1]) from error
            raise
        if batch is _NONE:
            self._running = None
        else:
            self._turns.sent.popleft()[0].ready.append(batch)


def _collated(batch: Any) -> Any:
    """A batch of `KeyedDataset`, which collates its samples."""
    return batch


def _begin(then: Callable[[int], None] | None, worker: int) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal; the main process ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _tell_unless_nobody_reads
    if then is not None:
        then(worker)


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
            seeds = draw_seeds(len(indices), self._generator).tolist()
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
            seeds = draw_seeds(count, generator).tolist()
        keys = [
            Key(self._part, index, seed, position if self._unlabeled else None)
            for index, seed, position in zip(indices, seeds, order, strict=True)
        ]
        return [keys[start : start + self.batch_size] for start in range(0, count, self.batch_size)]


def loader_of_all(
    dataset: Any, batch_size: int, finish: Callable[[Any], Any], device: torch.device, collate: Any, **workers: Any
) -> WorkerLoader:
    """All samples of a data set in order, prepared by workers of its own, see `WorkerPool`."""
    pool = WorkerPool({"inputs": dataset}, pin_memory=device.type == "cuda", collates={"inputs": collate}, **workers)
    return WorkerLoader(pool, "inputs", np.arange(len(dataset)), batch_size, None, finish, device)


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators for a while, then restore them; 0 ≤ seed < 2**63."""
    # Other packages' transforms draw from the global generators, among them NumPy's legacy one (NPY002), and would
    # disturb ours without workers. torch.manual_seed would also reseed the accelerators.
    states = _states()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        _restored(states)


def _states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002


def _restored(states: tuple[Any, Any, Tensor]) -> bool:
    """Restore the global generators' states where they changed; return whether none did."""
    python, legacy, cpu = states
    now = _states()
    same = now[0] == python, np.array_equal(now[1][1], legacy[1]) and now[1][2:] == legacy[2:], torch.equal(now[2], cpu)
    if not all(same):
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.random.set_rng_state(cpu)
    return all(same)
