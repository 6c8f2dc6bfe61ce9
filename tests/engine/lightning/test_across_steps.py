"""A module's own steps and schedules, by Lightning's hooks, with numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.methods import FedAvg, FedRep
from tests.support import LeastSquares, Points, assert_same, fit, trainer, weights


class Sharp(LeastSquares):
    """Sharpness-aware: takes the gradient at w + ½ where it is at w, so the closure has to run the model again."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        with torch.no_grad():
            self.network.weight.add_(0.5)  # type: ignore[operator]  # a tensor
        optimizer_closure()
        with torch.no_grad():
            self.network.weight.sub_(0.5)  # type: ignore[operator]  # a tensor
        optimizer.step()


def test_a_modules_own_step_may_take_the_gradients_again(tmp_path: Path) -> None:
    # At ½ the gradient of the first weight is −1½, the second client's −3½; rate ½; one sample and three.
    made = fit(tmp_path, Sharp(), max_rounds=1)
    # A weight that had ½ added and taken away again has lost its last bits.
    assert weights(made)["network.weight"].flatten().tolist() == pytest.approx([0.75 / 4, 1.75 * 3 / 4], rel=1e-6)


class Timm(LeastSquares):
    """A scheduler that is not torch's, stepped by the module, as those of timm are."""

    class Halving:
        """Halves with every epoch."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step_to(self, epoch: int) -> None:
            self.optimizer.param_groups[0]["lr"] = 0.5 / 2 ** (epoch + 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [self.Halving(optimizer)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_to(self.current_epoch)


def test_a_schedule_of_the_modules_own_counts_rounds(tmp_path: Path) -> None:
    # Rates ½, ¼, ⅛ on the gradient w − 2: 0 → 1 → 1¼ → 1¼ + ¾/8.
    made = fit(tmp_path, Timm(), Points(1), max_rounds=3)
    assert weights(made)["network.weight"].tolist() == [[1.34375, 0.0]]
    parts = trainer(tmp_path / "parts", max_rounds=2)
    parts.fit(Timm(), Points(1), FedAvg())
    again = fit(tmp_path / "parts", Timm(), Points(1), max_rounds=3, ckpt_path="last")
    assert weights(again)["network.weight"].tolist() == [[1.34375, 0.0]]


def test_a_schedule_may_span_the_steps_of_a_clients_work(tmp_path: Path) -> None:
    rates = []

    class Linear(LeastSquares):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = int(self.trainer.estimated_stepping_batches)
            fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": fall, "interval": "step"}}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]  # one optimizer
            return super().training_step(batch, batch_idx)

    data = Points(2, sizes=(4, 2))
    data.batch_size = 1
    fit(tmp_path, Linear(), data, max_rounds=1)
    assert rates == [1.0, 0.75, 0.5, 0.25, 1.0, 0.5]


class Counting(LeastSquares):
    """Momentum and a schedule by round; counts how often it is asked for an optimizer."""

    options: dict[str, Any] = {}  # noqa: RUF012  # replaced, never changed

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def configure_optimizers(self) -> Any:
        self.asked += 1
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class CountingOnce(Counting):
    """The same, and says that it answers everybody alike."""

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()

    configure_optimizers.same_for_all = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"dampening": 0.25}, {"nesterov": True}], ids=str)
@pytest.mark.parametrize(("algorithm", "phases"), [(FedAvg, 1), (lambda: FedRep(personal=["network.1"]), 2)])
def test_optimizers_that_are_used_again_are_as_new(
    tmp_path: Path, algorithm: Any, phases: int, options: dict[str, Any]
) -> None:
    tasks = [Counting(), CountingOnce()]
    for task in tasks:
        task.options = options
    made = [
        fit(tmp_path / str(idx), task, Points(3), algorithm(), max_rounds=3, local_epochs=2)
        for idx, task in enumerate(tasks)
    ]
    fresh, again = map(weights, made)
    assert_same(fresh, again)
    # Three clients in three rounds, once for each phase's schedule, thrice to look at it before the run. Used again,
    # the first client's serve all.
    assert [task.asked for task in tasks] == [phases * (9 + 1) + 3, phases * (1 + 1) + 3]
