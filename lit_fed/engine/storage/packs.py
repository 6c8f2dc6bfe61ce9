"""Clients' states in versioned files: packs of many, as creating a file takes longer than writing a small state.

A pack ``<client>.r<round>.states`` is a safetensors file of states of one round with the same names, dtypes and shapes.
Their tensors are stacked, a row per client; the metadata name the clients in the order of the rows, and the pack is
named after the first. States are buffered up to 8 MB or the end of the round. A pack of which less than half is needed
is rewritten without the rest, so a folder takes at most twice the needed space, and a state is written at most twice on
average.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import CheckpointError
from lit_fed.file_names import is_file_name
from lit_fed.tensors import aligned

State = dict[str, Tensor]
Version = tuple[int, int]
"""A state's round and a number below 2^32: its `checksum`, which detects accidents, not attacks.

Of a state on a node of a federation the number is of the request for it, because the server is told it.
"""
Packs = dict[int, dict[str, set[str]]]
"""The clients of each pack, by round and file name."""

_ENDING = ".states"
_MOST_BYTES = 2**23  # buffered in memory


class VersionedFiles:
    """Clients' states by round, in packs.

    Args:
        directory: Their folder, created with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._held: dict[str, tuple[int, State]] = {}  # by client
        self._num_held = 0
        self._written: Packs = {}
        self._packs: Packs = {}  # a round that was killed and rerun has a state in two
        self._unread: dict[int, list[str]] | None = None  # by round: packs found in the folder, not yet scanned
        self._sizes: dict[str, int] = {}  # by pack: clients in the file
        self._damaged: dict[str, str] = {}  # by pack: why it cannot be read
        self._touched: set[tuple[int, str]] = set()

    # ------------------------------------------------------------------ writing

    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        """Write a version of contiguous tensors, at the latest with `flush`.

        Raises:
            CheckpointError: If the disk is full, the folder is not writable, or safetensors lacks a dtype.
        """
        self.folder_of(name)
        kept = {entry: tensor.clone() for entry, tensor in state.items()}
        self._held[name] = round_idx, kept
        self._num_held += sum(tensor.nbytes for tensor in kept.values())
        if self._num_held >= _MOST_BYTES:
            self._write()
        return round_idx, checksum(name, kept)

    def flush(self) -> Packs:
        """Write buffered states; return the packs written since the last call, for `take`."""
        self._write()
        written, self._written = self._written, {}
        return written

    def undo(self, names: Collection[str]) -> None:
        """Forget what was written of some clients since the last `flush`; delete packs without other clients."""
        for files in self._written.values():
            for file, kept in list(files.items()):
                kept.difference_update(names)
                if not kept:
                    self._path_of(file).unlink(missing_ok=True)
                    del files[file]
        self._held = {name: held for name, held in self._held.items() if name not in names}
        self._num_held = sum(tensor.nbytes for _, state in self._held.values() for tensor in state.values())

    def take(self, packs: Packs) -> None:
        """Register the packs of some process, which replace these clients' states of the same round."""
        for round_idx, files in packs.items():
            for file, names in files.items():
                self._damaged.pop(file, None)
                for name in names:
                    self._let_go(name, round_idx)
                self._packs.setdefault(round_idx, {})[file] = set(names)
                self._sizes[file] = len(names)

    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        """Copy a version from another folder, at the latest with `flush`.

        Raises:
            CheckpointError: If it does not exist, or cannot be copied.
        """
        self.write(name, version[0], source.read(name, version))

    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Drop versions that nobody needs; one process also deletes them."""
        for name, round_idx in gone:
            self.folder_of(name)
            self._scan(round_idx)
            self._let_go(name, round_idx)
        for round_idx, file in self._touched:
            if delete:
                self._tidy(round_idx, file)
            if not self._packs[round_idx][file]:
                del self._packs[round_idx][file]
            if not self._packs[round_idx]:
                del self._packs[round_idx]
        self._touched = set()

    def expect(self, name: str, round_idx: int) -> None:
        """Prepare for a version that somebody else writes."""

    def _write(self) -> None:
        alike: dict[tuple[int, object], dict[str, State]] = {}
        for name, (round_idx, state) in self._held.items():
            layout = tuple([(entry, tensor.dtype, tensor.shape) for entry, tensor in state.items()])
            alike.setdefault((round_idx, layout), {})[name] = state
        for (round_idx, _), states in alike.items():
            file = f"{next(iter(states))}.r{round_idx}{_ENDING}"
            write_pack(self._path_of(file), states)
            self._written.setdefault(round_idx, {})[file] = set(states)
        self._held, self._num_held = {}, 0

    def _let_go(self, name: str, round_idx: int) -> None:
        for file, names in self._packs.get(round_idx, {}).items():
            if name in names:
                names.remove(name)
                self._touched.add((round_idx, file))

    def _tidy(self, round_idx: int, file: str) -> None:
        """Delete an unneeded pack, and rewrite one that is needed by less than half."""
        path, names = self._path_of(file), self._packs[round_idx][file]
        if file in self._damaged:  # its other states are unknown
            return
        if not names:
            path.unlink(missing_ok=True)
        elif 2 * len(names) < self._sizes[file]:
            with suppress(Exception):  # what cannot be read or written is reported when a state of it is needed
                write_pack(path, read_pack(path, names))
                self._sizes[file] = len(names)

    # ------------------------------------------------------------------ reading

    def read(self, name: str, version: Version) -> State:
        """Read a version.

        Raises:
            CheckpointError: If its file is missing, damaged, or differs from the written content.
        """
        round_idx, expected = version
        self.folder_of(name)
        self._scan(round_idx)
        why = ""
        for file, names in self._packs.get(round_idx, {}).items():
            if name not in names:
                continue
            try:
                state = read_pack(self._path_of(file), [name]).get(name)
            except Exception as error:  # damaged bytes make the reader fail in a dozen ways
                why = _reason(error)
                continue
            if state is not None and self.is_written(name, state, expected):
                return state
            why = "it differs from what the run wrote"
        raise self._unreadable(name, self.path(name, round_idx), why) if why else self._absent(name, round_idx)

    def read_ahead(self, versions: Mapping[str, Version]) -> dict[str, State]:
        """Read in advance the versions, by name, that are faster to read together; skip the unreadable."""
        places: dict[str, list[str]] = {}
        for name, (round_idx, _) in versions.items():
            self._scan(round_idx)
            for file, names in self._packs.get(round_idx, {}).items():
                if name in names:
                    places.setdefault(file, []).append(name)
        state_of = dict[str, State]()
        for file, wanted in places.items():
            with suppress(Exception):  # `read` reports it
                states = read_pack(self._path_of(file), wanted)
                state_of |= {
                    name: state for name, state in states.items() if self.is_written(name, state, versions[name][1])
                }
        return state_of

    def is_written(self, name: str, state: State, number: int) -> bool:
        """Whether a state that was read is the one that `write` gave a number."""
        return checksum(name, state) == number

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Name and round of every stored version."""
        for round_idx in list(self._look()):
            self._scan(round_idx)
        for round_idx, files in self._packs.items():
            yield from ((name, round_idx) for name in dict.fromkeys(name for names in files.values() for name in names))

    def path(self, name: str, round_idx: int) -> Path:
        """The pack of a version, or the one that would be named after it.

        Raises:
            CheckpointError: If there is no folder, or the name would leave it.
        """
        files = self._packs.get(round_idx, {})
        called = f"{name}.r{round_idx}{_ENDING}"
        return self.folder_of(name) / next((file for file, names in files.items() if name in names), called)

    def folder_of(self, name: str) -> Path:
        """The folder, for a client's file.

        Raises:
            CheckpointError: If there is no folder, or the name would leave it.
        """
        if self.directory is None:
            raise CheckpointError(
                "the checkpoint lies outside of its run's folder, which holds the clients' states; use it where the "
                "run left it"
            )
        if not is_file_name(name):
            raise CheckpointError(f"client name {name!r} would place its state outside of the run's folder; rename it")
        return self.directory

    def _path_of(self, file: str) -> Path:
        assert self.directory is not None  # else the pack would not exist
        return self.directory / file

    def _absent(self, name: str, round_idx: int) -> CheckpointError:
        """The error for a state that no pack holds; a damaged pack of its round may have held it."""
        files = list(self._packs.get(round_idx, {}))
        if damaged := [file for file in files if file in self._damaged]:
            return self._unreadable(name, self._path_of(damaged[0]), self._damaged[damaged[0]])
        held = ", ".join([*files[:3], *(["…"] if files[3:] else [])])
        why = f"{held} of round {round_idx} hold{'' if files[1:] else 's'} none"
        return self._unreadable(name, self.folder_of(name), why if files else f"no pack of round {round_idx} is there")

    def _unreadable(self, name: str, path: Path, why: str) -> CheckpointError:
        return CheckpointError(f"the state of client {name} cannot be read from {path}: {why}")

    def _look(self) -> dict[int, list[str]]:
        """Packs in the folder that are not registered, by round; the folder is listed once."""
        if self._unread is None:
            self._unread = {}
            for path in self.directory.glob(f"*.r*{_ENDING}") if self.directory is not None else ():
                round_idx = path.stem.rpartition(".r")[2]
                if round_idx.isdecimal() and not path.name.startswith("."):
                    self._unread.setdefault(int(round_idx), []).append(path.name)
        return self._unread

    def _scan(self, round_idx: int) -> None:
        """Register the unregistered packs of a round."""
        for file in self._look().pop(round_idx, ()):
            files = self._packs.setdefault(round_idx, {})
            if file not in files:
                try:
                    files[file] = set(clients_of(self._path_of(file)))
                except Exception as error:  # damaged bytes make the reader fail in a dozen ways
                    files[file], self._damaged[file] = set(), _reason(error)
                self._sizes[file] = len(files[file])


def checksum(owner: str, state: Mapping[str, Tensor]) -> int:
    """The CRC-32 of a state's owner, layout and contiguous values."""
    layout = [[name, str(tensor.dtype), *tensor.shape] for name, tensor in state.items()]
    crc = crc32(json.dumps([owner, layout]).encode())
    for tensor in state.values():
        crc = crc32(tensor.view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def write_pack(path: Path, states: Mapping[str, State]) -> None:
    """Write states of one layout, by client.

    Raises:
        CheckpointError: If the disk is full, the folder is not writable, or safetensors lacks a dtype.
    """
    names = list(next(iter(states.values())))
    about = json.dumps({"clients": list(states), "names": names})  # one entry, as their order is not fixed
    try:
        columns = {name: torch.stack([state[name] for state in states.values()]) for name in names}
        content = safetensors.torch.save(columns, {"state": about})
    except KeyError as error:  # such as complex128
        raise CheckpointError(
            f"the state of client {next(iter(states))} does not fit into safetensors: {' '.join(str(error).split())}"
        ) from error
    with in_place_of(path) as temporary:
        temporary.write_bytes(content)


def read_pack(path: Path, clients: Iterable[str]) -> dict[str, State]:
    """The states in a pack of some clients, without those that it does not hold."""
    with safe_open(path, "pt") as pack:
        names, rows = _contents(pack.metadata())
        places = {client: rows[client] for client in clients if client in rows}
        chosen = torch.tensor(list(places.values()), dtype=torch.int64)
        columns = {name: pack.get_tensor(name)[chosen] for name in names}
    return {client: {name: aligned(column[at]) for name, column in columns.items()} for at, client in enumerate(places)}


def clients_of(path: Path) -> list[str]:
    """The clients of a pack."""
    with safe_open(path, "pt") as pack:
        return list(_contents(pack.metadata())[1])


def _contents(metadata: Mapping[str, str]) -> tuple[list[str], dict[str, int]]:
    """The names of a state's tensors in their order, and the row of every client."""
    about = json.loads(metadata["state"])
    return [str(name) for name in about["names"]], {str(client): row for row, client in enumerate(about["clients"])}


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or f"it is no pack of states: {' '.join(str(error).split())[:100]}"
