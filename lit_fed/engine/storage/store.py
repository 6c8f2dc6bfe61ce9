"""Clients' states between rounds, in versions, with the index of the current ones.

A state of round r stays beside the states of earlier rounds; the run's checkpoint holds the index of current versions
with their checksums. A run killed at any moment therefore resumes with exactly the states of its last checkpoint:
newer ones are not indexed, and never read. A round changes the rows of its cohort, and a checkpoint copies the table:
16 bytes a client, and no loop over clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.storage.files import remove_half_written
from lit_fed.engine.storage.packs import Packs, State, Version, VersionedFiles
from lit_fed.engine.wire.payload import ClientUpdate, Payload, is_finite, layout_of
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import CheckpointError

_LATE, _DECODER = "late-", "decoder-"
_DECODERS = 2**62 + 1  # clients have smaller numbers
_CHECKSUM_BITS = 32


class VersionIndex:
    """Versions by name: a client's number, ``late-<number>`` for its late update, or ``decoder-<number>``.

    Args:
        versions: The first content.
    """

    def __init__(self, versions: Mapping[str, Version]) -> None:
        self.versions = dict(versions)
        self._rows = {name: row for row, name in enumerate(self.versions)}
        self._table = np.empty((max(16, len(self._rows)), 2), np.int64)
        for row, (name, version) in enumerate(self.versions.items()):
            self._table[row] = _packed(name, version)

    def set(self, name: str, version: Version) -> None:
        """Add or replace a version."""
        row = self._rows.setdefault(name, len(self._rows))
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._table[row] = _packed(name, version)
        self.versions[name] = version

    def drop(self, name: str) -> None:
        """Remove a version; the last row takes the place of its row."""
        if self.versions.pop(name, None) is None:
            return
        row, last = self._rows.pop(name), len(self._rows)
        if row != last:
            self._table[row] = self._table[last]
            self._rows[_name(int(self._table[last, 0]))] = row

    def table(self) -> Tensor:
        """A copy of the table, int64 of shape (names, 2).

        A row holds the client's number n (−n − 1 for a late update, n + 2⁶² + 1 for what the uplink's codec keeps of
        the client's updates), and 2³² times the round plus the checksum.
        """
        return torch.from_numpy(self._table[: len(self._rows)].copy())


def read_table(table: Tensor) -> dict[str, Version]:
    """The versions in a table.

    Raises:
        ValueError: If no `VersionIndex` made it.
    """
    if table.dtype != torch.int64 or table.ndim != 2 or table.shape[1] != 2:
        raise ValueError(f"a tensor of {str(table.dtype).removeprefix('torch.')} {tuple(table.shape)}")
    numbers, packed = table[:, 0].tolist(), table[:, 1]
    if len(packed) and int(packed.min()) < 0:
        raise ValueError(f"a negative version, {int(packed.min())}")
    rounds, checksums = (packed >> _CHECKSUM_BITS).tolist(), (packed & (2**_CHECKSUM_BITS - 1)).tolist()
    versions = dict(zip(map(_name, numbers), zip(rounds, checksums, strict=True), strict=True))
    if len(versions) < len(numbers):
        raise ValueError("a client with two versions")
    return versions


def _packed(name: str, version: Version) -> tuple[int, int]:
    if name.startswith(_DECODER):
        number = _DECODERS + int(name.removeprefix(_DECODER))
    else:
        number = -int(name.removeprefix(_LATE)) - 1 if name.startswith(_LATE) else int(name)
    return number, version[0] << _CHECKSUM_BITS | version[1]


def _name(number: int) -> str:
    if number >= _DECODERS:
        return f"{_DECODER}{number - _DECODERS}"
    return str(number) if number >= 0 else f"{_LATE}{-number - 1}"


Key = int | str


class ClientStore:
    """Versioned per-client tensors, in memory or on disk.

    Args:
        mode: ``disk`` keeps files only, ``memory`` also this process's current states in RAM.

    Note:
        Several processes must all see the folder, as with Lightning's checkpoints: a client may run on another process
        next time.
    """

    def __init__(self, mode: Literal["memory", "disk"] = "disk") -> None:
        self.mode = mode
        self.keeper: Callable[[Path], VersionedFiles] = VersionedFiles
        """Makes a folder's files."""
        self.files = VersionedFiles()
        self.round_idx = 0
        self.restored = False
        """Whether a checkpoint was loaded, whose states may be foreign."""
        self._index = VersionIndex({})
        self._cache: dict[str, tuple[Version, State]] = {}
        self._ahead: dict[str, State] = {}  # prefetched
        self._changed: dict[str, Version | None] = {}
        self._superseded: list[tuple[str, int]] = []  # by name and round

    def open(self, directory: Path) -> None:
        """Set the folder, created with the first state."""
        self.files = self.keeper(directory)

    def get(self, key: Key) -> State | None:
        """The current state, or None. Its tensors must not be changed.

        Raises:
            CheckpointError: If its file is missing, damaged, or differs from the written content.
        """
        name = str(key)
        version = self._index.versions.get(name)
        if version is None:
            return None
        cached = self._cache.get(name)
        if cached is not None and cached[0] == version:
            return cached[1]
        state = self._ahead.pop(name, None) or self.files.read(name, version)
        if self.mode == "memory":
            self._cache[name] = (version, state)
        return state

    @contextmanager
    def reading(self, keys: Iterable[Key]) -> Iterator[None]:
        """Prefetch states for `get`, which reports the unreadable ones."""
        if self.mode == "disk":  # in memory mode, each would keep the memory of all
            current, names = self._index.versions, [str(key) for key in keys]
            self._ahead = self.files.read_ahead({name: current[name] for name in names if name in current})
        try:
            yield
        finally:
            self._ahead = {}

    def put(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """Write a state of this round, current from `commit` on."""
        name = str(key)
        kept = {entry: tensor.detach().cpu().contiguous() for entry, tensor in state.items()}
        version = self._changed[name] = self.files.write(name, self.round_idx, kept)
        if self.mode == "memory":
            self._cache[name] = (version, {entry: tensor.clone() for entry, tensor in kept.items()})

    def version(self, key: Key) -> Version | None:
        """The current version, or None."""
        return self._index.versions.get(str(key))

    def written(self, key: Key) -> Version | None:
        """The version written in this round, or None."""
        return self._changed.get(str(key))

    def note(self, key: Key, version: Version) -> None:
        """Register a version that a node has written in this round, current from `commit` on."""
        self._changed[str(key)] = version

    def expect(self, key: Key, round_idx: int) -> None:
        """Keep the files of a version that a node writes, also those of a killed run, for as long as it is at work."""
        self._superseded = [entry for entry in self._superseded if entry != (str(key), round_idx)]
        self.files.expect(str(key), round_idx)

    def drop(self, key: Key) -> None:
        """Forget a state from `commit` on."""
        self._changed[str(key)] = None

    def undo(self, keys: Iterable[Key]) -> None:
        """Forget this process's changes of some states in this round."""
        names = {str(key) for key in keys}
        self._changed = {name: version for name, version in self._changed.items() if name not in names}
        self.files.undo(names)

    def put_update(self, update: ClientUpdate) -> None:
        """Keep a late update until `pop_update` in a later round."""
        weight = torch.tensor(float(update.weight), dtype=torch.float64)
        kept = {"weight": weight} | {f"/{n}": t for n, t in update.payload.items()}
        if update.uplink_bytes:
            kept["bytes"] = torch.tensor(update.uplink_bytes)
        self.put(f"late-{update.client_id}", kept)

    def pop_update(self, client_id: int, device: torch.device, kind: str, sent: Payload) -> ClientUpdate | None:
        """Take out a client's late update, or None.

        Args:
            client_id: The client.
            device: Where its tensors go.
            kind: The client's kind of network.
            sent: Payload that the kind receives; equal names have equal dtypes and shapes.

        Raises:
            CheckpointError: If its file is missing, damaged, or does not hold an update of the model.
        """
        state = self.get(f"late-{client_id}")
        if state is None:
            return None
        self.drop(f"late-{client_id}")
        payload = {name[1:]: tensor.to(device) for name, tensor in state.items() if name.startswith("/")}
        weight = float(state["weight"]) if "weight" in state and state["weight"].numel() == 1 else math.nan
        alike = sent.keys() & payload.keys() if self.restored else ()
        if not (
            0 <= weight < math.inf
            and is_finite(payload)
            and layout_of({name: sent[name] for name in alike}) == layout_of({name: payload[name] for name in alike})
        ):
            raise CheckpointError(
                f"the late update of client {client_id} does not fit this model; resume with the run's own settings"
            )
        uplink_bytes = int(state["bytes"]) if "bytes" in state else 0
        return ClientUpdate(client_id, payload, weight, kind=kind, uplink_bytes=uplink_bytes)

    def put_decoder(self, update: ClientUpdate) -> None:
        """Keep what the uplink's codec keeps of a client's updates at the server."""
        self.put(f"{_DECODER}{update.client_id}", update.decoder or {})

    def decoder(self, client_id: int) -> State | None:
        """What the uplink's codec keeps of a client's updates; None before the first, and without EF21."""
        return self.get(f"{_DECODER}{client_id}")

    def commit(self, workers: Workers, next_round: int) -> None:
        """Make this round's changes current on every process.

        Raises:
            CheckpointError: If a process cannot write its states.
        """
        packs, wrong = self._flushed()
        parts = workers.gather((self._changed, packs, wrong))
        for _, packs, wrong in parts:
            if wrong is not None:
                raise CheckpointError(wrong)
            self.files.take(packs)
        changes = [change for part, *_ in parts for change in part.items()]
        for name, version in sorted(changes, key=lambda change: change[1] is not None):  # drops first
            before = self.version(name)
            if before is not None and (version is None or before[0] != version[0]):
                self._superseded.append((name, before[0]))
            if version is None:
                self._index.drop(name)
            else:
                self._index.set(name, version)
        for name, _ in changes:  # dropped, or now another process's
            if name in self._cache and self._cache[name][0] != self._index.versions.get(name):
                del self._cache[name]
        self._changed = {}
        self.round_idx = next_round

    def _flushed(self) -> tuple[Packs, str | None]:
        """The written packs, or the reason for a failure, which all processes must know."""
        try:
            return self.files.flush(), None
        except CheckpointError as error:
            return {}, str(error)

    def state_dict(self) -> dict[str, Version]:
        """The index: current version by key."""
        return dict(self._index.versions)

    def table(self) -> Tensor:
        """The index as a checkpoint holds it; see `VersionIndex.table`."""
        return self._index.table()

    def clients(self) -> Iterator[int]:
        """Clients with a state."""
        return (int(name) for name in self._index.versions if name.isdecimal())

    def load_state_dict(self, index: Mapping[str, Version], round_idx: int) -> None:
        """Restore an index."""
        self._index = VersionIndex(index)
        self.restored = True
        self._cache, self._changed, self._superseded = {}, {}, []
        self.round_idx = round_idx

    def find_leftovers(self) -> None:
        """Mark files that the index lacks, such as a killed round's, for collection.

        Half-written files are deleted: call it before anybody writes.
        """
        if self.files.directory is not None:
            remove_half_written(self.files.directory)
        current = {(name, round_idx) for name, (round_idx, _) in self._index.versions.items()}
        self._superseded = [entry for entry in self.files.rounds() if entry not in current]

    def adopt(self, directory: Path) -> None:
        """Copy the current states from another run's folder; call it on one process.

        Raises:
            CheckpointError: If a state is missing, or cannot be copied.
        """
        source = self.keeper(directory)
        for name, version in self._index.versions.items():
            self.files.copy(name, version, source)
        self.files.take(self.files.flush())

    def collect_garbage(self, checkpoints: Iterable[Mapping[str, Version]], delete: bool) -> None:
        """Forget superseded versions that no kept checkpoint needs; call it after a checkpoint.

        A current version is never garbage: a killed round's leftover is current again where that round is repeated.

        Args:
            checkpoints: Indices of the kept checkpoints, on the process that deletes.
            delete: Also delete the files; for one process.
        """
        indices = [self._index.versions, *checkpoints]
        remaining, gone = list[tuple[str, int]](), list[tuple[str, int]]()
        for name, round_idx in self._superseded:
            needed = any(name in index and index[name][0] == round_idx for index in indices)
            (remaining if needed else gone).append((name, round_idx))
        self.files.forget(gone, delete)
        self._superseded = remaining
