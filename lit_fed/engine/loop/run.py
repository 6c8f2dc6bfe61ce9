"""What a run knows, and what callbacks and checkpoints are handed: its parts, how far it is, where its files lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from typing import Protocol as Interface

from lightning import Fabric
from lightning.pytorch.loggers import Logger

from lit_fed.engine.clients.failures import Failures
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import EvalSubset, Evaluation, Protocol
from lit_fed.engine.lightning.metric_names import MetricNames, base_name
from lit_fed.engine.wire.workers import Workers


class Listener(Interface):
    """What a run asks of a callback: `lit_fed.engine.loop.callback.Callback`."""

    keeps_checkpoints: bool

    def listens(self, hook: str) -> bool:
        """Whether it has a hook of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives to keep in checkpoints."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is told.

    Args:
        max_rounds: Rounds in all, those before a resume counted in.
        seed: All randomness of the run follows from it.
        evaluate_every: Run the protocols every so many rounds and after the last; 0 for never.
        evaluate_on: Which data they run on.
        protocols: What to evaluate.
        on_client_failure: ``raise`` stops the run with the client's id, ``skip`` goes on without its update.
        logs: The folder of all runs.
        logger: True for TensorBoard, False for none, or Lightning loggers.
        config: The resolved configuration as YAML, where the command line started the run; else empty.
        told: The keys of it that somebody asked for, without ``init_args``, what was said last first.
    """

    max_rounds: int
    seed: int
    evaluate_every: int
    evaluate_on: EvalSubset
    protocols: Sequence[Protocol]
    on_client_failure: Literal["raise", "skip"]
    logs: Path
    logger: bool | Logger | list[Logger]
    config: str = ""
    told: tuple[str, ...] = ()


@dataclass(slots=True)
class Run:
    """One run under way.

    Args:
        federation: Its parts.
        settings: What it was told.
        callbacks: Who listens, in order.
        start_round: The round it started from, after a resume the first one of this process.
        next_round: The round that comes next, which is the number of rounds that are over.
        metrics: What the last round gave.
        should_stop: Set it to end the run after this round.
        log_dir: The run's folder.
        resumed_from: The folder of the run it continues, where it is another's.
        origin: Where the state that it holds comes from, in words.
        loggers: The run's loggers, on the first process.
        names: Which metric is better which way, and which one names the best round.
        failures: What was tolerated.
    """

    federation: Federation
    settings: RunSettings
    callbacks: Sequence[Listener]
    start_round: int = 0
    next_round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    should_stop: bool = False
    log_dir: Path = field(default_factory=Path)
    resumed_from: Path | None = None
    origin: str = ""
    loggers: list[Logger] = field(default_factory=list)
    names: MetricNames = field(default_factory=MetricNames)
    failures: Failures = field(default_factory=Failures)
    _listeners: dict[str, list[Callable[..., None]]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    @property
    def fabric(self) -> Fabric:
        """Gives devices and processes."""
        return self.federation.fabric

    @property
    def workers(self) -> Workers:
        """The processes over which clients are spread."""
        return self.federation.workers

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a callback writes checkpoints."""
        return any(callback.keeps_checkpoints for callback in self.callbacks)

    @property
    def max_rounds(self) -> int:
        """Rounds in all."""
        return self.settings.max_rounds

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that has it."""
        if hook not in self._listeners:  # a hook may run for every client: leave out callbacks that do not use it
            self._listeners[hook] = [getattr(one, hook) for one in self.callbacks if one.listens(hook)]
        for listener in self._listeners[hook]:
            listener(self, *args)

    def is_due(self, done: int) -> bool:
        """Whether the protocols run after so many rounds."""
        every = self.settings.evaluate_every
        return bool(every) and (done == self.max_rounds or done % every == 0)

    def learn_names(self, metrics: Mapping[str, float]) -> None:
        """Take in which metrics there are, and what the task says about them."""
        for loop in self.federation.session.loops.values():
            self.names.observe(loop.directions)
        self.names.see(metrics)

    def tell_absent(self, evaluation: Evaluation) -> None:
        """Say once what somebody may wait for in vain: protocols and declared metrics of which there is nothing."""
        for name, why in evaluation.absent.items():
            self._tell(f"there are no metrics {name}/…: {why}")
        reported = {base_name(name) for name in evaluation.metrics}
        for name in sorted(self.names.promised - reported) if reported else ():
            self._tell(f"the model declares a metric {name}, and no evaluation reports it")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.fabric.print(line)
