"""What this machine has for this process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# glibc's malloc.c: bit 1 of the word before a block tells that the kernel gave it, and gets it back when it is freed.
OWN = """
import ctypes
from lit_fed.machine import keep_freed_memory

malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_size_t

def kernels(size):
    return bool(ctypes.c_size_t.from_address(malloc(size) - ctypes.sizeof(ctypes.c_size_t)).value & 2)

{call}
print(kernels(30 * 2**20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has other rules")
@pytest.mark.parametrize(("call", "kernels"), [("", "True"), ("keep_freed_memory()", "False")])
def test_blocks_of_up_to_31_mib_stay_with_the_process(call: str, kernels: str) -> None:
    run = subprocess.run([sys.executable, "-c", OWN.format(call=call)], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == kernels
