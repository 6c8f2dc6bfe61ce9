"""Groups are trusted for what they have shown: as one client after the other, or refused before a round is kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Arrays
from lit_fed.engine.vectorized.executor import VectorizedExecutor
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import FedALA, FedAvg, FedDyn, FedGen, FedSpeed, HFedCKD, Scaffold
from tests.engine.vectorized.test_executor import Cracked, Sized, everything, federate, sgd
from tests.support import (
    ROOT,
    LeastSquares,
    Threes,
    assert_same,
    client_states,
    fit,
    rows,
    run_cli,
    saved_weights,
    weights,
)  # fmt: skip

SIZES = (3, 30, 5, 20, 12, 26, 9, 68)  # batches of 8: of one client 1, of another 9


class Skewed(Sized):
    """All but the two smallest clients have both classes."""

    def load_arrays(self) -> Arrays:
        found = super().load_arrays()
        found.train.y[np.isin(found.train.clients, np.argsort(self.sizes)[:2])] = 0
        return found


class Task(Classifier):
    """A linear layer; its objective is a hook."""

    def __init__(self) -> None:
        super().__init__(network=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), num_classes=2, optimizer=sgd)

    def mean_loss(self, batch: Any, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch)


class ClassWeights(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 9.0]))


class Padded(Task):
    """Reads signs of values as words, of which one is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, 2, padding_idx=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.words((batch[0] > 0).long()).mean(1), batch[1])


class TrainingBatches(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) / self.trainer.num_training_batches


class SteppingBatches(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) * (1 - self.global_step / self.trainer.estimated_stepping_batches)


class GlobalStep(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) / (1 + self.trainer.global_step)


class BatchIdx(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) / (1 + batch_idx)


class LaterSum(Task):
    """The mean, and from round 3 on a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch, "sum" if self.current_epoch > 2 else "mean")


class LateStepSum(Task):
    """The mean, and a sum from the eighth step of a client on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch, "sum" if self.global_step > 7 else "mean")


class Beyond(torch.optim.SGD):
    """Halves all weights where the norm of all gradients is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        if torch.stack([p.detach().norm() for p in parameters]).norm() > 2.2:
            for parameter in parameters:
                parameter.data.mul_(0.5)
        super().step()


class Threshold(Task):
    def configure_optimizers(self) -> Any:
        return Beyond(self.parameters(), lr=0.05)


class PythonsDraw(Task):
    """Draws at a client's ninth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) * (random.random() if self.global_step == 8 else 1)


class NumpysDraw(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) * (np.random.random() if self.current_epoch == 2 else 1)  # noqa: NPY002


class OwnDraw(Task):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) * (float(self.draws.random()) if self.current_epoch == 2 else 1)


class TestDraw(Task):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        draw = random.random()
        self.log("test/loss", self.mean_loss(batch) + (draw if draw > 0.7 else 0))


class WeighedMetric(Task):
    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch)
        self.seen.update(loss.detach(), len(batch[0]))
        self.log("seen", self.seen)
        return loss


class WeighedLog(Task):
    """Gives each batch's size to its log, which is that of a sample where samples are taken one by one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch)
        self.log("seen", loss, batch_size=len(batch[0]))
        return loss


class Rate(Task):
    """Reads its optimizer's learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mean_loss(batch) * (10 * self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Skipping(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) < 3 else self.mean_loss(batch)


class LaterItem(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch)
        return loss * loss.item() if self.current_epoch == 1 else loss


class StepSchedule(Task):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Case:
    """A task that groups must train right or refuse.

    Args:
        task: The task.
        told: Of the refusal; None where groups are right.
        settings: The trainer's.
        data: The clients.
    """

    def __init__(self, task: Any, told: str | None, data: Any = Skewed, **settings: Any) -> None:
        self.task, self.told, self.data, self.settings = task, told, data, settings


UNEQUAL = r"self\.trainer\.{}, which differs between the clients of a group"
CASES: dict[str, Case] = {
    "class weights": Case(ClassWeights, None),
    "padding index": Case(Padded, None),
    "num_training_batches": Case(TrainingBatches, UNEQUAL.format("num_training_batches")),
    "estimated_stepping_batches": Case(SteppingBatches, UNEQUAL.format("estimated_stepping_batches")),
    "global_step": Case(GlobalStep, UNEQUAL.format("global_step"), schedule_steps="run"),
    "batch_idx": Case(BatchIdx, "batch_idx, which differs"),
    "later objective": Case(LaterSum, None),
    "late step": Case(LateStepSum, None),
    "threshold": Case(Threshold, "differs after training in a group and alone"),
    "random": Case(PythonsDraw, r"draws from Python's generator \(random\), which all clients share"),
    "numpy": Case(NumpysDraw, r"draws from NumPy's generator \(numpy\.random\), which all clients share"),
    "own generator": Case(OwnDraw, r"draws from self\.draws, which all clients share"),
    "test_step": Case(TestDraw, None),
    "metric": Case(WeighedMetric, None),
    "log": Case(WeighedLog, None),
    "rate": Case(Rate, None),
    "skipped batch": Case(Skipping, "training_step returns None, which skips a batch"),
    "item": Case(LaterItem, r"client \d fails in a group, and not alone: .*item"),
    "accumulation": Case(Task, "accumulate_grad_batches, the clients", accumulate_grad_batches=2),
    "schedule": Case(StepSchedule, "with a schedule by steps, the clients of a group need equally many"),
}


def run(folder: Path, how: str, case: Case, **settings: Any) -> FederatedTrainer:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # a user's own code draws from it
    given: dict[str, Any] = {"max_rounds": 5, "local_epochs": 2} | case.settings | settings
    return federate(folder / how, how, task=case.task, data=case.data(*SIZES), **given)


def told(made: FederatedTrainer) -> list[dict[str, float]]:
    """Every round's metrics without times."""
    found = rows(made.log_dir / "metrics.csv")
    return [{key: float(row[key] or "nan") for key in row if not key.startswith("time/")} for row in found]


def assert_near(one: FederatedTrainer, other: FederatedTrainer) -> None:
    a, b = weights(one), weights(other)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-4, atol=2e-6, msg=name)
    for left, right in zip(told(one), told(other), strict=True):
        assert right == pytest.approx(left, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_a_group_is_right_or_refused_and_auto_finishes_what_sequential_finishes(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    expected = run(tmp_path, "sequential", case)
    if case.told is None:
        assert_near(expected, run(tmp_path, "vectorized", case))
    else:
        with pytest.raises(ConfigError, match=rf"executor=vectorized cannot train these clients: .*{case.told}"):
            run(tmp_path, "vectorized", case)
    assert_near(expected, run(tmp_path, "auto", case))


class LateItem(Task):
    """Asks for a number at a client's ninth step, which the probe does not reach."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean_loss(batch)
        if self.global_step == 8 and not self.current_epoch:
            return loss * random.random() * loss.item()
        return loss


def test_auto_repeats_a_round_from_its_start_and_stays_with_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(LateItem, None)
    whole = federated(tmp_path / "alone", "sequential", case, max_rounds=4)
    capsys.readouterr()
    federated(tmp_path / "parts", "auto", case, max_rounds=2)
    line = "trainer.executor=auto trains one client after the other from round 0 on: client 7 fails in a group"
    assert capsys.readouterr().out.count(line) == 1
    resumed = federated(tmp_path / "parts", "auto", case, max_rounds=4, ckpt_path="last")
    assert "trains one client after the other as since an earlier round" in capsys.readouterr().out
    assert_same(everything(whole), everything(resumed))
    assert told(whole) == told(resumed)
    tables = [rows(made.log_dir / "clients.csv") for made in (whole, resumed)]
    one, other = ([row for row in table if row["metric"] != "time_s"] for table in tables)
    assert one == other


def federated(folder: Path, how: str, case: Case, **settings: Any) -> FederatedTrainer:
    """A run of a method whose clients keep states."""
    random.seed(0)
    return federate(folder, how, Scaffold(), case.task, case.data(*SIZES), local_epochs=2, **settings)


@pytest.mark.parametrize("how", ["vectorized", "auto"])
def test_a_client_that_fails_in_the_trial_is_named_in_its_round(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = federate(tmp_path, how, task=Task, data=Cracked(11, 26, 14, 9), on_client_failure="skip")
    assert "client 2 failed in round 0: OSError: its disk broke; the run continues" in capsys.readouterr().out
    executor: Any = made.run.federation.executor
    assert isinstance(executor if how == "vectorized" else executor.chosen, VectorizedExecutor)
    with pytest.raises(ClientFailure, match="client 2 failed in round 0: OSError: its disk broke"):
        federate(tmp_path / "raised", how, task=Task, data=Cracked(11, 26, 14, 9))


MODULE = """
from lit_fed import Classifier


class Late(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * loss.item() if self.current_epoch == 1 and self.global_step == 8 else loss
"""


@pytest.mark.long
def test_two_processes_repeat_the_round_in_which_a_group_of_one_fails(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(MODULE)
    words = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--model", "late.Late", "--model.network", "logistic"]
    words += ["--trainer.max_rounds", "3", "--trainer.executor", "auto", "--trainer.accelerator", "cpu"]
    for devices in ("1", "2"):
        done = run_cli(*words, "--trainer.devices", devices, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "one client after the other from round 1 on: client" in done.stdout
    assert_same(*(saved_weights(tmp_path / f"lightning_logs/version_{idx}") for idx in range(2)))


class Counting(FedAvg):
    """Its finish is no function of tensors, and changes the client's state in place."""

    def initial_state(self, client: Any) -> dict[str, Tensor]:
        return {"finished": torch.zeros(())}

    def finish(self, client: Any) -> Any:
        if client.id >= 0:  # a value of Python: each client is asked for itself
            client.state["finished"] = client.state["finished"] + 1
        return replace(super().finish(client), state={"finished": client.state["finished"]})


@pytest.mark.parametrize("executor", ["sequential", "vectorized", "auto"])
def test_a_client_that_is_compared_is_finished_once(tmp_path: Path, executor: str) -> None:
    made = fit(tmp_path, LeastSquares(lr=0.05), Threes(3), Counting(), max_rounds=3, executor=executor)
    assert [float(state["state/finished"]) for state in client_states(made.log_dir).values()] == [3.0] * 3


@pytest.mark.parametrize("method", [FedALA, FedGen, HFedCKD])
def test_a_method_that_needs_one_client_at_a_time_is_refused_before_its_first_round(
    tmp_path: Path, method: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot train these clients: algorithm {method.__name__} needs one client"):
        federate(tmp_path / "groups", "vectorized", method())
    assert not list(tmp_path.rglob("metrics.csv"))
    federate(tmp_path / "auto", "auto", method(), max_rounds=1)
    assert f"one client after the other: algorithm {method.__name__} needs one client" in capsys.readouterr().out


def convolution() -> Classifier:
    """Its bias has no gradient but rounding, because batch norm takes the mean away."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    return Classifier(network=nn.Sequential(*layers), optimizer=sgd)


@pytest.mark.parametrize("method", [FedDyn, FedSpeed, Scaffold])
def test_a_gradient_that_is_rounding_is_compared_at_the_scale_of_the_others(tmp_path: Path, method: type[Any]) -> None:
    alone, grouped = (federate(tmp_path / how, how, method(), convolution) for how in ("sequential", "vectorized"))
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(grouped)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
