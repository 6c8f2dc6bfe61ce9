"""The log of a node, in its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

_MOST_BYTES = 2**24  # size at which the log is rotated
_MOST_LINES = 2000  # maximum number of lines per entry


class NodeLog:
    """The file ``node.log``, readable for its user alone, and its predecessor ``node.log.1``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node.log"

    def write(self, text: str) -> None:
        """Append an entry with the time, without control characters.

        A failed write is ignored, because the outline of the error has already been printed.
        """
        lines = text.splitlines()[:_MOST_LINES]
        plain = "\n  ".join(
            "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line) for line in lines
        )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size > _MOST_BYTES:
                self.path.replace(self.path.with_name("node.log.1"))
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {plain}\n")
        except OSError:
            return
