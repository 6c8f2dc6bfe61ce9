"""The end of a run by the clock."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from typing_extensions import override

from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.errors import ConfigError


class Timer(Callback):
    """Ends the run after the round in which its time is over; time before a resume counts.

    Args:
        max_time: ``DD:HH:MM:SS``, or a ``timedelta``.

    Raises:
        ConfigError: For a text of another form.
    """

    def __init__(self, max_time: str | timedelta) -> None:
        try:
            if isinstance(max_time, str):
                days, hours, minutes, seconds = map(int, max_time.split(":"))
                max_time = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"trainer.max_time is {max_time!r}; it must be days, hours, minutes and seconds, such as '00:01:30:00'"
            ) from error
        self.limit_s = max_time.total_seconds()
        self.before_s = self.elapsed_s = 0.0
        self._began = 0.0

    def on_fit_start(self, run: Run) -> None:
        """Start the clock; a run whose time was over stays stopped."""
        self.before_s = self.elapsed_s = self.elapsed_s if run.start_round else 0.0
        self._began = time.monotonic()
        run.should_stop |= bool(run.start_round) and self.elapsed_s >= self.limit_s

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Look at the first process's clock."""
        self.elapsed_s = run.fabric.broadcast(self.before_s + time.monotonic() - self._began)
        if self.elapsed_s >= self.limit_s:
            run.should_stop = True
            run.fabric.print(f"stopped after round {record.round_idx}: trainer.max_time is over")

    def state_dict(self) -> dict[str, Any]:
        """The time so far."""
        return {"elapsed_s": self.elapsed_s}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.elapsed_s = state["elapsed_s"]
