"""How long a client trains: epochs, fractions of one, steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client, Phase
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, Points, fit, weights


class Counting(LeastSquares):
    """Takes down its batches, by round and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[int]] = []
        self.planned: list[tuple[int, int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])
        self.planned.append((self.trainer.num_training_batches, int(self.trainer.estimated_stepping_batches)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs[-1].append(batch_idx)
        return super().training_step(batch, batch_idx)


def singles(count: int) -> Points:
    """One client with so many batches of one sample."""
    data = Points(num_clients=1, sizes=(count, count))
    data.batch_size = 1
    return data


@pytest.mark.parametrize(
    ("batches", "lengths", "epochs"),
    [
        (4, {"local_epochs": 0.5}, [2]),
        (3, {"local_epochs": 0.5}, [2]),  # rounded up
        (5, {"local_epochs": 0.01}, [1]),  # at least one
        (4, {"local_epochs": 1.5}, [4, 2]),
        (3, {"local_epochs": 2}, [3, 3]),
        (3, {"local_epochs": 2.0}, [3, 3]),
        (3, {"local_steps": 2}, [2]),
        (3, {"local_steps": 7}, [3, 3, 1]),
        (100, {"local_epochs": 0.55}, [55]),  # 0.55·100 is 55.000000000000007 in floating point
    ],
)
def test_batches_of_a_round(tmp_path: Path, batches: int, lengths: dict[str, Any], epochs: list[int]) -> None:
    task = Counting()
    made = fit(tmp_path, task, singles(batches), max_rounds=1, protocols=[], **lengths)
    assert task.epochs == [list(range(count)) for count in epochs]
    assert task.planned == [(batches, sum(epochs))] * len(epochs)
    # Every step halves the distance to 2.
    assert float(weights(made)["network.weight"][0, 0]) == pytest.approx(2 * (1 - 0.5 ** sum(epochs)))


@pytest.mark.parametrize(
    ("batches", "accumulate", "lengths", "steps"),
    [
        (3, 2, {"local_epochs": 2}, 4),  # the third batch of each epoch steps alone
        (4, 2, {"local_epochs": 2}, 4),
        (3, 2, {"local_steps": 7}, 5),  # 2 + 2 + 1
        (4, 3, {"local_epochs": 0.5}, 1),
    ],
)
def test_steps_that_accumulate_are_foretold(
    tmp_path: Path, batches: int, accumulate: int, lengths: dict[str, Any], steps: int
) -> None:
    """What a schedule is laid out for, ``estimated_stepping_batches``, is what the optimizer then takes."""
    taken = []

    class Foreseeing(Counting):
        def on_train_end(self) -> None:
            taken.append(self.global_step)

    task = Foreseeing()
    fit(tmp_path, task, singles(batches), max_rounds=1, accumulate_grad_batches=accumulate, protocols=[], **lengths)
    assert taken == [steps]
    assert {planned for _, planned in task.planned} == {steps}


def test_a_schedule_over_the_clients_steps(tmp_path: Path) -> None:
    """A stranger's OneCycleLR asks how many steps there will be before any client is known."""
    seen: list[float] = []

    class OneCycle(LeastSquares):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total, anneal_strategy="linear")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    fit(tmp_path, OneCycle(), singles(10), max_rounds=1, protocols=[])
    # From 1/25 up to 1 over 30 % of 10 steps (to step 2), down to 1/25/10⁴ in the last.
    assert len(seen) == 10
    assert (seen[0], seen[2], seen[9]) == pytest.approx((0.04, 1.0, 0.04e-4))


class Halting(Counting):
    """Says -1 before its third batch, as Lightning allows: the rest of the epoch is left out."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_a_hook_that_ends_the_epoch(tmp_path: Path) -> None:
    task = Halting()
    fit(tmp_path, task, singles(5), max_rounds=1, local_epochs=2, protocols=[])
    assert task.epochs == [[0, 1], [0, 1]]


def test_a_hook_that_ends_every_epoch_at_once_ends_the_work(tmp_path: Path) -> None:
    class Refusing(Counting):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    task = Refusing()
    made = fit(tmp_path, task, singles(5), max_rounds=1, local_steps=3, protocols=[])
    assert task.epochs == [[]]
    assert weights(made)["network.weight"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("skipped", [None, {"loss": None}])
def test_a_skipped_batch_takes_no_step_and_logs_no_loss(tmp_path: Path, skipped: Any) -> None:
    class Skipping(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return skipped if batch_idx < 2 else {"loss": self.loss(batch), "note": 3}

    made = fit(tmp_path, Skipping(), singles(4), max_rounds=1, protocols=[])
    # Two steps are left: 2·(1 − ¼); their losses are ½·2² and ½·1².
    assert weights(made)["network.weight"].tolist() == [[1.5, 0.0]]
    assert made.metrics["train/loss"] == pytest.approx((2 + 0.5) / 2)


class Still(FedAvg):
    """Goes through the data once without moving, and sends the mean gradient in the model's place."""

    needs = frozenset({"loss"})

    def phases(self, client: Client) -> list[Any]:
        return [Phase("still", client.train_loader(), epochs=1, moves=False)]

    def finish(self, client: Client) -> Any:
        assert client.model.tensor("network.weight").tolist() == [[0.0, 0.0]]
        update = super().finish(client)
        update.payload["network.weight"] = client.results["still"]["network.weight"]
        return update


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_phase_that_does_not_move_gives_the_mean_gradient(tmp_path: Path, batch_size: int, accumulate: int) -> None:
    """Over samples, however they are cut into batches and steps."""

    class Different(LeastSquares):
        def loss(self, batch: Any) -> Tensor:
            return (self(batch[0]).squeeze(1) * batch[1]).mean()

    class Numbers(Points):
        def load_arrays(self) -> Any:
            arrays = super().load_arrays()
            arrays.train.y[:] = [0, 1, 2, 3, 4]
            return arrays

    data = Numbers(num_clients=1, sizes=(5, 5))
    data.batch_size = batch_size
    made = fit(tmp_path, Different(), data, Still(), max_rounds=1, protocols=[], accumulate_grad_batches=accumulate)
    # The gradient of a sample is (y, 0); the mean of 0 … 4 is 2.
    assert weights(made)["network.weight"].flatten().tolist() == pytest.approx([2.0, 0.0])


def test_a_skipped_batch_is_no_part_of_the_mean_gradient(tmp_path: Path) -> None:
    class Skipping(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else 3 * self(batch[0]).mean()

    made = fit(tmp_path, Skipping(), singles(3), Still(), max_rounds=1, protocols=[])
    assert weights(made)["network.weight"].tolist() == [[3.0, 0.0]]  # of the two batches that were not skipped


def test_a_skipped_batch_leaves_accumulated_gradients_to_be_stepped_on(tmp_path: Path) -> None:
    class Skipping(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.loss(batch)

    made = fit(tmp_path, Skipping(), singles(2), max_rounds=1, protocols=[], accumulate_grad_batches=2)
    # As in Lightning: half of the first batch's gradient −2, a step of ½ along it.
    assert weights(made)["network.weight"].tolist() == [[0.5, 0.0]]
