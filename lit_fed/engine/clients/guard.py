"""A time limit for a client's work, and a report of the client at work to an outside process."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from lit_fed.checks import check_range
from lit_fed.errors import ClientTimeout, ConfigError, place_of

_LONGEST_S = 1e8  # three years; the system's timer has a limit beyond


class Guard:
    """Ends a client's work after a time limit.

    The system's timer raises in the main thread, where Python code runs: it interrupts sleeping, waiting for a worker
    or a device, and loops, but not a single operation that never returns to Python.

    Args:
        seconds: Time limit of one client's training in a round; None for no limit.
        tell: Called with a line on the client that begins to work, and with an empty one when it is done.
    """

    def __init__(self, seconds: float | None = None, tell: Callable[[str], None] | None = None) -> None:
        check_range("trainer.client_timeout", seconds, above=0, most=_LONGEST_S, why=" seconds", null="for no limit")
        self.seconds = seconds
        self.tell = tell
        self._armed = False

    @contextmanager
    def on_duty(self, data_parallel: bool) -> Iterator[None]:
        """Install the timer's handler around all clients' work.

        Args:
            data_parallel: Whether several processes train each client.
        """
        if self.seconds is None:
            yield
            return
        if data_parallel:
            raise ConfigError("trainer.client_timeout ends a client on one process only; use strategy=clients")
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            where = "on this system" if not hasattr(signal, "setitimer") else "outside of the main thread"
            raise ConfigError(f"trainer.client_timeout cannot be kept {where}; set it to null")
        before = signal.signal(signal.SIGALRM, self._ring)
        try:
            yield
        finally:
            signal.signal(signal.SIGALRM, before)

    def over(self, client_id: int, round_idx: int) -> AbstractContextManager[None]:
        """Limit one client's work.

        Raises:
            ClientTimeout: If the client does not finish in time.
        """
        return nullcontext() if self.seconds is None and self.tell is None else self._over(client_id, round_idx)

    @contextmanager
    def _over(self, client_id: int, round_idx: int) -> Iterator[None]:
        if self.tell is not None:
            self.tell(f"client {client_id} worked in round {round_idx}")
        try:
            if self.seconds is not None:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
            yield
        except _TimeIsUp as up:
            raise ClientTimeout(
                f"it did not finish within trainer.client_timeout of {self.seconds:g} s", str(up)
            ) from None
        finally:
            self._armed = False  # a late alarm is ignored
            if self.seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if self.tell is not None:
                self.tell("")

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise _TimeIsUp(place_of(traceback.extract_stack(frame)))


class _TimeIsUp(BaseException):
    """Not an `Exception`, which a client's own code may catch and retry."""
