"""Append-only files of JSON lines, each with the SHA-256 of the line before, so that a later change is found.

A line is one JSON object with sorted keys, in ASCII. Its ``previous`` is the hash of the bytes of the line before, the
newline included: ``sed -n 5p FILE | sha256sum`` prints the ``previous`` of line 6. The first line's is 64 zeros. A line
that a kill tore stays, and the next line holds the hash of its bytes as ``torn``. A full ``log.jsonl`` becomes
``log.1.jsonl``, then ``log.2.jsonl``, and the new file goes on from its last hash. Where the oldest files are deleted
then, the new file's first line holds the last hash of the deleted lines as ``forgotten``.

Note:
    Whoever may write the files can write the whole chain anew, or cut off its end, which only a hash that is noted
    elsewhere shows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from lit_fed.engine.storage.files import cannot_write, unreadable_named

BEGIN = "0" * 64
"""The ``previous`` of the first line."""


class ChainReading:
    """The whole lines of a chain with their hashes, by iteration; once it ends, all attributes are known.

    Args:
        path: The newest file.
        files: Some files of the chain, the oldest first; all by default.

    Attributes:
        faults: Lines that do not follow the line before.
        torn: Lines that a kill tore.
        last: Hash of the last whole line.
        rest: The bytes after it.
        is_cut: Whether the last line lacks its newline.

    Raises:
        UnreadableFile: If a file cannot be read.
    """

    def __init__(self, path: Path, files: Sequence[Path] | None = None) -> None:
        self.files = files_of(path) if files is None else files
        self.faults: list[str] = []
        self.torn: list[str] = []
        self.last, self.rest, self.is_cut = BEGIN, b"", False

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        first, before, begin, forgotten = "", "", BEGIN, {BEGIN}
        for where, line in self._raw():
            if (content := _parsed(line)) is None:
                self.rest, before = self.rest + line, where
                self.torn.append(where)
                continue
            if not first:
                first, begin, self.last = where, content["previous"], content["previous"]
            links = content["previous"], content.get("torn")
            if links != (self.last, _hash(self.rest) if self.rest else None):
                self.faults.append(f"{where} does not follow {before or 'what is before it'}")
            forgotten.add(str(content.get("forgotten")))
            self.last, self.rest, before = _hash(line), b"", where
            yield self.last, content
        if begin not in forgotten:
            self.faults.insert(0, f"the lines before {first} were removed, and not by rotation")

    def to_the_end(self) -> ChainReading:
        """Read everything, for the attributes alone."""
        for _ in self:
            pass
        return self

    def _raw(self) -> Iterator[tuple[str, bytes]]:
        """Yield the place and the bytes of every line; a line without its newline is given one."""
        for file in self.files:
            with unreadable_named(file), open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    self.is_cut = not line.endswith(b"\n")
                    yield f"{file.name}, line {number}", line + b"\n" * self.is_cut


class Chain:
    """The end of a chain, to which its only writer appends.

    Args:
        path: The newest file; new files are readable for their user only.
        most_bytes: Size from which a new file is begun; None for a single file.
        most_files: Number of full files that are kept.

    Attributes:
        faults: Lines that did not follow the line before when the chain was opened.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, most_files: int = 8) -> None:
        self.path, self.most_bytes, self.most_files = path, most_bytes, most_files
        self._lock = Lock()
        self._last, self._rest, self._is_cut = BEGIN, b"", False
        self.faults = self._resume().faults

    def append(self, content: Mapping[str, Any], lasting: bool = False) -> str:
        """Write a line; it then survives a kill, and a loss of power if it is ``lasting``, which takes a flush to disk.

        Raises:
            CheckpointError: If the disk is full or the file is not writable; the chain goes on after it.
        """
        with self._lock, cannot_write(self.path):
            links = {"previous": self._last} | ({"torn": _hash(self._rest)} if self._rest else {})
            if gone := self._rotate():
                links["forgotten"] = ChainReading(self.path, gone).to_the_end().last
            line = json.dumps({**content, **links}, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
            try:
                with open(self.path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(b"\n" * self._is_cut + line.encode())
                    file.flush()
                    if lasting:
                        os.fsync(file.fileno())
            except BaseException:  # a signal's too, after which the line may be in the file
                self._resume()
                raise
            self._last, self._rest, self._is_cut = _hash(line.encode()), b"", False
            for old in gone:
                old.unlink(missing_ok=True)
        return line

    def _resume(self) -> ChainReading:
        """Read where the files end."""
        found = ChainReading(self.path).to_the_end()
        self._last, self._rest, self._is_cut = found.last, found.rest, found.is_cut
        return found

    def _rotate(self) -> Sequence[Path]:
        """Put a full file aside; return the oldest files if a new one begins, which is to tell of them."""
        is_full = self.path.exists() and self.path.stat().st_size >= (self.most_bytes or float("inf"))
        if is_full and not self._is_cut:
            number = 1 + max((int(file.suffixes[-2][1:]) for file in files_of(self.path)[:-1]), default=0)
            self.path.rename(self.path.with_suffix(f".{number}{self.path.suffix}"))
        return [] if self.path.exists() else files_of(self.path)[: -self.most_files]


def files_of(path: Path) -> list[Path]:
    """The files of a chain, the oldest first."""
    of_chain = re.compile(rf"{re.escape(path.stem)}\.([0-9]{{1,9}}){re.escape(path.suffix)}")
    full = {int(match[1]): file for file in path.parent.glob("*") if (match := of_chain.fullmatch(file.name))}
    return [file for _, file in sorted(full.items())] + ([path] if path.exists() else [])


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The content of a whole line; None if it is not one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("previous"), str) else None


def _hash(line: bytes) -> str:
    return sha256(line).hexdigest()
