"""The end of a run without an error: stopped or killed from outside, crashed, or ended by ``sys.exit``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lit_fed.errors import place_of

JUDGED = "LIT_FED_JUDGED"
"""Environment variable set by a parent that judges a service by its status: an end by SIGTERM is then no success."""

_PATIENCE_S = 10  # for a witness that was itself stopped

# Reads the run's pipe until its end. Ignores the signals that end the run, which reach the whole process group.
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
print(f"lit-fed: error: process {sys.argv[1]} ended without a message{what}: it was killed, as for memory, it crashed, "
      f"or your own code called os._exit{sys.argv[2]}", file=sys.stderr)
"""


def is_first() -> bool:
    """Whether this process is the first of a run's, which alone prints."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")  # not imported by a light command
    return not getattr(getattr(lightning, "rank_zero_only", None), "rank", 0)


@contextmanager
def witness(advice: str = "") -> Iterator[Callable[[str], None]]:
    """A small process that outlives this one and reports its death.

    Args:
        advice: End of the report: what to do.

    Yields:
        A function that tells the witness the current work.
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
        with suppress(OSError):  # the witness was killed
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


class Terminated(KeyboardInterrupt):
    """A signal, its argument, that stops the process, which ends as after Ctrl-C: with whole files and free locks."""


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated`, unless somebody handles or, as ``nohup`` does, ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]

    def handle(action: Any) -> None:
        for one in ours:
            signal.signal(one, action)

    def end(number: int, _: object) -> None:
        handle(signal.SIG_IGN)  # a second one does not disturb the end, up to that of the interpreter
        raise Terminated(number)

    handle(end)
    try:
        yield
    finally:
        if ours and signal.getsignal(ours[0]) is end:
            handle(signal.SIG_DFL)


@contextmanager
def exit_reported() -> Iterator[None]:
    """Report where ``sys.exit`` was called; silence TensorBoard's thread, whose errors the main thread raises too."""
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
    """Whether a thread writes TensorBoard's events."""
    return type(thread).__module__.startswith("tensorboard.")
