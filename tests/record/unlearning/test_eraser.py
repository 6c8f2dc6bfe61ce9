"""FedEraser by hand, reduced to FedAvg, resumed, over processes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import Asynchronous, FullParticipation, Stragglers, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.record.unlearning.eraser import FedEraser, calibrate
from lit_fed.record.unlearning.kept_updates import KeptUpdates
from tests.support import (
    ROOT,
    LeastSquares,
    Points,
    Wanderer,
    assert_same,
    fit,
    run_cli,
    saved_weights,
    trainer,
    weights,
)


def trained(folder: Path, rounds: int = 3, every: int = 1, **kwargs: Any) -> Path:
    """The kept updates of a run with three clients, of whom client 2 has the sample of client 0."""
    settings: dict[str, Any] = {"algorithm": FedAvg(weighting="uniform"), "local_epochs": 2, "data": Points(3)} | kwargs
    made = fit(folder, max_rounds=rounds, callbacks=[KeptUpdates(every)], **settings)
    return made.log_dir / "updates"


def erased(folder: Path, updates: Path, rounds: int = 2, absent: tuple[int, ...] = (2,), **kwargs: Any) -> Any:
    """The run that replays them without client 2, with one epoch of calibration."""
    settings: dict[str, Any] = {
        "algorithm": FedEraser(str(updates), weighting="uniform"),
        "data": Points(3),
        "participation": FullParticipation(absent=list(absent)),
    }
    return fit(folder, max_rounds=rounds, **(settings | kwargs))


@pytest.mark.parametrize(("every", "expected"), [(1, [1.125, 2.625]), (2, [0.9375, 2.34375])])
def test_two_kept_rounds_by_hand(tmp_path: Path, every: int, expected: list[float]) -> None:
    """A step halves the way to 2 (clients 0 and 2, first weight) or 4 (client 1, second weight).

    The run takes two steps a round, three quarters of the way:
      round 0: (0, 0);     U = 1.5, 3, 1.5;           mean (3 / 3, 3 / 3) = (1, 1)
      round 1: (1, 1);     U = 0.75, 2.25, 0.75;      mean + (0.5, 0.75) = (1.5, 1.75)
      round 2: (1.5, 1.75);  U = 0.375, 1.6875, 0.375
    The replay without client 2 takes U of round 0 as it is, (0, 0) → (1.5 / 2, 3 / 2) = (0.75, 1.5). A calibration of
    one step goes (0.625, 0) and (0, 1.25); with the kept lengths
      of round 1: (0.75 + 0.75 / 2, 1.5 + 2.25 / 2)     = (1.125, 2.625)
      of round 2: (0.75 + 0.375 / 2, 1.5 + 1.6875 / 2)  = (0.9375, 2.34375)
    """
    updates = trained(tmp_path / "run", every=every)
    assert sorted(path.name for path in updates.iterdir()) == (["0", "1", "2"] if every == 1 else ["0", "2"])
    assert {path.stem for path in (updates / "2").iterdir()} == {"0", "1", "2", "sent"}
    assert weights(erased(tmp_path / "erased", updates))["network.weight"].tolist() == [expected]


def test_a_calibrated_movement_has_the_kept_length_and_the_new_direction() -> None:
    assert calibrate(torch.tensor([3.0, 4.0]), torch.tensor([0.0, -2.0])).tolist() == [0, -5]
    assert calibrate(torch.tensor([[6.0], [8.0]]), torch.tensor([[-4.0], [3.0]])).tolist() == [[-8], [6]]
    assert calibrate(torch.tensor([3.0, 4.0]), torch.zeros(2)).tolist() == [0, 0]
    assert calibrate(torch.zeros(2), torch.tensor([0.0, 2.0])).tolist() == [0, 0]


def test_with_nobody_to_forget_and_as_many_epochs_it_is_fedavg(tmp_path: Path) -> None:
    """Each replayed round then begins where the kept one did, so that both movements, and their lengths, are equal."""
    settings: dict[str, Any] = {"data": Points(3, sizes=(2, 3)), "local_epochs": 2}
    torch.manual_seed(0)
    run = fit(tmp_path / "run", Wanderer(0.1), algorithm=FedAvg(), max_rounds=3, callbacks=[KeptUpdates()], **settings)
    torch.manual_seed(1)  # other first weights, which change nothing
    settings["algorithm"] = FedEraser(str(run.log_dir / "updates"))
    made = erased(tmp_path / "erased", run.log_dir, 3, (), module=Wanderer(0.1), **settings)
    found, wanted = weights(made), weights(run)
    assert found.keys() == wanted.keys()
    assert "network.1.running_var" in found
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    updates = trained(tmp_path / "run")
    whole = erased(tmp_path / "whole", updates, 3)
    erased(tmp_path / "parts", updates, 1)
    assert_same(weights(whole), weights(erased(tmp_path / "parts", updates, 3, ckpt_path="last")))


def test_groups_replay_as_one_client_after_the_other(tmp_path: Path) -> None:
    updates = trained(tmp_path / "run", executor="vectorized")
    made = [erased(tmp_path / one, updates, executor=one) for one in ("sequential", "vectorized")]
    assert_same(weights(made[0]), weights(made[1]))


def test_a_finished_run_is_tested_without_the_kept_updates(tmp_path: Path) -> None:
    updates = trained(tmp_path / "run")
    made = erased(tmp_path / "erased", updates)
    shutil.rmtree(updates)
    method = FedEraser(str(updates), weighting="uniform")
    found = trainer(tmp_path / "tested", participation=FullParticipation(absent=[2])).test(
        LeastSquares(), Points(3), method, str(made.log_dir / "checkpoints/last.ckpt")
    )
    assert found["global/loss"] == made.metrics["global/loss"]


@pytest.mark.long
def test_two_processes_are_one(tmp_path: Path) -> None:
    base = ["fit", "-c", ROOT / "configs/quickstart.yaml", "--trainer.max_rounds", "2", "--trainer.accelerator", "cpu"]
    base += ["--trainer.local_epochs", "1", "--trainer.participation", "FullParticipation", "--data.num_clients", "4"]
    base += ["--trainer.protocols", "[GlobalTest]"]
    callback, models = "[{class_path: lit_fed.record.unlearning.kept_updates.KeptUpdates}]", []
    for devices in ("1", "2"):
        (folder := tmp_path / devices).mkdir()
        start = [*base, "--trainer.devices", devices]
        done = run_cli(*start, "--trainer.callbacks", callback, cwd=folder)
        assert done.returncode == 0, done.stderr
        method = ["--algorithm", "lit_fed.record.unlearning.eraser.FedEraser"]
        method += ["--algorithm.updates", "lightning_logs/version_0/updates"]
        done = run_cli(*start, *method, "--trainer.participation.absent", "[3]", cwd=folder)
        assert done.returncode == 0, done.stderr
        models.append(saved_weights(folder / "lightning_logs/version_1"))
    assert_same(*models)


@pytest.mark.parametrize("settings", [{"privacy": ClientLevel(1.0, 1.0)}, {"secure_sum": SecureSum(3, 0.5)}])
def test_single_updates_are_not_kept_where_they_are_hidden(tmp_path: Path, settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks: KeptUpdates .*; leave one out$"):
        trained(tmp_path, **settings)
    assert not [*tmp_path.rglob("updates")]


@pytest.mark.parametrize(
    "late",
    [Asynchronous(2, 1), FullParticipation(stragglers=Stragglers(0.025, 0.0, "next_round"))],
    ids=["async", "late"],
)
def test_late_updates_are_neither_kept_nor_replayed(tmp_path: Path, late: Any) -> None:
    ends = r"takes updates that start from the round's model, .* leave one out$"
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: KeptUpdates {ends}"):
        trained(tmp_path / "run", participation=late)
    updates = trained(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"^algorithm FedEraser {ends}"):
        erased(tmp_path / "erased", updates, 3, participation=late)


def test_what_was_not_kept_is_named(tmp_path: Path) -> None:
    updates = trained(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has 3 kept rounds; set trainer\.max_rounds to that$"):
        erased(tmp_path / "longer", updates, 4)
    with pytest.raises(ConfigError, match=r"/elsewhere has no kept round 0; set it to a run's folder updates$"):
        erased(tmp_path / "none", tmp_path / "elsewhere")
    other = LeastSquares()
    other.network = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"has other tensors of client 0 than this model's; set the run's model$"):
        erased(tmp_path / "model", updates, module=other)
    (updates / "1/0.safetensors").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"1/0\.safetensors is missing or damaged; "):
        erased(tmp_path / "damaged", updates)
    sampled = trained(tmp_path / "sampled", participation=UniformParticipation(1))
    with pytest.raises(ConfigError, match=r"safetensors is missing or damaged; take a run in which all clients"):
        erased(tmp_path / "all", sampled, absent=())
