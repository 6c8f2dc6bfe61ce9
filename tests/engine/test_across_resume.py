"""Resumed == uninterrupted, bit for bit, and without a missing or doubled round anywhere."""

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_fed.callbacks import Callback, Checkpoint
from lit_fed.errors import CheckpointError
from lit_fed.methods import FedAvg
from lit_fed.participation import Stragglers, UniformParticipation
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.support import (
    ROOT,
    LeastSquares,
    Points,
    Wanderer,
    Wandering,
    assert_same,
    client_states,
    events_of,
    fit,
    rows,
    run_cli,
    saved_weights,
    start_cli,
    weights,
)

ROUNDS = 24


def logged_rounds(run: Path) -> list[int]:
    """The rounds of a run's event files, as TensorBoard reads them."""
    reader = EventAccumulator(events_of(run), size_guidance={"scalars": 0})
    reader.Reload()
    return [event.step for event in reader.Scalars("global/acc")]


def untimed(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows without what the clock wrote."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in rows(path)
        if row.get("metric") != "time_s"
    ]


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--config", str(ROOT / "configs/participation/asynchronous.yaml")]])
def test_killed_five_times(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    fit_args = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *more, "--trainer.max_rounds", str(ROUNDS)]
    done = run_cli(*fit_args, cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    whole, killed = (tmp_path / side / "lightning_logs/version_0" for side in ("whole", "killed"))

    chance = random.Random(time.time_ns())  # really random: the claim is about any moment
    kills = []
    for attempt in range(1, 6):
        process = start_cli(*fit_args, "--ckpt_path", "last", cwd=tmp_path / "killed")
        wanted = chance.randint(ROUNDS * (attempt - 1) // 6, ROUNDS * attempt // 6 - 1)
        while process.poll() is None and _rounds_logged(killed.parent) < wanted:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        kills.append((attempt, wanted, process.returncode))
        assert len(said.splitlines()) <= 1, said  # none, where it had not begun to train
        assert "ended without a message" in (said or "ended without a message")
    assert all(code == -signal.SIGKILL for _, _, code in kills), kills
    done = run_cli(*fit_args, "--ckpt_path", "last", cwd=tmp_path / "killed")
    assert done.returncode == 0, done.stderr

    # A process killed in the moment between making its folder and writing the first checkpoint leaves an empty run.
    folders = sorted(killed.parent.iterdir())
    assert [run for run in folders if (run / "checkpoints/last.ckpt").is_file()] == folders[-1:]
    killed = folders[-1]
    assert_same(saved_weights(whole), saved_weights(killed))
    assert [int(row["round"]) for row in rows(killed / "metrics.csv")] == list(range(ROUNDS))
    assert untimed(killed / "metrics.csv") == untimed(whole / "metrics.csv")
    assert untimed(killed / "clients.csv") == untimed(whole / "clients.csv")
    assert logged_rounds(whole) == list(range(ROUNDS))
    assert logged_rounds(killed) == list(range(ROUNDS))
    assert (killed / "partition.json").read_text() == (whole / "partition.json").read_text()


LATE = (
    *("--trainer.participation", "UniformParticipation", "--trainer.participation.count", "5"),
    *("--trainer.participation.stragglers.deadline", "0.6", "--trainer.participation.stragglers.late", "next_round"),
    *("--trainer.callbacks", "[{class_path: Checkpoint, init_args: {keep_last: 2}}]"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "more"),
    [
        pytest.param((2, 2), (), id="two processes"),
        pytest.param((2, 2), LATE, id="late updates, checkpoints of several rounds"),
        pytest.param((2, 2), ("--trainer.strategy", "ddp"), id="ddp"),
        pytest.param((1, 2), (), id="one process, then two"),
        pytest.param((2, 1), (), id="two processes, then one"),
    ],
)
def test_killed_between_a_rounds_states_and_its_checkpoint(
    tmp_path: Path, devices: tuple[int, int], more: tuple[str, ...]
) -> None:
    """The round is repeated, and each process finds its states in the rounds after it."""
    words = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--algorithm", "Scaffold", *more]
    words += ["--trainer.max_rounds", "6", "--trainer.local_epochs", "1", "--trainer.accelerator", "cpu"]
    first, second = (["--trainer.devices", str(count)] for count in devices)
    killed = [
        "--trainer.callbacks+",
        "{class_path: tests.support.KilledBeforeTheCheckpoint, init_args: {round_idx: 2}}",
    ]
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    done = run_cli(*words, *second, cwd=tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert run_cli(*words, *killed, *first, cwd=tmp_path / "killed").returncode != 0
    whole, parts = (tmp_path / side / "lightning_logs/version_0" for side in ("whole", "killed"))
    assert list(parts.glob("checkpoints/clients/*.r2.states")), "the round's states were not written"
    done = run_cli(*words, *second, "--ckpt_path", "last", cwd=tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert "with round 2" in done.stdout
    assert_same(saved_weights(whole), saved_weights(parts))
    states = [client_states(run) for run in (whole, parts)]
    assert states[0].keys() == states[1].keys()
    for whose in states[0]:
        assert_same(states[0][whose], states[1][whose])


def _rounds_logged(logs: Path) -> int:
    """Rounds in the newest run's ``metrics.csv``; −1 before there is any."""
    files = sorted(logs.glob("version_*/metrics.csv"))
    return len(files[-1].read_text().splitlines()) - 1 if files else -1


@pytest.mark.parametrize(
    ("module", "kwargs"),
    [
        pytest.param(LeastSquares, {}, id="fedavg"),
        pytest.param(Wanderer, {}, id="personal state, batch norm, dropout"),
        pytest.param(Wanderer, {"buffers": "local"}, id="local buffers"),
        pytest.param(Wanderer, {"client_store": "memory"}, id="states in memory"),
        pytest.param(Wanderer, {"stragglers": 0.025}, id="late updates"),
        pytest.param(Wanderer, {"protocols": [GlobalTest(), ClientTest(), PersonalTest()]}, id="personal protocol"),
    ],
)
def test_resumed_is_uninterrupted(tmp_path: Path, module: Any, kwargs: dict[str, Any]) -> None:
    def run(folder: str, rounds: int, **more: Any) -> Any:
        torch.manual_seed(3)
        settings = dict(kwargs)
        deadline = settings.pop("stragglers", None)
        stragglers = None if deadline is None else Stragglers(deadline=deadline, late="next_round")
        settings["participation"] = UniformParticipation(count=3, stragglers=stragglers)
        data = Points(num_clients=8, sizes=(2, 3))
        algorithm = Wandering() if module is Wanderer else FedAvg()
        return fit(tmp_path / folder, module(), data, algorithm, max_rounds=rounds, **settings, **more)

    whole = run("whole", 6)
    run("parts", 2)
    run("parts", 4, ckpt_path="last")
    parts = run("parts", 6, ckpt_path="last")
    assert_same(weights(whole), weights(parts))
    assert untimed(whole.log_dir / "metrics.csv") == untimed(parts.log_dir / "metrics.csv")
    assert untimed(whole.log_dir / "clients.csv") == untimed(parts.log_dir / "clients.csv")
    if deadline_seen := kwargs.get("stragglers"):
        late = [whole.participation.late(round_idx) for round_idx in range(6)]
        assert any(late), f"no update is late with deadline {deadline_seen}: the test shows nothing"
    clients = rows(whole.log_dir / "clients.csv")
    arrived = Counter(int(row["round"]) for row in clients if row["metric"] == "uplink_bytes")
    counted = {int(row["round"]): float(row["participation/count"]) for row in rows(whole.log_dir / "metrics.csv")}
    assert {r: c for r, c in counted.items() if c} == arrived


def test_a_module_built_with_other_weights_resumes_alike(tmp_path: Path) -> None:
    """A client that first appears after the resume starts from the first run's personal part, not the new module's."""

    def run(folder: str, rounds: int, seed: int, ckpt_path: str | None = None) -> Any:
        torch.manual_seed(seed)
        participation = UniformParticipation(count=2)
        return fit(
            tmp_path / folder,
            Wanderer(),
            Points(num_clients=12, sizes=(2, 3)),
            Wandering(),
            max_rounds=rounds,
            participation=participation,
            ckpt_path=ckpt_path,
        )

    whole = run("whole", 6, seed=1)
    run("parts", 2, seed=1)
    parts = run("parts", 6, seed=2, ckpt_path="last")
    cohorts = [set(whole.participation.select(round_idx)) for round_idx in range(6)]
    assert set().union(*cohorts[2:]) - set().union(*cohorts[:2]), "no client first appears after the resume"
    assert_same(weights(whole), weights(parts))
    assert untimed(whole.log_dir / "clients.csv") == untimed(parts.log_dir / "clients.csv")


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=1)
    with pytest.raises(CheckpointError, match="clients had other data"):
        fit(tmp_path, data=Points(sizes=(2, 2)), max_rounds=2, ckpt_path="last")


@pytest.mark.long
def test_resuming_with_other_settings_says_so_and_keeps_both(tmp_path: Path) -> None:
    fit_args = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.max_rounds"]
    assert run_cli(*fit_args, "1", cwd=tmp_path).returncode == 0
    done = run_cli(*fit_args, "2", "--trainer.local_epochs", "1", "--ckpt_path", "last", cwd=tmp_path)
    changed = "resumed with different settings from round 1 on: trainer.local_epochs, trainer.max_rounds"
    assert changed in done.stdout, done.stderr
    run = tmp_path / "lightning_logs/version_0"
    assert "local_epochs: 5" in (run / "config.until_round_0.yaml").read_text()
    assert "local_epochs: 1" in (run / "config.yaml").read_text()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    whole = fit(tmp_path, max_rounds=3)
    before = weights(whole)
    again = fit(tmp_path, max_rounds=3, ckpt_path="last")
    assert_same(before, weights(again))
    assert [row["round"] for row in rows(whole.log_dir / "metrics.csv")] == ["0", "1", "2"]


def test_sparse_checkpoints_run_the_lost_rounds_again(tmp_path: Path) -> None:
    def run(folder: str, rounds: int) -> Any:
        torch.manual_seed(7)
        callbacks: list[Any] = [Checkpoint(every_n_rounds=2, monitor=None)]
        data = Points(sizes=(2, 3))
        return fit(
            tmp_path / folder, Wanderer(), data, Wandering(), max_rounds=rounds, callbacks=callbacks, ckpt_path="last"
        )

    class Killed(Exception):
        pass

    class KillAfterRound3(Callback):
        def on_round_start(self, run: Any, round_idx: int, plan: Any) -> None:
            if round_idx == 3:
                raise Killed

    whole = run("whole", 6)
    torch.manual_seed(7)
    with pytest.raises(Killed):
        fit(
            tmp_path / "parts",
            Wanderer(),
            Points(sizes=(2, 3)),
            Wandering(),
            max_rounds=6,
            callbacks=[KillAfterRound3(), Checkpoint(every_n_rounds=2, monitor=None)],
        )
    parts = run("parts", 6)  # round 2 was finished but not saved: it is run again
    assert_same(weights(whole), weights(parts))
    assert [row["round"] for row in rows(parts.log_dir / "metrics.csv")] == [str(r) for r in range(6)]
