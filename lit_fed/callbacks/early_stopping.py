"""Early stopping by a metric."""

from __future__ import annotations

import math
from typing import Any, Literal

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.loop.run import Callback, RoundRecord, Run
from lit_fed.errors import ConfigError
from lit_fed.patterns import unknown_name
from lit_fed.printing import counted

Mode = Literal["auto", "max", "min"]


def improves(value: float, best: float | None, mode: Direction, min_delta: float = 0.0) -> bool:
    """Whether a value beats the best by more than ``min_delta``; False for NaN."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best + min_delta if mode == "max" else value < best - min_delta


def direction_of(run: Run, monitor: str, mode: Mode) -> Direction:
    """The better direction of a metric; ``auto`` takes the run's."""
    return run.names.direction(monitor) if mode == "auto" else mode


def is_of_another(run: Run, what: str, best: float | None, by: str | None, monitor: str) -> bool:
    """Whether the best value is of another metric, as after a resume with another monitor; say so."""
    if best is None or by == monitor:
        return False
    run.tell(f"{what} was chosen by {by or 'a metric that the checkpoint does not name'} so far; {monitor} begins anew")
    return True


def check_reported(key: str, monitor: str, run: Run, record: RoundRecord) -> None:
    """Refuse a metric that the round was due to report and did not.

    Args:
        key: The setting that names the metric.
        monitor: Its name.
        run: The run.
        record: The round's record.
    """
    metrics = record.metrics
    evaluated = "time/eval_s" in metrics or not run.settings.evaluate_every
    trained = any(name.startswith("train/") for name in metrics)  # false in a round without available clients
    if monitor not in metrics and evaluated and (trained or not monitor.startswith("train/")):
        known = [name for name in metrics if not name.startswith(("time/", "comm/"))]
        raise unknown_name(key, monitor, "metric of this run is called so", known)


class EarlyStopping(Callback):
    """Ends the run after some evaluations without an improvement of a metric.

    Args:
        monitor: Name of the metric, such as ``global/acc``; ``auto`` takes the first metric that the task declares (its
            ``metrics``), else that of its first call of ``self.log`` in an evaluation, on validation data where there
            are any (``val/global/acc``).
        mode: ``max``, ``min``, or ``auto``: the direction that the task or the logged torchmetrics object declares,
            else ``min`` if the name contains loss or error, and ``max`` for any other name.
        patience: Evaluations without an improvement that are tolerated.
        min_delta: Smallest improvement that counts, exclusive.

    Raises:
        ConfigError: For invalid settings, before training for a metric that no protocol has, and at the first
            evaluation that does not report another one, such as a method's.
    """

    monitor: str  # never None, unlike that of a callback that does not choose

    def __init__(self, monitor: str = "auto", mode: Mode = "auto", patience: int = 10, min_delta: float = 0.0) -> None:
        self.patience = check_range("EarlyStopping.patience", patience, least=1)
        self.min_delta = check_range("EarlyStopping.min_delta", min_delta, least=0)
        self.mode: Mode = mode
        self.monitor = monitor
        self.best: float | None = None
        self.best_round = -1
        self.waited = 0
        self.by: str | None = None  # the metric of `best`

    def on_fit_start(self, run: Run) -> None:
        """Keep a stopped run stopped when it is resumed."""
        run.names.choose(self.monitor, self.mode)
        if not run.start_round:
            self.best, self.best_round, self.waited, self.by = None, -1, 0, None
        elif self.waited >= self.patience and run.start_round < run.max_rounds:
            run.fabric.print(
                f"the run had stopped early after {self.waited} evaluations without an improvement; raise "
                "EarlyStopping.patience to continue"
            )
        run.should_stop |= self.waited >= self.patience

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Count evaluations without an improvement."""
        monitor = self._name(run, record)
        value = None if monitor is None else record.metrics.get(monitor)
        if monitor is None or value is None:
            return
        if is_of_another(run, "the best round of EarlyStopping", self.best, self.by, monitor):
            self.best, self.best_round, self.waited = None, -1, 0
        self.by = monitor
        if improves(value, self.best, direction_of(run, monitor, self.mode), self.min_delta):
            self.best, self.best_round, self.waited = value, record.round_idx, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            run.should_stop = True
            if record.round_idx + 1 < run.max_rounds:
                run.fabric.print(self._reason(run, monitor, record.round_idx))

    def _name(self, run: Run, record: RoundRecord) -> str | None:
        """The metric of this round; None before the first evaluation."""
        if self.monitor != "auto":
            if self.best is None and not self.waited:
                check_reported("EarlyStopping.monitor", self.monitor, run, record)
            return self.monitor
        if run.names.choice is None and ("time/eval_s" in record.metrics or not run.settings.evaluate_every):
            raise ConfigError(
                "EarlyStopping.monitor is 'auto', and no evaluation of this run reports a metric; name one, such as "
                "train/loss"
            )
        return run.names.choice

    def _reason(self, run: Run, monitor: str, round_idx: int) -> str:
        moved = "risen" if direction_of(run, monitor, self.mode) == "max" else "fallen"
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best = (
            "it was never a number" if self.best is None else f"its best was {self.best:.6g} in round {self.best_round}"
        )
        times = counted(self.waited, "evaluation")
        return f"stopped early after round {round_idx}: {monitor} has not {moved}{least} in {times}; {best}"

    def state_dict(self) -> dict[str, Any]:
        """The best value, its round and metric, and the evaluations since."""
        return {"best": self.best, "best_round": self.best_round, "waited": self.waited, "by": self.by}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_round, self.waited = state["best"], state["best_round"], state["waited"]
        self.by = state.get("by")
