"""Files that are read again when they change."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class Changes:
    """Notices changes of files, of which some may be absent."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self.files = list(map(Path, files))
        self._seen = self._stamps()

    def noticed(self) -> bool:
        """Return whether a file has changed since the last call."""
        before, self._seen = self._seen, self._stamps()
        return before != self._seen

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        stamps = {}
        for file in self.files:
            with suppress(OSError):
                stat = file.stat()
                stamps[file] = stat.st_mtime_ns, stat.st_size, stat.st_ino
        return stamps
