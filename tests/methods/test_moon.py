"""MOON against arithmetic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Digits
from lit_fed.errors import ConfigError
from lit_fed.losses import model_contrast
from lit_fed.methods import FD, FedAvg, FedDecorr, FedProx, Moon
from tests.methods.support import client_state, run_quickstart
from tests.support import LeastSquares, Points, assert_same, fit, saved_weights, weights


class Drawn(LightningModule):
    """Features z = Wx from W = 1, loss ½‖z − t‖² with t = (0, 1) for y = 2, client 0's, and t = (0, −1) for y = 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.reads = nn.Linear(2, 2, bias=False), nn.Identity()
        nn.init.eye_(self.body.weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        target = torch.stack([torch.zeros(len(y)), 3.0 - y], dim=1)
        loss: Tensor = 0.5 * (self.reads(self.body(x)) - target).square().sum(1).mean()
        return loss


class SamePoint(Points):
    """Both clients have x = (1, 0)."""

    def load_arrays(self) -> Any:
        arrays = super().load_arrays()
        arrays.train.x[:] = (1.0, 0.0)
        return arrays


def test_the_loss_by_hand() -> None:
    # z = (1, 0), z₊ = (0, 2), z₋ = (3, 0), τ = ½: cosines 0 and 1; −ln(e⁰/(e⁰ + e²)) = ln(1 + e²) = 2.126928
    # Equally near: ln 2.
    z, near, far = (torch.tensor([v]) for v in ([1.0, 0.0], [0.0, 2.0], [3.0, 0.0]))
    assert model_contrast(z, near, far, 0.5).item() == pytest.approx(2.126928)
    assert model_contrast(z, near, near, 0.5).item() == pytest.approx(math.log(2))


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # z is W's first column, from (1, 0); learning rate ½; μ = 1, τ = ½.
    # Round 0: near = far, so the contrast is ln 2 without gradient.
    #   client 0: z − t = (1, −1) → z = (0.5, 0.5); client 1: (1, 1) → z = (0.5, −0.5); global (0.5, 0)
    # Round 1, client 0: z = near = (0.5, 0), far = (0.5, 0.5): cosines 1 and 1/√2.
    #   ∇cos(z, far) = far/(|z||far|) − cos·z/|z|² = (√2, √2) − (√2, 0) = (0, √2), ∇cos(z, near) = 0
    #   gradient σ((1/√2 − 1)/τ)/τ·(0, √2) with σ(−0.585786) = 0.357602: (0, 1.011450)
    #   z = (0.5, 0) − ½·((0.5, −1) + (0, 1.011450)) = (0.25, −0.005725)
    # Client 1 mirrors it: the global z = (0.25, 0).
    data = SamePoint(sizes=(2, 2))
    made = fit(tmp_path, Drawn(), data, Moon(mu=1.0, head="reads"), max_rounds=2, evaluate_every=0)
    own = client_state(made, 0)["state/previous.body.weight"]
    assert [own[0][0], own[1][0]] == pytest.approx([0.25, -0.005725], abs=1e-5)
    shared = weights(made)["body.weight"][:, 0].tolist()
    assert shared == pytest.approx([0.25, 0.0], abs=1e-6)
    assert made.metrics["train/contrast"] == pytest.approx(math.log1p(math.exp((math.sqrt(0.5) - 1) / 0.5)), abs=1e-6)


def test_without_the_term_it_is_fedavg(tmp_path: Path) -> None:
    moon = run_quickstart(tmp_path / "moon", "--algorithm", "Moon", "--algorithm.mu", "0")
    assert_same(saved_weights(moon), saved_weights(run_quickstart(tmp_path / "fedavg")))


@pytest.mark.parametrize(
    ("method", "who"),
    [
        (Moon(), "algorithm Moon"),
        (FedAvg(regularizer=FD()), "regularizer FD"),
        (FedProx(regularizer=FedDecorr()), "regularizer FedDecorr"),
    ],
)
def test_where_features_cannot_move_it_is_refused(tmp_path: Path, method: Any, who: str) -> None:
    # Logistic regression's features are its input: every model has the same, and a term of them no gradient.
    task = Classifier("logistic", input_shape=(1, 8, 8))
    with pytest.raises(ConfigError, match=rf"{who} needs parameters that train below the head: choose a network with"):
        fit(tmp_path, task, Digits(num_clients=2, max_train_samples=40), method)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.mu is -1"):
        Moon(mu=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.temperature is 0"):
        Moon(temperature=0.0)


def test_a_task_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm Moon needs features: name the submodule .* as algorithm\.head"):
        fit(tmp_path, LeastSquares(), algorithm=Moon())
