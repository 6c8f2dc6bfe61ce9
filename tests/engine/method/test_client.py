"""What a client offers to its method."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lit_fed.algorithm import Client, Terms, Update
from lit_fed.errors import ClientFailure
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, fit


class Telling(LeastSquares):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("told", loss)
        return loss


class Looking(FedAvg):
    """Runs the task with weights of 9 beside its own step, and once more in the end."""

    def __init__(self, muted: bool = True, muted_in_finish: bool = True) -> None:
        super().__init__()
        self.muted, self.muted_in_finish = muted, muted_in_finish

    def objective(self, client: Client, batch: Any) -> Terms:
        self.batch = batch
        with client.muted() if self.muted else nullcontext():
            with client.muted() if self.muted else nullcontext():
                look(client, batch)
            look(client, batch)  # still muted
        return super().objective(client, batch)

    def finish(self, client: Client) -> Update:
        with client.muted() if self.muted_in_finish else nullcontext():
            look(client, self.batch)
        return super().finish(client)


def look(client: Client, batch: Any) -> Tensor:
    nines = {name: 0 * tensor.detach() + 9 for name, tensor in client.parameters.items()}
    return client.run(batch, nines).loss


def told(tmp_path: Path, algorithm: FedAvg) -> float:
    return fit(tmp_path, Telling(), algorithm=algorithm, max_rounds=1).metrics["train/told"]


def test_what_a_task_logs_is_dropped_within_muted_and_nowhere_else(tmp_path: Path) -> None:
    # From w = 0 the losses are 2²/2 = 2 and 4²/2 = 8; with weights of 9 they are 7²/2 = 24.5 and 5²/2 = 12.5.
    alone = told(tmp_path / "alone", FedAvg())
    assert told(tmp_path / "muted", Looking()) == alone
    assert told(tmp_path / "heard", Looking(muted=False)) > alone + 5


def test_an_error_ends_the_silence(tmp_path: Path) -> None:
    class Stumbling(FedAvg):
        def objective(self, client: Client, batch: Any) -> Terms:
            with pytest.raises(ZeroDivisionError), client.muted():
                raise ZeroDivisionError
            return super().objective(client, batch)

    assert told(tmp_path / "one", Stumbling()) == told(tmp_path / "other", FedAvg())


def test_a_task_that_logs_runs_in_finish_only_if_muted(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match=r"self\.log\('told', …\) runs outside .*within client\.muted\(\)"):
        told(tmp_path, Looking(muted_in_finish=False))
