"""A client's local work: optimizers, schedules, gradients, precision, logging."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.callbacks import Callback
from lit_fed.data import Digits, Parts
from lit_fed.engine.wire.batches import batch_size_of, slice_batch
from lit_fed.errors import ConfigError
from lit_fed.participation import FullParticipation
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, fit, rows, weights


def final(made: Any) -> list[float]:
    """The two weights of the global least-squares model."""
    return weights(made)["network.weight"][0].tolist()


def test_gradients_clipped_by_norm(tmp_path: Path) -> None:
    # Gradients (−2, 0) and (0, −4) are scaled to norm 1; steps of ½: (0.5, 0) and (0, 0.5); mean with weights 1 and 3.
    made = fit(tmp_path, max_rounds=1, gradient_clip_val=1.0)
    assert final(made) == pytest.approx([0.125, 0.375], rel=1e-5)  # torch divides by the norm plus 1e-6


def test_gradients_clipped_by_value(tmp_path: Path) -> None:
    # Every entry is clamped to ±0.25; steps of ½: (0.125, 0) and (0, 0.125); mean with weights 1 and 3.
    made = fit(tmp_path, max_rounds=1, gradient_clip_val=0.25, gradient_clip_algorithm="value")
    assert final(made) == [0.03125, 0.09375]


def test_accumulated_gradients(tmp_path: Path) -> None:
    # Client 1 in batches of 1, two to a step: mean gradient −4, w₂ = 2; the third batch alone, halved as Lightning
    # does: ½·(2 − 4) = −1, w₂ = 2.5. Client 0's only batch, halved: −1, w₁ = 0.5. Mean: (0.5/4, 3·2.5/4).
    data = Points()
    data.batch_size = 1
    assert final(fit(tmp_path, data=data, max_rounds=1, accumulate_grad_batches=2)) == [0.125, 1.875]


class Gradients(LeastSquares):
    """Notes at the end of a client's training whether there are gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def note(self, when: str) -> None:
        self.seen.append((when, self.network.weight.grad is not None))

    def on_train_end(self) -> None:
        self.note("trained")


class WhenTakenIn(Callback):
    """Has the module note it when a client's update is taken in."""

    def __init__(self, module: Gradients) -> None:
        self.module = module

    def on_client_end(self, run: Any, update: Any) -> None:
        self.module.note("taken in")


def test_gradients_are_let_go_when_a_client_is_done(tmp_path: Path) -> None:
    module = Gradients()
    fit(tmp_path, module, max_rounds=1, callbacks=[WhenTakenIn(module)])
    assert module.seen == [("trained", True)] * 2 + [("taken in", False)] * 2  # small updates go on together


class Scheduled(LeastSquares):
    """Halves its learning rate once a round, or with every step."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def test_schedule_over_rounds(tmp_path: Path) -> None:
    # w ← w − lr·(w − 2) with lr ½, ¼, ⅛: 1, then 1 + ¼ = 1.25, then 1.25 + ⅛·0.75 = 1.34375.
    made = fit(tmp_path / "whole", Scheduled("epoch"), Points(1), max_rounds=3)
    assert final(made) == [1.34375, 0.0]
    fit(tmp_path / "parts", Scheduled("epoch"), Points(1), max_rounds=2)
    parts = fit(tmp_path / "parts", Scheduled("epoch"), Points(1), max_rounds=3, ckpt_path="last")
    assert final(parts) == [1.34375, 0.0]


def test_schedule_over_steps_starts_anew_for_every_client(tmp_path: Path) -> None:
    # Two steps with lr ½ and ¼ each round: 1, 1.25; then 1.25 + ½·0.75 = 1.625, 1.625 + ¼·0.375 = 1.71875.
    made = fit(tmp_path, Scheduled("step"), Points(1), max_rounds=2, local_epochs=2)
    assert final(made) == [1.71875, 0.0]


class FirstClass(Points):
    """As `Points`, everybody in class 0."""

    num_classes = 2

    def load_arrays(self) -> Parts:
        parts = super().load_arrays()
        return Parts(*(replace(part, y=np.zeros_like(part.y)) for part in (parts.train, parts.test)))


def test_schedule_of_the_classifier_from_config(tmp_path: Path) -> None:
    # All labels are class 0 and the logits (w, −w): a step moves w by lr·(1 − p), p = σ(2w).
    def run(scheduler: Any) -> float:
        network = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(network.weight)
        module = Classifier(network, lambda p: torch.optim.SGD(p, lr=1.0), scheduler)
        return float(weights(fit(tmp_path, module, FirstClass(1), max_rounds=2))["network.weight"][0, 0])

    def p(w: float) -> float:
        return 1 / (1 + math.exp(-2 * w))

    first = 1 - p(0.0)
    halved = run(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.5))
    assert halved == pytest.approx(first + 0.5 * (1 - p(first)))
    assert run(None) == pytest.approx(first + (1 - p(first)))


def test_momentum_does_not_leak_between_clients_or_rounds(tmp_path: Path) -> None:
    # With one step a client, momentum has nothing to remember: the same as without (see test_fedavg).
    class Momentum(LeastSquares):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    assert final(fit(tmp_path, Momentum())) == [0.46875, 2.4375]


def test_local_steps_go_through_the_data_as_often_as_needed(tmp_path: Path) -> None:
    # Five full-batch steps towards 2 from 0: 2·(1 − 2⁻⁵) = 1.9375.
    assert final(fit(tmp_path, data=Points(1), max_rounds=1, local_steps=5)) == [1.9375, 0.0]


class Manual(LeastSquares):
    """Steps two optimizers itself, one for each half of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), torch.optim.SGD(self.parameters(), lr=0.25)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_manual_optimisation_with_two_optimizers(tmp_path: Path) -> None:
    # Learning rates ½ and ¼ in turn: 1, then 1 + ¼ = 1.25.
    assert final(fit(tmp_path, Manual(), Points(1), max_rounds=1)) == [1.25, 0.0]


class TwoOptimizers(LeastSquares):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


class OnPlateau(LeastSquares):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TwoOptimizers(), "TwoOptimizers has 2 optimizers; set self.automatic_optimization = False"),
        (OnPlateau(), "ReduceLROnPlateau watches a metric"),
        (LeastSquares(lr=-0.1), r"model\.optimizer cannot be made: Invalid learning rate: -0\.1"),
    ],
)
def test_refused_before_any_training(tmp_path: Path, module: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, module)
    assert not (tmp_path / "lightning_logs").exists()


class Skipping(LeastSquares):
    """Skips its first batch, as Lightning allows, and returns a dict for the second."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 0 else {"loss": super().training_step(batch, batch_idx)}


def test_none_skips_a_batch_and_a_dict_is_a_loss(tmp_path: Path) -> None:
    # Client 1 in three batches of 1: none, then 2, then 2 + ½·2 = 3; client 0 has one batch and skips it. 3·3/4.
    data = Points()
    data.batch_size = 1
    assert final(fit(tmp_path, Skipping(), data, max_rounds=1)) == [0.0, 2.25]


class Counting(LeastSquares):
    """Logs a torchmetrics metric."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.update(len(batch[0]))
        self.log("train/seen", self.seen)
        return super().training_step(batch, batch_idx)


def test_a_logged_metric_is_computed_once_a_client_and_reset(tmp_path: Path) -> None:
    made = fit(tmp_path, Counting(), max_rounds=2)
    values = [float(r["value"]) for r in rows(made.log_dir / "clients.csv") if r["metric"] == "train/seen"]
    assert values == [1.0, 3.0, 1.0, 3.0]


class Backwards(FullParticipation):
    """Everybody, last client first."""

    def select(self, round_idx: int) -> list[int]:
        return super().select(round_idx)[::-1]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_the_order_of_clients_does_not_matter(tmp_path: Path, precision: str) -> None:
    found = []
    for participation in (FullParticipation(), Backwards()):
        torch.manual_seed(0)
        data = Points(num_clients=6, sizes=(2, 3))
        found.append(
            weights(fit(tmp_path, Wanderer(), data, Wandering(), precision=precision, participation=participation))
        )
    if precision == "64-true":  # means are summed in float64, which is exact only for narrower terms
        torch.testing.assert_close(found[0], found[1], rtol=1e-14, atol=1e-15)
    else:
        assert_same(*found)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_really_computes_in_it(tmp_path: Path, precision: str) -> None:
    seen = []

    class Watching(LeastSquares):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(super().forward(x).dtype)
            return super().forward(x)

    module = Watching()
    made = fit(tmp_path, module, max_rounds=1, precision=precision)
    assert set(seen) == {torch.bfloat16}  # on the CPU Lightning replaces 16-mixed by bf16-mixed, and says so
    assert module.network.weight.dtype == torch.float32
    assert final(made) == [0.25, 1.5]  # these values are exact in either type


def test_one_module_instance_serves_every_client(tmp_path: Path) -> None:
    weights_seen = set()

    class Watching(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weights_seen.add(id(self.network.weight))
            return super().training_step(batch, batch_idx)

    module = Watching()
    fit(tmp_path, module, Points(num_clients=9))
    assert weights_seen == {id(module.network.weight)}


def test_the_same_module_trains_under_a_plain_lightning_trainer(tmp_path: Path) -> None:
    lightning.seed_everything(0)
    data = Digits(batch_size=64, val_fraction=0.1)
    module = Classifier("small_cnn", lambda p: torch.optim.Adam(p, lr=3e-3), input_shape=(1, 8, 8))
    plain = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    plain.fit(module, data)
    assert plain.callback_metrics["train/loss"] < 0.5
    assert plain.callback_metrics["val/acc"] > 0.8
    assert plain.test(module, data, verbose=False)[0]["test/acc"] > 0.8


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="torch.compile needs a compiler")
def test_compiled_networks_give_the_same(tmp_path: Path) -> None:
    made = fit(tmp_path, compile=True)
    assert final(made) == pytest.approx([0.46875, 2.4375])
    assert list(weights(made)) == ["network.weight"]


def test_batch_size_of_any_batch() -> None:
    x = torch.zeros(7, 2)
    assert [batch_size_of(batch) for batch in (x, (x, x), {"a": [x]}, torch.tensor(1.0), "none")] == [7, 7, 7, 1, 1]


@pytest.mark.parametrize(("size", "world"), [(8, 2), (7, 2), (7, 3), (2, 3), (1, 4)])
def test_slices_of_a_batch_weigh_like_the_whole(size: int, world: int) -> None:
    """Averaging the parts' scaled means over processes gives the mean of the batch, however unequal the parts."""
    x = torch.arange(float(size))
    parts = [slice_batch((x, {"y": x}), rank, world) for rank in range(world)]
    averaged = sum(part[0].mean() * weight for part, weight in parts) / world
    assert averaged == pytest.approx(float(x.mean()))
    assert all(len(part[0]) == len(part[1]["y"]) >= 1 for part, _ in parts)


def test_dropout_follows_the_seed_and_nothing_else(tmp_path: Path) -> None:
    def run(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(11)
        module = LeastSquares()
        module.network = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        torch.manual_seed(noise)  # what the global generator did before must not matter
        return weights(fit(tmp_path, module, seed=seed))

    assert_same(run(1, noise=5), run(1, noise=6))
    assert not torch.equal(run(1, noise=5)["network.0.weight"], run(2, noise=5)["network.0.weight"])
