"""What can listen to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_fed.engine.evaluation.rows import ClientRow
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.participation import Participant

_GLOBAL = ("global/", "privacy/", "time/")


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What is known once a round is over; the same on every process.

    Args:
        round_idx: The round, counted from 0.
        metrics: Values by name, such as ``global/acc``.
        rows: Values of single clients.
        plan: Who was selected, and what became of their work.
    """

    round_idx: int
    metrics: dict[str, float]
    rows: list[ClientRow]
    plan: Sequence[Participant]

    def withheld(self) -> RoundRecord:
        """The record of the global model alone: nothing of single clients, sums over them, or who they were."""
        told = {name: value for name, value in self.metrics.items() if name.startswith(_GLOBAL)}
        return RoundRecord(self.round_idx, told, [], [])


class Callback:
    """Base class: override what you need. Hooks run on every process, in the order of ``trainer.callbacks``."""

    keeps_checkpoints = False
    """Whether it writes checkpoints, and so says which client states are still needed."""

    def listens(self, hook: str) -> bool:
        """Whether it has a hook of its own."""
        return getattr(type(self), hook) is not getattr(Callback, hook)

    def on_fit_start(self, run: Run) -> None:
        """Everything is set up and a checkpoint, if any, is loaded; ``run.start_round`` is known."""

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """The cohort is known, nobody has trained yet."""

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        """A client of this process finished; its tensors are valid until the next client runs."""

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        """The server has stepped and the protocols are about to run."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """The round is evaluated. The checkpoint of the round is written by the last callback, `Checkpoint`."""

    def on_fit_end(self, run: Run) -> None:
        """The last round is over."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """The run ends early; the error is raised again after this."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
