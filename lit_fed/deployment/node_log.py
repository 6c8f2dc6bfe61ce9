"""The log of a node: what has gone wrong there, in full, which nobody else is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

_MOST_BYTES = 2**24  # until the log is begun anew; the one before it is kept
_MOST_LINES = 2000  # of one entry


class NodeLog:
    """A file that its user alone can read, ``node.log``, and ``node.log.1`` with what was written before.

    Args:
        folder: Where it lies; it is made with the first entry.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node.log"

    def write(self, text: str) -> None:
        """Add an entry: with the time, and without characters that a terminal would obey.

        A log that cannot be written is no reason to stop: what it would say has been printed in short.
        """
        lines = text.splitlines()[:_MOST_LINES]
        plain = "\n  ".join("".join(one if one.isprintable() else ascii(one)[1:-1] for one in line) for line in lines)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size > _MOST_BYTES:
                self.path.replace(self.path.with_name("node.log.1"))
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain}\n")
        except OSError:
            return
