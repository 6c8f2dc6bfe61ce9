"""Flower's own programs as processes beside ours, which never outlive it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType

from lit_fed.errors import ConfigError, ProcessLost

_PATIENCE_S = 10  # with a program that is told to end
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
_PR_SET_PDEATHSIG = 1
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Program:
    """One of Flower's programs at work.

    Args:
        words: Its name and options.
        home: Flower's folder, where it also writes what it says.
    """

    def __init__(self, words: Sequence[str], home: Path) -> None:
        self.name = words[0]
        self.log = home / f"{self.name}.log"
        home.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [program(self.name), *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(home),
                start_new_session=True,  # Ctrl-C is ours to pass on, to it and all that it started
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def check(self) -> None:
        """Tell of its end.

        Raises:
            ProcessLost: If it has ended by itself; with the last of what it said.
        """
        if (status := self.process.poll()) is None:
            return
        if status < 0:
            raise ProcessLost(f"{self.name} was killed by signal {-status}; what it said is in {self.log}")
        raise ProcessLost(f"{self.name} ended with status {status}: {self.last_words()}; all it said is in {self.log}")

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        """The last error with what it says of itself, or the last line that says something."""
        lines = [line.strip() for line in self._text().splitlines()]
        errors = [place for place, line in enumerate(lines) if "ERROR" in line or "Error" in line]
        if not errors:
            return next((line for line in reversed(lines) if any(map(str.isalpha, line))), "nothing")[:300]
        more = takewhile(lambda line: line and not line.startswith("INFO"), lines[errors[-1] + 1 :])
        return " ".join([lines[errors[-1]], *more])[:300]

    def end(self) -> None:
        """End it, and whatever it has started."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _text(self) -> str:
        return COLOUR.sub("", self.log.read_text(encoding="utf-8", errors="replace"))


@contextmanager
def running(words: Sequence[str], home: Path) -> Iterator[Program]:
    """A program, for a while."""
    made = Program(words, home)
    try:
        yield made
    finally:
        made.end()


def program(name: str) -> str:
    """Where a program of Flower's is.

    Raises:
        ConfigError: If it is not installed beside this Python.
    """
    path = Path(sys.executable).parent / name
    if importlib.util.find_spec("flwr") is None or not path.is_file():
        raise ConfigError(
            "a federation over several machines needs flwr, which is not installed; "
            "pip install -c requirements/flower.txt 'lit-fed[flower]'"
        )
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """In which its programs run: nothing is told to anybody, nothing fetched."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # they start each other
    return os.environ | _QUIET | {"FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1", "PATH": path}


def wait_for(address: str, seconds: float, process: Program | None = None) -> None:
    """Wait until somebody listens at an address.

    Raises:
        ConfigError: If nobody does, after a time.
        ProcessLost: If the program that was to listen has ended.
    """
    host, port = split_address(address)
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        if process is not None:
            process.check()
        if time.monotonic() > end:
            raise ConfigError(f"nobody listens at {address}; start the server, or correct --superlink")
        time.sleep(0.1)


def check_free(address: str) -> None:
    """Refuse an address at which this program cannot listen.

    Raises:
        ConfigError: If somebody else does, or it is not of this machine.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(place)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"the server cannot listen at {address}: {why}; choose another --superlink") from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: If it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--superlink is {address!r}; it must be a host and a port, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address never leaves this machine."""
    host = split_address(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does, so that it ends what it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, _interrupt) for one in wanted]
    try:
        yield
    finally:
        for one, handler in zip(wanted, before, strict=True):
            signal.signal(one, handler)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does; SIGINT itself is ignored where a shell started this program in the background."""
    raise KeyboardInterrupt


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Where this program is killed, what it has started is told to end."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
