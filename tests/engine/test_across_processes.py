"""Results do not depend on the number of processes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import Regressor
from lit_fed.engine.wire.workers import Workers
from tests.support import ROOT, assert_same, client_states, rows, run_cli, saved_weights

pytestmark = pytest.mark.long

SCHEDULE = ["--model.init_args.lr_scheduler.init_args.T_max", "40"]  # of the whole run, and not of its three rounds
SEED = ["--data.seed", "0"]  # no half of a last batch has one sample
QUICK = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *SEED, "--trainer.max_rounds", "3"]
# Everything at once: clients that drop out, arrive late, keep state; fine-tuned evaluation; unequal shares.
HARD = [
    *("--trainer.participation", "UniformParticipation", "--trainer.participation.count", "5"),
    *("--trainer.participation.dropout_before", "0.2", "--trainer.participation.stragglers.deadline", "0.6"),
    *("--trainer.participation.stragglers.late", "next_round", "--trainer.buffers", "local"),
    *("--trainer.protocols", "[GlobalTest, ClientTest, {class_path: PersonalTest, init_args: {max_clients: 6}}]"),
    *("--model.init_args.network", "test_resnet", "--trainer.local_epochs", "1"),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    done = run_cli(*QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "lightning_logs/version_0"


def same_run(one: Path, other: Path) -> None:
    """Bit-identical weights; metrics up to the order of float64 sums; every client's rows, in the same order."""
    assert_same(saved_weights(one), saved_weights(other))
    for mine, theirs in zip(rows(one / "metrics.csv"), rows(other / "metrics.csv"), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if not name.startswith("time/") and mine[name]:
                assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-5, abs=1e-7), name
    keys = ("round", "client_id", "stage", "metric")
    lines = [[tuple(row[key] for key in keys) for row in rows(run / "clients.csv")] for run in (one, other)]
    assert lines[0] == lines[1]


def test_two_processes_on_one_machine(single: Path, tmp_path: Path) -> None:
    done = run_cli(*QUICK, "--trainer.devices", "2", "--trainer.accelerator", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(single, tmp_path / "lightning_logs/version_0")
    best = [run / "checkpoints/best.ckpt" for run in (single, tmp_path / "lightning_logs/version_0")]
    (one, two) = [torch.load(path, weights_only=True) for path in best]
    assert one["callbacks"]["Checkpoint"] == two["callbacks"]["Checkpoint"]
    assert one["callbacks"]["Checkpoint"]["by"] == "val/global/acc"


@pytest.mark.parametrize("algorithm", ["FedAvg", "FedPer"])
def test_two_processes_test_clients_in_groups_to_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    """Clients that share a model, have a part of it to themselves, or fine-tune it."""
    one, two = tested_in_groups(tmp_path, "--algorithm", algorithm)
    assert {row[2] for row in one} == {"test", "personal"}
    assert one == two


def test_two_processes_measure_groups_of_clients_by_torchmetrics_to_the_same_bits(tmp_path: Path) -> None:
    one, two = tested_in_groups(tmp_path, "--config", str(ROOT / "examples/my_module.yaml"))
    assert {row[3] for row in one} == {"loss", "acc"}
    assert one == two


def tested_in_groups(tmp_path: Path, *words: str) -> list[list[tuple[str, ...]]]:
    """Rows of clients' tests on one process and on two."""
    found = []
    words += ("--trainer.executor", "vectorized", "--trainer.protocols", "[ClientTest, PersonalTest]")
    for folder, devices in (("one", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        on = ("--trainer.devices", devices, "--trainer.accelerator", "cpu")
        done = run_cli(*QUICK, *words, *on, cwd=tmp_path / folder)
        assert done.returncode == 0, done.stderr
        lines = rows(tmp_path / folder / "lightning_logs/version_0/clients.csv")
        found.append([tuple(row.values()) for row in lines if row["stage"] in ("test", "personal")])
    return found


def test_torchrun_on_loopback(single: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29531")
    done = run_cli(*QUICK, "--trainer.devices", "2", cwd=tmp_path, program=torchrun)
    assert done.returncode == 0, done.stderr
    same_run(single, tmp_path / "lightning_logs/version_0")


def test_torchrun_starts_killed_processes_again_to_the_same_bits(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the processes that are started again find each other's old addresses, whatever they run: of PyTorch 2.15.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    killed = ("--trainer.callbacks", "[{class_path: tests.support.KilledOnce, init_args: {round_idx: 1}}]")
    words = (*QUICK, "--trainer.devices", "2", *killed, "--ckpt_path", "last")
    done = run_cli(*words, cwd=tmp_path, program=(*torchrun, "--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "with round 1" in done.stdout, "it went on from the round that had ended"
    same_run(single, tmp_path / "lightning_logs/version_0")


def test_two_processes_with_everything_that_moves_between_them(tmp_path: Path) -> None:
    for folder, devices in (("one", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        done = run_cli(*QUICK, *HARD, "--trainer.devices", devices, cwd=tmp_path / folder)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / folder / "lightning_logs/version_0" for folder in ("one", "two"))
    same_run(one, two)
    states = [client_states(run) for run in (one, two)]
    assert states[0].keys() == states[1].keys()
    for whose in states[0]:
        assert_same(states[0][whose], states[1][whose])
    assert any(name.startswith("late-") for name, _ in states[0]), "nobody was late in the last round"


def test_the_process_group_has_ended_when_the_interpreter_does(tmp_path: Path) -> None:
    """Else one of gloo's threads may need the interpreter after its end, which aborts the process."""
    program = (
        "import atexit, sys, torch.distributed as dist; from lit_fed.command.cli import main;"
        "atexit.register(lambda: print('ended', not dist.is_initialized(), flush=True)); main(sys.argv[2:])"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = run_cli(*QUICK, "--trainer.devices", "2", cwd=tmp_path, program=(*torchrun, sys.executable, "-c", program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended True") == 2


def test_data_parallel_clients(tmp_path: Path) -> None:
    for folder, words in (("one", ()), ("two", ("--trainer.devices", "2", "--trainer.strategy", "ddp"))):
        (tmp_path / folder).mkdir()
        done = run_cli(*QUICK, *SCHEDULE, *words, cwd=tmp_path / folder)
        assert done.returncode == 0, done.stderr
    single, run = (tmp_path / folder / "lightning_logs/version_0" for folder in ("one", "two"))
    # Half batches averaged over processes round differently in float32 than whole batches do.
    for name, tensor in saved_weights(single).items():
        torch.testing.assert_close(tensor, saved_weights(run)[name], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(rows(single / "metrics.csv"), rows(run / "metrics.csv"), strict=True):
        assert float(mine["train/loss"]) == pytest.approx(float(theirs["train/loss"]), rel=1e-3)
        assert mine["comm/total_bytes"] == theirs["comm/total_bytes"]


def test_two_processes_resume_from_the_best_round_in_a_new_folder(tmp_path: Path) -> None:
    ended = []
    for folder, devices in (("one", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        rounds = [*QUICK[:-1], "2", "--trainer.devices", devices], [*QUICK, "--trainer.devices", devices]
        for args in ([*rounds[0]], [*rounds[1], "--ckpt_path", "best"]):
            done = run_cli(*args, cwd=tmp_path / folder)
            assert done.returncode == 0, done.stderr
        ended.append(tmp_path / folder / "lightning_logs/version_1")
    same_run(*ended)


@pytest.mark.parametrize("strategy", ["clients", "ddp"])
def test_every_process_ends_a_round_with_the_same_model(tmp_path: Path, strategy: str) -> None:
    """With batch norm, whose statistics differ between the processes of a data-parallel client."""
    batch_norm = ("--model.init_args.network", "test_resnet", "--trainer.local_epochs", "1")
    watched = ("--trainer.callbacks", "[tests.support.Agreement]", "--trainer.strategy", strategy)
    done = run_cli(*QUICK, *batch_norm, *watched, "--trainer.devices", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_cohort_smaller_than_the_processes(tmp_path: Path) -> None:
    done = run_cli(*QUICK, "--trainer.devices", "2", "--trainer.participation.count", "1", cwd=tmp_path)
    assert done.returncode != 0
    assert "a cohort of 1 clients cannot keep 2 processes busy" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_learns_of_the_others_failing_client(tmp_path: Path) -> None:
    everybody = ("--trainer.participation", "FullParticipation", "--algorithm", "tests.support.Unlucky")
    done = run_cli(*QUICK, "--trainer.devices", "2", *everybody, cwd=tmp_path)
    assert done.returncode == 1  # the run failed, not its input
    assert done.stderr.rstrip().endswith("client 7 failed in round 0: OSError: its camera broke")
    untouched = torch.load(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert untouched["round_idx"] == 0


def test_tolerated_failures_are_counted_over_processes(tmp_path: Path) -> None:
    everybody = ("--trainer.participation", "FullParticipation", "--algorithm", "tests.support.Unlucky")
    runs = []
    for folder, devices in (("one", "1"), ("two", "2")):
        (tmp_path / folder).mkdir()
        done = run_cli(
            *(*QUICK, *everybody, "--trainer.on_client_failure", "skip", "--trainer.devices", devices),
            cwd=tmp_path / folder,
        )
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / folder / "lightning_logs/version_0")
    same_run(*runs)
    for row in rows(runs[1] / "metrics.csv"):
        assert (float(row["participation/count"]), float(row["participation/failed"])) == (19, 1)


class _Group(Workers):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def test_shares_are_balanced_and_complete() -> None:
    # Longest first onto the least loaded: 9 | 7, then 5 joins 7 (12), 4 joins 9 (13), 2 joins 12 (14), 1 joins 13 (14).
    sizes = {10: 5, 11: 9, 12: 1, 13: 7, 14: 4, 15: 2}
    shares = [_Group(rank, 2).share(list(sizes), lambda client: sizes[client]) for rank in range(2)]
    assert shares == [[11, 14, 12], [13, 10, 15]]


class Computing(Regressor):
    """Computes its metric itself, in a hook, as many a module does."""

    def _evaluate(self, batch: Any, stage: str) -> None:
        self.mae(self(batch[0]), batch[1].view(-1, 1))

    def on_test_epoch_end(self) -> None:
        self.log("mae", self.mae.compute())


@pytest.mark.parametrize("model", ["Regressor", "tests.engine.test_across_processes.Computing"])
@pytest.mark.parametrize("test_batch_size", ["1000", "87"])
def test_torchmetrics_over_two_processes(tmp_path: Path, model: str, test_batch_size: str) -> None:
    """Also where one has no batch of the shared test set, or one of a single sample, which has no R²."""
    args = ["fit", "--data", "Diabetes", "--data.num_clients", "3", "--data.test_batch_size", test_batch_size]
    args += ["--model", model, "--algorithm", "FedAvg", "--trainer.max_rounds", "1", "--trainer.accelerator", "cpu"]
    runs = []
    for devices in ("1", "2"):
        (tmp_path / devices).mkdir()
        done = run_cli(*args, "--trainer.num_threads", "1", "--trainer.devices", devices, cwd=tmp_path / devices)
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / devices / "lightning_logs/version_0")
    same_run(*runs)
    assert float(rows(runs[0] / "metrics.csv")[0]["global/mae"]) > 0
