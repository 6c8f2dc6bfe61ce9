"""Cores, memory and garbage collection of this process."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT, _KEPT_BY_OLD = 2**30, 2**25  # bytes; old releases of glibc refuse to keep larger blocks

_LIMITS = (  # of a container: its limit, and its use
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def available_cores() -> int:
    """CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes() -> int:
    """Largest sensible number of processes: two per core, and at least four for experiments."""
    return max(4, 2 * available_cores())


def most_threads() -> int:
    """Largest number of threads: more than cores, to reproduce a larger machine's results."""
    return max(64, 4 * available_cores())


def free_memory() -> int | None:
    """Free memory of the machine and of the container, in bytes; None if unknown."""
    free = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        free.append(int(sizes["MemAvailable"].split()[0]) * 1024)
    for limit, used in _LIMITS:
        if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
            free.append(int(text) - int(used.read_text(encoding="ascii")))
    return min(free, default=None)


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to 1 GiB, of which it keeps at most 1 GiB.

    By default glibc returns large blocks, and more than 128 KiB at the end of its heap, to the kernel: mallopt(3). The
    next step's tensors then cost a page fault per 4 KiB. Other allocators are not affected.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # not in musl
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT):
            mallopt(_M_MMAP_THRESHOLD, _KEPT_BY_OLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def release_freed_memory() -> None:
    """Return to the kernel what glibc has kept of freed blocks: malloc_trim(3); milliseconds for each GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # not in musl
        trim(0)


_YOUNG = 10_000  # allocations between GC passes


@contextmanager
def settled() -> Iterator[None]:
    """Freeze existing objects so that the GC scans only the rounds' objects.

    A cohort has many small objects that live as long as their group: Python's threshold of 700 allocations would scan
    them, and all modules, again and again.
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
