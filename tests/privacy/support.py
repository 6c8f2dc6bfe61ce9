"""What tests of privacy share."""

import os
import signal
from pathlib import Path
from typing import Any

from lit_fed.algorithm import ClientUpdate
from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.methods import FedAvg
from lit_fed.participation import FullParticipation
from lit_fed.privacy import ClientLevel


def private(clip_norm: float = 0.5, noise_multiplier: float | None = 0.0, **kwargs: Any) -> dict[str, Any]:
    """A trainer's settings for privacy in which everybody takes part."""
    return {
        "privacy": ClientLevel(clip_norm, noise_multiplier, delta=0.01, **kwargs),
        "participation": FullParticipation(),
    }


def uniform() -> FedAvg:
    """FedAvg in which clients weigh the same."""
    return FedAvg(weighting="uniform")


class KilledAt(Callback):
    """The process is killed in round 1, when a hook is called; the file ``killed`` says that it was.

    Args:
        hook: The name of the hook.
    """

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def _kill(self, hook: str, run: Run) -> None:
        if hook == self.hook and run.next_round >= 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        self._kill("on_round_start", run)

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self._kill("on_client_end", run)

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        self._kill("on_evaluation_start", run)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        if record.round_idx == 1:
            self._kill("on_round_end", run)
