"""Sample indices by client, for any number of clients, in two integer arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

IntArray = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2**64 over the golden ratio


class ClientIndices(Interface):
    """Sample indices by client, stored (`CSR`) or computed on demand."""

    def __len__(self) -> int:
        """Number of clients."""
        ...

    def __getitem__(self, client_id: int) -> IntArray:
        """The client's sample indices."""
        ...


@dataclass(frozen=True)
class CSR:
    """Compressed sparse rows: client ``k`` holds ``indices[offsets[k]:offsets[k + 1]]``.

    A client's indices are a view, so a look-up among a million clients costs as much as among ten.

    Args:
        indices: Sample indices, grouped by client, shape (total,).
        offsets: Each client's first position, shape (num_clients + 1,).
    """

    indices: IntArray
    offsets: IntArray

    @classmethod
    def from_owners(cls, indices: IntArray, owners: IntArray, num_clients: int) -> CSR:
        """Group indices (n,) by their owners (n,), in order; owners outside 0 … num_clients − 1 are left out."""
        owned = (owners >= 0) & (owners < num_clients)
        if not owned.all():
            indices, owners = indices[owned], owners[owned]
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners, minlength=num_clients)
        return cls(np.ascontiguousarray(indices[order], dtype=np.int64), offsets_of(sizes))

    @classmethod
    def from_sizes(cls, indices: IntArray, sizes: IntArray) -> CSR:
        """Cut an array of indices into consecutive pieces, one per client."""
        return cls(np.ascontiguousarray(indices, dtype=np.int64), offsets_of(sizes))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client_id: int) -> IntArray:
        start, stop = self.bounds(client_id)
        return self.indices[start:stop]

    def bounds(self, client_id: int) -> tuple[int, int]:
        """The client's first position in `indices` and the position after its last.

        Raises:
            ConfigError: The client does not exist.
        """
        if not 0 <= client_id < len(self.offsets) - 1:
            raise ConfigError(
                f"client {client_id} does not exist, of {len(self)} clients numbered from 0; name one of them or raise "
                "data.num_clients"
            )
        return self.offsets.item(client_id), self.offsets.item(client_id + 1)

    def of_all(self, client_ids: Sequence[int]) -> tuple[IntArray, IntArray]:
        """The indices of some clients, one client after the other, and their numbers."""
        counts = np.asarray(self.sizes_of(client_ids), dtype=np.int64)
        begins = self.offsets[np.asarray(client_ids, dtype=np.int64)] - counts.cumsum() + counts
        return self.indices[begins.repeat(counts) + np.arange(counts.sum())], counts

    def size(self, client_id: int) -> int:
        """Number of samples of one client."""
        start, stop = self.bounds(client_id)
        return stop - start

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of samples of each of some clients."""
        if len(client_ids) == 1:
            return [self.size(client_ids[0])]
        chosen = np.asarray(client_ids, dtype=np.int64)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(self)):
            self.bounds(int(chosen[(chosen < 0) | (chosen >= len(self))][0]))
        sizes: list[int] = (self.offsets[chosen + 1] - self.offsets[chosen]).tolist()
        return sizes

    @property
    def sizes(self) -> IntArray:
        """Number of samples of every client, shape (num_clients,)."""
        return np.diff(self.offsets)

    def owners(self) -> IntArray:
        """The client of each entry of `indices`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def through(self, index_map: IntArray) -> CSR:
        """The same rows with every index ``i`` replaced by ``index_map[i]``."""
        return CSR(index_map[self.indices], self.offsets)

    def only(self, rows: list[int]) -> CSR:
        """All rows emptied but the given ones, which are ascending."""
        sizes = np.zeros(len(self), dtype=np.int64)
        sizes[rows] = self.sizes[rows]
        return CSR.from_sizes(np.concatenate([self.indices[:0], *(self[row] for row in rows)]), sizes)

    def histogram(self, labels: IntArray, num_classes: int) -> IntArray:
        """Samples per client and class, shape (num_clients, num_classes)."""
        cells = self.owners() * num_classes + labels[self.indices]
        return np.bincount(cells, minlength=len(self) * num_classes).reshape(len(self), num_classes)

    def hold_out(self, fractions: Iterable[float], seed: int) -> list[CSR]:
        """Take random parts of every client's samples, in one sweep over all clients.

        A client's choice is a function of the seed, its number and its number of samples: no client changes another's.

        Args:
            fractions: The share of each part; a client with n samples gives ⌊fraction·n⌋ of them.
            seed: The source of the random choice.

        Returns:
            One CSR per fraction, and the remainder last, each in the original order within a client.
        """
        owners, sizes = self.owners(), self.sizes
        shuffled = np.lexsort((self._random(seed, owners), owners))
        rank = np.empty(len(self.indices), dtype=np.int64)
        rank[shuffled] = np.arange(len(self.indices)) - np.repeat(self.offsets[:-1], sizes)
        parts = []
        start = np.zeros(len(self), dtype=np.int64)
        for fraction in fractions:
            # A hair above, so that 0.29·100 = 28.999… gives 29.
            stop = start + np.floor(fraction * sizes + 1e-9).astype(np.int64)
            chosen = (rank >= start[owners]) & (rank < stop[owners])
            parts.append(CSR.from_sizes(self.indices[chosen], stop - start))
            start = stop
        parts.append(CSR.from_sizes(self.indices[rank >= start[owners]], sizes - start))
        return parts

    def _random(self, seed: int, owners: IntArray) -> NDArray[np.uint64]:
        """A random number for each entry of `indices`: a generator a client, and its next number for each sample.

        The generator is SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
        its numbers follow from their places, so that a million clients need no generator object each.
        """
        places = np.arange(len(self.indices)) - self.offsets[:-1][owners]
        starts = _mixed(np.uint64(seed) + _GOLDEN * np.arange(1, len(self) + 1, dtype=np.uint64))
        return _mixed(starts[owners] + _GOLDEN * (places + 1).astype(np.uint64))


def held_out(owners: IntArray, count: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """A mask (n,) of a random share of each owner's samples: ⌊fraction·n⌋ of the n samples of one of `count` owners."""
    everything = CSR.from_owners(np.arange(len(owners)), owners, count)
    chosen, _ = everything.hold_out((fraction,), seed)
    is_held_out = np.zeros(len(owners), dtype=bool)
    is_held_out[chosen.indices] = True
    return is_held_out


def _mixed(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output of each state (n,)."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def offsets_of(sizes: IntArray) -> IntArray:
    """Row starts from row sizes: (n,) to (n + 1,)."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def sha256_of(arrays: Iterable[IntArray]) -> str:
    """The SHA-256 of integer arrays, as hexadecimal digits, the same on every platform."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.int64(len(array)).astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()
