"""What a task does not train itself stays as it is under every method, and is the task's own again after a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_fed import Model, Split
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, Points, fit, trainer, weights


class Half(LeastSquares):
    """Its first layer is a constant: f(x) = w·(3x)."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__(lr)
        first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        first.weight.data = 3 * torch.eye(2)
        first.weight.requires_grad_(False)
        nn.init.zeros_(last.weight)
        self.network = nn.Sequential(first, last)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1 / 18, weight_decay=0.0)


class FirstShared(FedAvg):
    """Shares the first layer and keeps the last with the client, whatever the task trains."""

    def split(self, model: Model, round_idx: int) -> Split:
        return Split(("network.0.weight",), ("network.1.weight",))


def test_a_layer_that_the_task_froze_neither_trains_nor_travels(tmp_path: Path) -> None:
    # ½(3w₁ − 2)² has the gradient 3(3w₁ − 2) = −6, so a step of 1/18 gives w₁ = 1/3; ½(3w₂ − 4)² likewise w₂ = 2/3.
    # Weights 1 and 3: w = (1/3·1/4, 2/3·3/4) = (1/12, 1/2).
    made = fit(tmp_path, Half(), Points(), max_rounds=1)
    assert weights(made)["network.0.weight"].tolist() == [[3.0, 0.0], [0.0, 3.0]]
    torch.testing.assert_close(weights(made)["network.1.weight"], torch.tensor([[1 / 12, 1 / 2]]))
    assert made.metrics["comm/uplink_bytes"] == made.metrics["comm/downlink_bytes"] == 2 * 4 * 2


def test_no_split_of_a_method_changes_that(tmp_path: Path) -> None:
    made = fit(tmp_path, Half(), Points(), FirstShared(), max_rounds=1, protocols=[])
    split = made.run.federation.loops["model"].model.split
    assert split == Split((), ("network.1.weight",), ("network.0.weight",))


def test_which_parameters_train_is_the_tasks_own_again_afterwards(tmp_path: Path) -> None:
    class Frozen(FedAvg):
        def split(self, model: Model, round_idx: int) -> Split:
            return Split(("network.1.weight",), (), ("network.0.weight",))

    def trains(task: LeastSquares) -> list[bool]:
        return [parameter.requires_grad for parameter in task.parameters()]

    task = Half()
    task.requires_grad_(True)
    fit(tmp_path, task, Points(), Frozen())
    assert trains(task) == [True, True]

    class Broken(Half):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            raise ConfigError("out of order")

    broken = Broken()
    broken.requires_grad_(True)
    with pytest.raises(Exception, match="out of order"):
        trainer(tmp_path).fit(broken, Points(), Frozen())
    assert trains(broken) == [True, True]
