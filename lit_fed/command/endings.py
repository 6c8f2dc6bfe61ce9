"""How a run is told of that ends in another way than by an error: from outside, or by code that ends the program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lit_fed.errors import place_of

_PATIENCE_S = 10  # with a witness that was itself stopped

# Reads what the run says until it says no more. Signals that end the run must not end it first.
_WITNESS = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
last = ""
for line in sys.stdin:
    last = line.strip()
    if last == "ended":
        sys.exit()
what = " while " + last if last else ""
print(f"lit-fed: error: process {sys.argv[1]} ended without a word{what}: it was killed, as for memory, it crashed, or"
      f" code of its own called os._exit{sys.argv[2]}", file=sys.stderr)
"""


@contextmanager
def witness(advice: str = "") -> Iterator[Callable[[str], None]]:
    """A small process that outlives this one and tells of its end, where this one no longer can.

    Args:
        advice: What to do then.

    Yields:
        What tells it what is being done.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WITNESS, str(os.getpid()), advice and f"; {advice}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    pipe = process.stdin
    assert pipe is not None
    if hasattr(os, "register_at_fork"):  # a data worker that outlives this process would keep the witness waiting
        os.register_at_fork(after_in_child=lambda: _close(pipe.fileno()) if not pipe.closed else None)

    def tell(doing: str) -> None:
        with suppress(OSError):  # it was killed: there is nobody to tell
            pipe.write(f"{doing}\n")
            pipe.flush()

    try:
        yield tell
    finally:
        tell("ended")
        with suppress(OSError):
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


@contextmanager
def ending_told() -> Iterator[None]:
    """Say where ``sys.exit`` was called, and keep to a line what a thread's error says of a full disk."""
    before = threading.excepthook
    threading.excepthook = lambda args: None if _is_tensorboards(args.thread) else before(args)
    try:
        yield
    except SystemExit as stop:
        code, place = "" if stop.code is None else stop.code, place_of(traceback.extract_tb(stop.__traceback__))
        print(f"lit-fed: the run was ended by sys.exit({code}) in {place}", file=sys.stderr)
        raise
    finally:
        threading.excepthook = before


def _is_tensorboards(thread: threading.Thread | None) -> bool:
    """Whether it writes events: what ends it is raised in the main thread too, with the file's name."""
    return type(thread).__module__.startswith("tensorboard.")
