"""What this machine has for this process."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_fed import machine
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


def test_the_last_level_cache_is_that_of_the_cores_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = {0: [("Data", 1, "32K"), ("Instruction", 1, "64K"), ("Unified", 3, "16384K"), ("Unified", 2, "1M")]}
    caches[1] = [("Unified", 2, "2M")]
    caches[2] = [("Unified", 4, "1K")]  # of a core that others use
    for core, found in caches.items():
        for idx, values in enumerate(found):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{idx}"
            folder.mkdir(parents=True)
            for name, value in zip(("type", "level", "size"), values, strict=True):
                (folder / name).write_text(f"{value}\n", encoding="ascii")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    for cores, expected in (({0}, 2**24), ({0, 1}, 2**21), ({3}, 2**25)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: cores, raising=False)
        assert machine.last_level_cache() == expected
    (tmp_path / "cpu1" / "cache" / "index0" / "size").write_text("large", encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1}, raising=False)
    assert machine.last_level_cache() == 2**25


def test_every_benchmark_names_its_machine() -> None:
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    silent = [path.name for path, text in scripts.items() if "ArgumentParser(" in text and "machine.line()" not in text]
    assert silent == []
