"""What this machine has for this process: cores and memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_KEPT = 31 * 2**20  # bytes; 32 MiB is the most that glibc learns

_LIMITS = (  # of a container: what it may have, and what it uses
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """How many processes make sense here: two a core, and four to try things out."""
    return max(4, 2 * available_cores())


def most_threads() -> int:
    """How many threads a process can have here: more than cores, to repeat what a larger machine computed."""
    return max(64, 4 * available_cores())


def free_memory() -> int | None:
    """The bytes that can still be had, of the machine and of the container; None where nobody says."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        found.append(int(sizes["MemAvailable"].split()[0]) * 1024)
    for limit, used in _LIMITS:
        if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
            found.append(int(text) - int(used.read_text(encoding="ascii")))
    return min(found, default=None)


def keep_freed_memory() -> None:
    """Let this process keep blocks of up to 31 MiB that it frees, for the next step to use.

    glibc hands a larger block than its threshold back to the kernel, and the next step's activations then cost a page
    fault for every 4 KiB. The threshold rises to the size of the largest block that was ever freed, which is all that
    happens here: mallopt(3), M_MMAP_THRESHOLD. Under another allocator nothing changes.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


_YOUNG = 10_000  # so many new objects are searched at a time


@contextmanager
def settled() -> Iterator[None]:
    """Take what is there already for lasting: the collector of cycles then searches only what rounds make.

    A cohort's clients are many small objects that live as long as their group: every 700 of them, which is Python's
    threshold, would have them searched, and every few thousand all modules too.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    if 0 < thresholds[0] < _YOUNG:
        gc.set_threshold(_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
