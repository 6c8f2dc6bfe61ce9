"""What many clients keep, in few files: to make a file takes longer than to write a small state into it.

A pack ``<client>.r<round>.states`` holds states of one round, each as a file of safetensors that says whose it is, one
after the other; it is called as the first of them. States are held back until they are many or the round ends, and
large ones have a pack of their own. A pack of which less than half is needed is written anew without the rest, so a
folder holds at most twice what is needed and a state is written at most twice on average.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from torch import Tensor

from lit_fed.engine.files import (
    Packs,
    State,
    Version,
    VersionedFiles,
    about,
    in_place_of,
    is_not,
    packed,
    unpacked,
    unreadable,
)
from lit_fed.errors import CheckpointError

_ENDING = ".states"
_MOST_BYTES = 2**23  # held back in memory
_ABSENT = "it is not there"


class PackedFiles(VersionedFiles):
    """Tensors of many clients in versions, all of a round together.

    Args:
        directory: Their folder; it is made with the first file. None refuses to write.
    """

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        self._held: dict[int, dict[str, bytes]] = {}  # by round and name
        self._num_held = 0
        self._written: Packs = {}
        self._packs: Packs = {}
        self._where: dict[tuple[str, int], list[str]] = {}  # in several where a round was killed and ran again
        self._listed: dict[int, list[str]] | None = None  # by round: packs that nobody has told us of
        self._touched: set[str] = set()

    def read(self, name: str, version: Version) -> State:
        """One version; see `VersionedFiles.read`."""
        return unpacked(self._find(name, version))

    def write(self, name: str, round_idx: int, state: Mapping[str, Tensor]) -> Version:
        """Write one version, at the latest with `flush`; see `VersionedFiles.write`."""
        blob = packed(name, state)
        self._hold(name, round_idx, blob)
        return round_idx, crc32(blob)

    def flush(self) -> Packs:
        """Write what is held back; what was written since the last time, for `take`."""
        self._write()
        written, self._written = self._written, {}
        return written

    def take(self, packs: Packs) -> None:
        """Learn what some process has written: it comes in the place of what these clients had in that round."""
        for file, (round_idx, spans) in packs.items():
            for name in self._packs.pop(file, (0, {}))[1]:
                self._where[name, round_idx].remove(file)
            for name in spans:
                self._let_go(name, round_idx)
                self._where[name, round_idx] = [file]
            self._packs[file] = (round_idx, dict(spans))

    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Let versions go; a pack goes with the last of them. See `VersionedFiles.forget`."""
        for name, round_idx in gone:
            self._scan(round_idx)
            self._let_go(name, round_idx)
        for file in self._touched & self._packs.keys():
            if delete:
                self._tidy(file)
            if not self._packs[file][1]:
                del self._packs[file]
        self._touched = set()

    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        """Take one version from another folder's; see `VersionedFiles.copy`."""
        assert isinstance(source, PackedFiles)
        self._hold(name, version[0], source._find(name, version))

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Every name and round that a pack holds."""
        for round_idx in list(self._unread):
            self._scan(round_idx)
        yield from list(self._where)

    def path(self, name: str, round_idx: int) -> Path:
        """The pack that a version lies in, or that would be called after it; see `VersionedFiles.path`."""
        files = self._where.get((name, round_idx)) or [f"{name}.r{round_idx}{_ENDING}"]
        return self.folder_of(name) / files[0]

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
            self._written[file] = (round_idx, self._put(file, blobs))
        self._held, self._num_held = {}, 0

    def _put(self, file: str, blobs: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
        assert self.directory is not None
        with in_place_of(self.directory / file) as temporary, open(temporary, "wb") as stream:
            stream.writelines(blobs.values())
        spans, place = {}, 0
        for name, blob in blobs.items():
            spans[name] = (place, len(blob))
            place += len(blob)
        return spans

    def _tidy(self, file: str) -> None:
        """Delete a pack that nobody needs, and write one anew that is mostly not needed."""
        assert self.directory is not None
        path, (round_idx, spans) = self.directory / file, self._packs[file]
        if not spans:
            path.unlink(missing_ok=True)
        elif path.is_file() and 2 * sum(length for _, length in spans.values()) < path.stat().st_size:
            blobs = {name: self._blob(file, name) for name in spans}
            with suppress(CheckpointError):  # a full disk: what has to be written says so
                self._packs[file] = (round_idx, self._put(file, blobs))

    def _let_go(self, name: str, round_idx: int) -> None:
        for file in self._where.pop((name, round_idx), ()):
            del self._packs[file][1][name]
            self._touched.add(file)

    # ------------------------------------------------------------------ reading

    def _blob(self, file: str, name: str) -> bytes:
        assert self.directory is not None
        place, length = self._packs[file][1][name]
        with open(self.directory / file, "rb", buffering=0) as stream:
            stream.seek(place)
            return stream.read(length)

    def _find(self, name: str, version: Version) -> bytes:
        round_idx, checksum = version
        self._scan(round_idx)
        files, why = self._where.get((name, round_idx), []), _ABSENT
        for looked_again in (False, True):
            for file in files:
                if looked_again:
                    self._look_again(file)
                try:
                    blob = self._blob(file, name)
                except OSError as error:
                    why = str(error.strerror)
                    continue
                if crc32(blob) == checksum:
                    return blob
                why = is_not(name, blob)
        raise unreadable(name, self.path(name, round_idx), why)

    def _look_again(self, file: str) -> None:
        """Find where states lie in a pack that another process may have written anew."""
        assert self.directory is not None
        spans = self._packs[file][1]
        spans |= {name: span for name, span in _spans(self.directory / file).items() if name in spans}

    @property
    def _unread(self) -> dict[int, list[str]]:
        """By round, the packs in the folder that nobody has told us of; it is looked into once."""
        if self._listed is None:
            self._listed = {}
            for path in self.directory.glob(f"*.r*{_ENDING}") if self.directory is not None else ():
                round_idx = path.stem.rpartition(".r")[2]
                if round_idx.isdecimal() and not path.name.startswith(".") and path.name not in self._packs:
                    self._listed.setdefault(int(round_idx), []).append(path.name)
        return self._listed

    def _scan(self, round_idx: int) -> None:
        """Learn what the packs of a round hold of which nobody has told us."""
        for file in self._unread.pop(round_idx, ()):
            assert self.directory is not None
            if file not in self._packs:
                self._packs[file] = (round_idx, spans := _spans(self.directory / file))
                for name in spans:
                    self._where.setdefault((name, round_idx), []).append(file)


def _spans(path: Path) -> dict[str, tuple[int, int]]:
    """Where in a pack each client's state lies, up to the first that is damaged."""
    spans: dict[str, tuple[int, int]] = {}
    try:
        with open(path, "rb") as file:
            while mark := file.read(8):
                place, head = file.tell() - 8, file.read(*struct.unpack("<Q", mark))
                tensors = json.loads(head)
                ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
                end = file.seek(max(ends, default=0), os.SEEK_CUR)
                spans[str(about(mark + head)["client"])] = (place, end - place)
    except Exception:  # gone, or damaged, which makes the reader fail in a dozen ways
        return spans
    return spans
