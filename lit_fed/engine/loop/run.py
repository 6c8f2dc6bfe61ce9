"""The state of a run and its listeners: parts, progress, place of its files, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import Fabric
from lightning.pytorch.loggers import Logger

from lit_fed.arguments import Checked
from lit_fed.engine.clients.executor import Failures
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import ClientRow, EvalSubset, Evaluation
from lit_fed.engine.lightning.metric_names import MetricNames, base_name
from lit_fed.engine.loop.settings import RunSettings
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.updates import Updates
from lit_fed.engine.wire.workers import Workers
from lit_fed.participation import Participant


@dataclass(slots=True)
class Run:
    """A run under way.

    Args:
        federation: Its parts.
        settings: Rounds, evaluation and output.
        callbacks: Listeners, in order.
        start_round: First round of this process; above 0 after a resume.
        next_round: The coming round, which equals the number of finished rounds.
        metrics: Metrics of the last round.
        should_stop: Set it to end the run after this round.
        log_dir: The run's folder.
        folder: The same, once training has claimed it; None before. ``last`` and ``best`` mean its checkpoints.
        loaded: The checkpoint whose state a test or a prediction has loaded into a run that has not trained, and from
            which training would go on.
        resumed_from: Folder of the run that this run continues, if it is a different one.
        origin: Source of the current state, in words.
        loggers: The run's loggers, on the first process.
        failures: Tolerated failures.
        statements: Further fields of the round's line in the record, such as signatures of remote clients.
        line: SHA-256 of the record's last line; empty without a record.
        alert: Prints a line about a failure; `Fabric.print` unless a callback has set another.
    """

    federation: Federation
    settings: RunSettings
    callbacks: Sequence[Callback]
    start_round: int = 0
    next_round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    should_stop: bool = False
    log_dir: Path = field(default_factory=Path)
    folder: Path | None = None
    loaded: Path | None = None
    resumed_from: Path | None = None
    origin: str = ""
    loggers: list[Logger] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    statements: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    alert: Callable[[str], object] = field(init=False)
    _listeners: dict[str, list[Callable[..., None]]] = field(default_factory=dict)
    _printed_lines: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.alert = self.fabric.print

    @property
    def fabric(self) -> Fabric:
        """Devices and processes."""
        return self.federation.fabric

    @property
    def workers(self) -> Workers:
        """The processes over which clients are spread."""
        return self.federation.workers

    @property
    def names(self) -> MetricNames:
        """Directions of metrics, and the metric that chooses the best round."""
        return self.federation.names

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a callback writes checkpoints."""
        return any(callback.keeps_checkpoints for callback in self.callbacks)

    @property
    def withholds(self) -> bool:
        """Whether files and loggers get nothing of single clients, of sums over them, or of who took part."""
        return self.federation.wrappers.withhold

    @property
    def max_rounds(self) -> int:
        """Total number of rounds."""
        return self.settings.max_rounds

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that overrides it."""
        for listener in self.listeners(hook):
            listener(self, *args)

    def listeners(self, hook: str) -> list[Callable[..., None]]:
        """The overridden hooks of the callbacks."""
        if hook not in self._listeners:
            self._listeners[hook] = [getattr(callback, hook) for callback in self.callbacks if callback.listens(hook)]
        return self._listeners[hook]

    def call_each(self, hook: str, updates: Updates) -> None:
        """Call a hook of every callback that overrides it for one update after the other."""
        if self.listeners(hook):
            for update in updates:
                self.call(hook, update)

    def is_due(self, done: int) -> bool:
        """Whether the protocols run after ``done`` rounds."""
        every = self.settings.evaluate_every
        return bool(every) and (done == self.max_rounds or done % every == 0)

    def learn_names(self, metrics: Mapping[str, float]) -> None:
        """Record the names of metrics, and their directions as the task declares them."""
        for loop in self.federation.session.loops.values():
            self.names.observe(loop.directions)
        self.names.see(metrics)

    def tell_absent(self, evaluation: Evaluation) -> None:
        """Print once which protocols and declared metrics report nothing."""
        for name, why in evaluation.absent.items():
            self.tell(f"there are no metrics {name}/…: {why}")
        reported = {base_name(name) for name in evaluation.metrics}
        if reported and (lacking := sorted(self.names.promised - reported)):
            first, *more = lacking
            self.tell(
                f"the model declares {len(lacking)} metrics that no evaluation reports: {', '.join(lacking)}"
                if more
                else f"the model declares a metric {first}, and no evaluation reports it"
            )

    def tell(self, line: str) -> None:
        """Print a line once."""
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self.fabric.print(line)


_SHARED = ("global", "privacy/", "time/eval_s")  # times of training tell how many clients took part


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A finished round; the same on every process.

    Args:
        round_idx: The round, counted from 0.
        metrics: Values by name, such as ``global/acc``.
        rows: Values of single clients.
        plan: The selected clients, and the fate of their work.
    """

    round_idx: int
    metrics: dict[str, float]
    rows: list[ClientRow]
    plan: Sequence[Participant]

    def withheld(self, evaluated_on: EvalSubset) -> RoundRecord:
        """The record of the global model on the shared test set, without clients, sums over them, or the cohort.

        Args:
            evaluated_on: Validation data are the clients' own, so that no metric on them is told.
        """
        shared = _SHARED if evaluated_on == "test" else _SHARED[1:]
        shared_metrics = {name: value for name, value in self.metrics.items() if name.startswith(shared)}
        return RoundRecord(self.round_idx, shared_metrics, [], [])


class Callback(Checked):
    """Base class of listeners: override the hooks you need.

    Hooks run on every process, in the order of ``trainer.callbacks``.
    """

    monitor: str | None = None
    """The metric by which the callback chooses a round: a name, ``auto`` for the run's choice; None if it does not."""

    keeps_checkpoints = False
    """Whether the callback writes checkpoints, and so decides which client states are still needed."""

    keeps_record = False
    """Whether the callback writes the run's record, for which remote clients sign what they send."""

    tells_of_clients = False
    """Whether its state tells of clients' data, which a private run keeps beside the clients' states."""

    def listens(self, hook: str) -> bool:
        """Whether the callback overrides a hook."""
        return getattr(type(self), hook) is not getattr(Callback, hook)

    def on_fit_start(self, run: Run) -> None:
        """Called after set-up, with any checkpoint loaded; ``run.start_round`` is known."""

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Called when the cohort is drawn, before any training."""

    def on_broadcast(self, run: Run, broadcast: Broadcast) -> None:
        """Called with the round's message as clients receive it, before any training; its tensors are read-only."""

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        """Called for each client of this process; the update's tensors are valid until the next call.

        Small updates of several clients go on together: others may have trained since.
        """

    def on_arrival(self, run: Run, update: ClientUpdate) -> None:
        """Called for each update that arrives at this process, as it came out of the uplink's codec.

        Its tensors are valid until the next one arrives. An update from the round before has no `on_client_end` here.
        """

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        """Called after the server's step, before the protocols run."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Called after evaluation. The last callback, `Checkpoint`, writes the round's checkpoint."""

    def on_fit_end(self, run: Run) -> None:
        """Called after the last round."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when the run ends early; the error is raised again afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
