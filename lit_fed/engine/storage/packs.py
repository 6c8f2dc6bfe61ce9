"""States of many clients in few files: creating a file takes longer than writing a small state.

A pack ``<client>.r<round>.states`` concatenates states of one round, each in safetensors' format with its client's
name; the pack is named after its first client. States are buffered up to 8 MB or the end of the round. A pack of which
less than half is needed is rewritten without the rest, so a folder takes at most twice the needed space, and a state is
written at most twice on average.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from torch import Tensor
from typing_extensions import override

from lit_fed.engine.storage.files import Packs, Version, VersionedFiles, in_place_of, unreadable
from lit_fed.engine.storage.state_bytes import State, about, extent, is_not
from lit_fed.errors import CheckpointError

_ENDING = ".states"
_MOST_BYTES = 2**23  # buffered in memory


class PackedFiles(VersionedFiles):
    """Versioned states, packed by round; see `VersionedFiles`."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        self._held: dict[int, dict[str, bytes]] = {}  # by round and name
        self._num_held = 0
        self._written: Packs = {}
        self._packs: Packs = {}  # a round that was killed and rerun has a state in two
        self._unread: dict[int, list[str]] | None = None  # by round: packs found in the folder, not yet scanned
        self._damaged: dict[str, str] = {}  # by pack: why a part of it cannot be read
        self._touched: set[tuple[int, str]] = set()

    @override
    def read(self, name: str, version: Version) -> State:
        return self._decoded(name, self._find(name, version), self.path(name, version[0]))

    @override
    def read_ahead(self, versions: Mapping[str, Version]) -> dict[str, State]:
        places: dict[str, list[tuple[tuple[int, int], str]]] = {}
        for name, (round_idx, _) in versions.items():
            self._scan(round_idx)
            for file, spans in self._packs.get(round_idx, {}).items():
                if name in spans:
                    places.setdefault(file, []).append((spans[name], name))
        blobs = {}
        for file, found in places.items():
            with suppress(OSError), open(f"{self.directory}{os.sep}{file}", "rb") as stream:
                for (start, length), name in sorted(found):
                    stream.seek(start)
                    blob = stream.read(length)
                    if crc32(blob) == versions[name][1]:
                        blobs[name] = blob
        return self.bytes.decode_all(blobs)

    @override
    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        blob = self.bytes.encode(name, state)
        self._hold(name, round_idx, blob)
        return round_idx, crc32(blob)

    @override
    def flush(self) -> Packs:
        self._write()
        written, self._written = self._written, {}
        return written

    @override
    def take(self, packs: Packs) -> None:
        for round_idx, files in packs.items():
            for file, spans in files.items():
                self._damaged.pop(file, None)
                for name in spans:
                    self._let_go(name, round_idx)
                self._packs.setdefault(round_idx, {})[file] = dict(spans)

    @override
    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        for name, round_idx in gone:
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

    @override
    def delete(self, name: str, round_idx: int) -> None:
        self.forget([(name, round_idx)], delete=True)

    @override
    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        assert isinstance(source, PackedFiles)
        self._hold(name, version[0], source._find(name, version))

    @override
    def rounds(self) -> Iterator[tuple[str, int]]:
        for round_idx in list(self._look()):
            self._scan(round_idx)
        for round_idx, files in self._packs.items():
            yield from ((name, round_idx) for name in {name: None for spans in files.values() for name in spans})

    @override
    def path(self, name: str, round_idx: int) -> Path:
        """The pack of a version, or the one that would be named after it."""
        files = self._packs.get(round_idx, {})
        called = f"{name}.r{round_idx}{_ENDING}"
        return self.folder_of(name) / next((file for file, spans in files.items() if name in spans), called)

    # ------------------------------------------------------------------ writing

    def _hold(self, name: str, round_idx: int, blob: bytes) -> None:
        self.folder_of(name)
        self._held.setdefault(round_idx, {})[name] = blob
        self._num_held += len(blob)
        if self._num_held >= _MOST_BYTES:
            self._write()

    def _write(self) -> None:
        for round_idx, blobs in self._held.items():
            file = f"{next(iter(blobs))}.r{round_idx}{_ENDING}"
            self._written.setdefault(round_idx, {})[file] = self._put(file, blobs)
        self._held, self._num_held = {}, 0

    def _put(self, file: str, blobs: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        with in_place_of(self._at(file)) as temporary, open(temporary, "wb") as stream:
            stream.writelines(blobs.values())
        spans, place = {}, 0
        for name, blob in blobs.items():
            spans[name] = (place, len(blob))
            place += len(blob)
        return spans

    def _let_go(self, name: str, round_idx: int) -> None:
        for file, spans in self._packs.get(round_idx, {}).items():
            if spans.pop(name, None) is not None:
                self._touched.add((round_idx, file))

    def _tidy(self, round_idx: int, file: str) -> None:
        """Delete an unneeded pack, and rewrite one that is needed by less than half."""
        path, spans = self._at(file), self._packs[round_idx][file]
        if file in self._damaged:  # its other states are unknown
            return
        if not spans:
            path.unlink(missing_ok=True)
        elif path.is_file() and 2 * sum(length for _, length in spans.values()) < path.stat().st_size:
            blobs = {name: self._blob(file, span) for name, span in spans.items()}
            with suppress(CheckpointError):  # a full disk is reported when a state must be written
                self._packs[round_idx][file] = self._put(file, blobs)

    # ------------------------------------------------------------------ reading

    def _find(self, name: str, version: Version) -> bytes:
        round_idx, checksum = version
        self._scan(round_idx)
        why = ""
        for looked_again in (False, True):
            for file, spans in self._packs.get(round_idx, {}).items():
                if name not in spans:
                    continue
                if looked_again:  # another process may have rewritten it
                    spans |= {one: span for one, span in self._spans(file).items() if one in spans}
                try:
                    blob = self._blob(file, spans[name])
                except OSError as error:
                    why = str(error.strerror)
                    continue
                if crc32(blob) == checksum:
                    return blob
                why = is_not(name, blob)
        raise unreadable(name, self.path(name, round_idx), why) if why else self._absent(name, round_idx)

    def _absent(self, name: str, round_idx: int) -> CheckpointError:
        """The error for a state that no pack holds; a damaged pack of its round may have held it."""
        files = list(self._packs.get(round_idx, {}))
        if damaged := [file for file in files if file in self._damaged]:
            return unreadable(name, self._at(damaged[0]), self._damaged[damaged[0]])
        held = ", ".join([*files[:3], *(["…"] if files[3:] else [])])
        why = f"{held} of round {round_idx} hold{'' if files[1:] else 's'} none"
        return unreadable(name, self.folder_of(name), why if files else f"no pack of round {round_idx} is there")

    def _blob(self, file: str, span: tuple[int, int]) -> bytes:
        with open(f"{self.directory}{os.sep}{file}", "rb", buffering=0) as stream:  # faster than a `Path`
            stream.seek(span[0])
            return stream.read(span[1])

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
                files[file] = self._spans(file)

    def _at(self, file: str) -> Path:
        assert self.directory is not None  # else the pack would not exist
        return self.directory / file

    def _spans(self, file: str) -> dict[str, tuple[int, int]]:
        """Offset and length of each client's state in a pack, up to the first damaged one."""
        spans: dict[str, tuple[int, int]] = {}
        place = 0
        try:
            with open(self._at(file), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if not size:
                    self._damaged[file] = "it is empty"
                while mark := stream.read(8):
                    head = stream.read(min(size, *struct.unpack("<Q", mark)))
                    end = stream.tell() + extent(head, size - stream.tell())
                    spans[str(about(mark + head)["client"])] = (place, end - place)
                    place = stream.seek(end)
        except OSError as error:
            self._damaged[file] = str(error.strerror)
        except Exception:  # damaged bytes make the reader fail in a dozen ways
            self._damaged[file] = f"it is damaged from byte {place} on"
        return spans
