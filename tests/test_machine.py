"""What this machine has for this process."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

# glibc's malloc.c: bit 1 of the word before a block tells that the kernel gave it, and gets it back when it is freed.
OWN = """
import ctypes, resource
import torch
from lit_fed.machine import keep_freed_memory

malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_size_t

def kernels(size):
    return bool(ctypes.c_size_t.from_address(malloc(size) - ctypes.sizeof(ctypes.c_size_t)).value & 2)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.zeros(2**18) for _ in range(128)]  # of 1 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{call}
half = 2**26 // resource.getpagesize()
print(kernels(30 * 2**20), faults() > half, faults() > half)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has other rules")
@pytest.mark.parametrize(("call", "told"), [("", "True .*"), ("keep_freed_memory()", "False .* False")])
def test_freed_memory_stays_with_the_process(call: str, told: str) -> None:
    run = subprocess.run([sys.executable, "-c", OWN.format(call=call)], check=True, capture_output=True, text=True)
    assert re.fullmatch(told, run.stdout.strip())


RELEASED = """
import os
from pathlib import Path
import torch
from lit_fed.machine import keep_freed_memory, release_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

keep_freed_memory()
blocks = [torch.zeros(2**18) for _ in range(128)]  # of 1 MiB
full = resident()
last = blocks.pop()  # at the end of the heap, below which all is free
del blocks
kept = resident()
release_freed_memory()
print(full - kept < 2**20, full - resident() > 120 * 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has other rules")
def test_freed_memory_is_released() -> None:
    run = subprocess.run([sys.executable, "-c", RELEASED], check=True, capture_output=True, text=True)
    assert run.stdout == "True True\n"


def test_every_benchmark_names_its_machine() -> None:
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    silent = [path.name for path, text in scripts.items() if "ArgumentParser(" in text and "machine.line()" not in text]
    assert silent == []
