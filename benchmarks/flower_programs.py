"""Flower's own programs, as ``benchmarks/federation_peer.py`` starts them beside ours."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def program(name: str) -> str:
    """Where one of them is: beside this Python."""
    return str(Path(sys.executable).parent / name)


def environment(home: Path) -> dict[str, str]:
    """In which they run: nothing is told to anybody, nothing fetched."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # they start each other
    return os.environ | _QUIET | {"FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1", "PATH": path}


@contextmanager
def running(words: Sequence[str], home: Path) -> Iterator[None]:
    """One of them, for a while; what it says is in its folder."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / f"{words[0]}.log", "wb") as log:
        process = subprocess.Popen(
            [program(words[0]), *words[1:]],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(home), start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(address: str, seconds: float) -> None:
    """Wait until somebody listens at an address."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        if time.monotonic() > end:
            sys.exit(f"nobody listens at {address}")
        time.sleep(0.1)


def connection(address: str, home: Path) -> str:
    """Write down, for Flower's own command line, how a SuperLink is reached; the name under which it stands."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(f'[superlink.peer]\naddress = "{address}"\ninsecure = true\n', encoding="utf-8")
    return "peer"
