"""When a round has ended, what has crossed loopback by then, and the memory of the process that says so."""

from __future__ import annotations

import json
import time
from pathlib import Path


def mark(path: str) -> None:
    """Add a line to a file: seconds, bytes and kB."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (crossed,) = (int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))
    memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps([time.time(), crossed, int(memory.split()[1])]) + "\n")
