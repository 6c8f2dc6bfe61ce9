"""Clients that end the program, never end, or all fail; and what a run that goes on without them says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client
from lit_fed.engine.clients.executor import Failures
from lit_fed.engine.clients.guard import Guard
from lit_fed.errors import ClientFailure, ConfigError, NobodyLeft
from lit_fed.methods import FedAvg
from lit_fed.participation import UniformParticipation
from tests.support import LeastSquares, Points, Wanderer, assert_same, fit, rows, weights
from tests.test_trainer import Cohorts


class Odd(FedAvg):
    """Some clients do something of their own in place of a batch."""

    needs = frozenset({"loss"})

    def __init__(self, does: Any, who: tuple[int, ...] = (1,), when: int = 1) -> None:
        super().__init__()
        self.does, self.who, self.when = does, who, when

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        if client.id in self.who and client.round_idx >= self.when and client.stage == "train":
            self.does()
        return super().objective(client, batch)


def last_line(folder: Path) -> list[str]:
    return [row["round"] for row in rows(folder / "lightning_logs/version_0/metrics.csv")]


# ---------------------------------------------------------------------- the end of the program


@pytest.mark.parametrize("status", [None, 0, 3, "enough"])
def test_a_client_that_ends_the_program_has_failed(tmp_path: Path, status: Any) -> None:
    with pytest.raises(ClientFailure) as caught:
        fit(tmp_path, algorithm=Odd(lambda: sys.exit(status)), max_rounds=3)
    here = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)
    told = rf"client 1 failed in round 1: it called sys.exit({'' if status is None else status}) in {here}, line "
    assert str(caught.value).startswith(told)
    assert caught.value.details == ""  # a line is enough: it says where
    resumed = fit(tmp_path, max_rounds=3, ckpt_path="last")
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", max_rounds=3)))


def test_tolerated_it_is_left_out_like_any_other(tmp_path: Path) -> None:
    # Round 1 is client 0's alone: from (0.25, 1.5) to (1.125, 1.5), see test_trainer.py.
    made = fit(tmp_path, algorithm=Odd(sys.exit), on_client_failure="skip")
    assert weights(made)["network.weight"].tolist() == [[1.125, 1.5]]


# ---------------------------------------------------------------------- a limit in time


def hang() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:  # a client may try again and again
            continue


def test_a_client_that_hangs_is_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ClientFailure, match=r"client 1 failed in round 1: it did not finish within") as caught:
        fit(tmp_path, algorithm=Odd(hang), max_rounds=3, client_timeout=0.3)
    assert time.monotonic() - begun < 20
    assert "trainer.client_timeout of 0.3 s; it was at " in str(caught.value)
    assert "test_across_endings.py, line " in str(caught.value)
    resumed = fit(tmp_path, max_rounds=3, client_timeout=60, ckpt_path="last")
    assert_same(weights(resumed), weights(fit(tmp_path / "whole", max_rounds=3)))


def test_what_a_hanging_client_leaves_does_not_reach_the_next(tmp_path: Path) -> None:
    """Client 0 hangs after its first batch of round 1, with a network that has moved and buffers that have."""

    def run(folder: str, algorithm: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        data = Points(3, sizes=(4, 4))
        data.batch_size = 2
        return fit(tmp_path / folder, Wanderer(0.05), data, algorithm, max_rounds=2, on_client_failure="skip", **kwargs)

    class Late(Odd):
        """Does it at the second batch."""

        def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
            if client.id in self.who and client.round_idx == 1 and client.stage == "train":
                if client.results.get("begun"):
                    self.does()
                client.results["begun"] = {"yes": torch.ones(1)}
            return FedAvg.objective(self, client, batch)

    hung = run("hung", Late(hang, who=(0,)), client_timeout=0.5)

    class Broken(Exception):
        pass

    def breaks() -> None:
        raise Broken

    broken = run("broken", Late(breaks, who=(0,)))
    assert_same(weights(hung), weights(broken))
    assert [row["participation/failed"] for row in rows(hung.log_dir / "metrics.csv")] == ["0", "1"]


def test_the_systems_timer_and_its_handler_are_as_before(tmp_path: Path) -> None:
    def mine(*_: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, mine)
    try:
        fit(tmp_path, max_rounds=1, client_timeout=60)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_late_alarm_ends_nobody() -> None:
    guard = Guard(60)
    with guard.on_duty(data_parallel=False):
        with guard.over(0, 0):
            pass
        os.kill(os.getpid(), signal.SIGALRM)  # as if it had been under way
        time.sleep(0.01)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_limit_that_cannot_be(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.client_timeout is .*; it must be above 0 and at most 100000000"):
        fit(tmp_path, client_timeout=seconds)


def test_a_limit_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    found: list[Any] = []

    def work() -> None:
        try:
            fit(tmp_path, client_timeout=60)
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == ["trainer.client_timeout cannot be kept outside of the main thread; set it to None"]
    with pytest.raises(ConfigError, match="ends a client on one process only"), Guard(1.0).on_duty(True):
        pass
    assert not list(tmp_path.rglob("version_*"))


# ---------------------------------------------------------------------- failures that are tolerated


def broken() -> None:
    raise OSError("its camera\nbroke")


def test_a_cause_is_said_once_and_all_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Points(4)
    fit(tmp_path, data=data, algorithm=Odd(broken, who=(1, 3)), max_rounds=4, on_client_failure="skip")
    said = [line for line in capsys.readouterr().out.splitlines() if "camera" in line]
    assert said == [
        "client 1 failed in round 1: OSError: its camera broke; the run continues without it; further failures "
        "of this cause are not printed",
        "continued without 6 updates of 2 clients: 6 × OSError: its camera broke",  # two clients in rounds 1 to 3
    ]


def test_where_everybody_fails_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NobodyLeft) as caught:
        fit(tmp_path, data=Points(4), algorithm=Odd(broken, (0, 1, 2, 3)), max_rounds=9, on_client_failure="skip")
    assert str(caught.value) == (
        "no client is left: 4 clients failed in a row, the last one client 3 in round 1: OSError: its camera broke"
    )
    assert "continued without 4 updates of 4 clients: 4 × OSError: its camera broke\n" in capsys.readouterr().out
    assert last_line(tmp_path) == ["0"]
    assert fit(tmp_path, data=Points(4), max_rounds=3, ckpt_path="last").run.start_round == 1


def test_a_round_without_anybody_is_not_the_end_where_others_are_left(tmp_path: Path) -> None:
    cohorts = Cohorts([1], [1], [0], [1], [2], [1], [3])
    made = fit(
        tmp_path, data=Points(4), algorithm=Odd(broken), max_rounds=7, on_client_failure="skip", participation=cohorts
    )
    assert [float(row["participation/count"]) for row in rows(made.log_dir / "metrics.csv")] == [1, 0, 1, 0, 1, 0, 1]


def test_ten_in_a_row_are_enough_of_many(tmp_path: Path) -> None:
    cohort = UniformParticipation(count=6)
    with pytest.raises(NobodyLeft, match=r"no client is left: 1[0-2] clients failed in a row, .* in round [12]:"):
        fit(
            tmp_path, data=Points(500), algorithm=Odd(broken, tuple(range(500)), 0), max_rounds=99,
            on_client_failure="skip", participation=cohort,
        )  # fmt: skip


def test_failures_in_a_row_are_of_different_clients_without_a_success_between() -> None:
    said: list[str] = []
    failures, broken = Failures(), [ClientFailure(client, 0, "broken") for client in range(20)]
    for _ in range(50):
        failures.take(broken[:9], range(9), 100, said.append)  # the same nine
    failures.take([], [], 100, said.append)  # nobody worked
    failures.take(broken[9:12], range(9, 13), 100, said.append)  # and one of four did
    failures.take(broken[:9], range(9), 100, said.append)
    with pytest.raises(NobodyLeft, match="10 clients failed"):
        failures.take(broken[9:10], [9], 100, said.append)
    assert failures.count == 50 * 9 + 3 + 9 + 1
    assert len(said) == 1
    with pytest.raises(NobodyLeft, match="2 clients failed"):
        Failures().take(broken[:2], range(2), 2, said.append)


def test_many_causes_are_summed_up_in_a_line() -> None:
    failures = Failures()
    causes = [ClientFailure(0, 0, f"cause {number}") for number in range(7)]
    failures.take([*causes, causes[3]], [0, 1], 9, lambda line: None)
    shown = "2 × cause 3; 1 × cause 0; 1 × cause 1; 1 × cause 2; 1 × cause 4; …"
    assert failures.summary() == f"continued without 8 updates of 1 client: {shown}"


def test_nothing_is_said_where_nobody_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, LeastSquares(), on_client_failure="skip")
    assert "without" not in capsys.readouterr().out
