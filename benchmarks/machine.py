"""The machine behind a table, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def caches() -> str:
    """The data caches of the first core, such as ``L1 32K, L2 1024K, L3 32768K``."""
    found = []
    for index in sorted(CPU.glob("index*")):
        kind, level, size = ((index / name).read_text(encoding="ascii").strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found) or "unknown"


def line() -> str:
    """Processor, caches, cores, load and versions, for the end of a table."""
    return (
        f"{model()} ({os.cpu_count()} cores, {caches()}), load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} "
        f"thread(s), torch {torch.__version__}, Python {platform.python_version()}"
    )
