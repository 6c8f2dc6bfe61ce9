"""Stop when a metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from lit_fed.engine.callback import Callback, RoundRecord
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.engine.run import Run


def improves(value: float, best: float | None, mode: Literal["max", "min"], min_delta: float = 0.0) -> bool:
    """Whether a value beats the best so far by more than ``min_delta``; NaN never does."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best + min_delta if mode == "max" else value < best - min_delta


def unknown_metric(callback: str, monitor: str, record: RoundRecord) -> str:
    """What to tell a user who monitors a metric that a run does not report."""
    known = ", ".join(name for name in record.metrics if not name.startswith(("time/", "comm/")))
    return f"{callback}.monitor {monitor!r} is not a metric of this run; there are {known}"


class EarlyStopping(Callback):
    """Ends the run once a metric has not improved for some evaluations.

    Args:
        monitor: Name of the metric, such as ``global/acc``.
        mode: ``max`` or ``min``.
        patience: Evaluations without an improvement that are tolerated.
        min_delta: What counts as an improvement must exceed this.

    Raises:
        ConfigError: For a patience below 1, and during the run if the metric is never reported.
    """

    def __init__(
        self,
        monitor: str = "global/acc",
        mode: Literal["max", "min"] = "max",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStopping.patience is {patience}; it must be at least 1")
        self.monitor = monitor
        self.mode: Literal["max", "min"] = mode
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.waited = 0

    def on_fit_start(self, run: Run) -> None:
        """A run that had stopped stays stopped when it is resumed."""
        if not run.start_round:
            self.best, self.waited = None, 0
        run.should_stop |= self.waited >= self.patience

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Count evaluations without an improvement."""
        if self.monitor not in record.metrics:
            if "time/eval_s" in record.metrics:
                raise ConfigError(unknown_metric("EarlyStopping", self.monitor, record))
            return
        value = record.metrics[self.monitor]
        if improves(value, self.best, self.mode, self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        run.should_stop |= self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long it has stood."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.best, self.waited = state["best"], state["waited"]
