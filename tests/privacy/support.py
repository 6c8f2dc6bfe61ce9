"""What tests of privacy share."""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lit_fed.algorithm import ClientUpdate
from lit_fed.callbacks import Callback, Checkpoint, RoundRecord, Run
from lit_fed.methods import FedAvg
from lit_fed.participation import FullParticipation
from lit_fed.privacy import ClientLevel
from lit_fed.privacy.keys import RunKey


def private(clip_norm: float = 0.5, noise_multiplier: float | None = 0.0, **kwargs: Any) -> dict[str, Any]:
    """A trainer's settings for privacy in which everybody takes part, and a failure ends no run that has a key."""
    return {
        **({"on_client_failure": "skip"} if kwargs.get("key_file") else {}),
        "privacy": ClientLevel(clip_norm, noise_multiplier, delta=0.01, **kwargs),
        "participation": FullParticipation(),
    }


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    r"""δ of one release without sampling: :math:`\Phi(1/2z - εz) - e^ε \Phi(-1/2z - εz)`.

    Balle, Wang: "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8.
    """

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    half, scaled = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return phi(half - scaled) - math.exp(epsilon) * phi(-half - scaled)


def uniform() -> FedAvg:
    """FedAvg in which clients weigh the same."""
    return FedAvg(weighting="uniform")


class Killed(Callback):
    """Kills the process at every place of the first and of the last round, once at each; for `killed_everywhere`.

    A release is recorded in three steps: before a line is in the key's file, when half of it is, and when all of it is.
    """

    def __init__(self) -> None:
        record, checkpoint = RunKey.record, Checkpoint.on_round_end

        def recorded(key: RunKey, release: str, round_idx: int) -> None:
            self._kill("before the record", round_idx)
            assert key.path is not None
            whole = key.path.read_text()
            with open(key.path, "a") as file:
                file.write(f"{round_idx} {release[:7]}")
            self._kill("in the record", round_idx)
            key.path.write_text(whole)
            record(key, release, round_idx)
            self._kill("after the record", round_idx)

        def kept(checkpoint_: Checkpoint, run: Run, made: RoundRecord) -> None:
            self._kill("before the checkpoint", made.round_idx)
            checkpoint(checkpoint_, run, made)
            self._kill("after the checkpoint", made.round_idx)

        setattr(RunKey, "record", recorded)  # noqa: B010
        setattr(Checkpoint, "on_round_end", kept)  # noqa: B010

    def _kill(self, place: str, round_idx: int) -> None:
        mark = Path(f"killed {place} {round_idx}")
        if round_idx != 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        self._kill("at the start", round_idx)

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self._kill("after a client", run.next_round)

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        self._kill("before the test", round_idx)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        self._kill("before the rows", record.round_idx)


PLACES = 9
"""Number of places in a round at which `Killed` kills."""


def killed_everywhere() -> None:
    """Run the words of the command line again and again, each time in a process of its own, until one is not killed.

    Processes are forked, which spares their imports; prints the exit status of each.
    """
    from lit_fed.command.cli import main

    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        if not (child := os.fork()):
            main([*sys.argv[2:], "--ckpt_path", "last", "--trainer.callbacks", "[tests.privacy.support.Killed]"])
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("status", status, flush=True)


if __name__ == "__main__":
    killed_everywhere()
