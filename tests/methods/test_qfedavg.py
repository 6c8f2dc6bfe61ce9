"""q-FedAvg against arithmetic, and its reduction to FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_fed.data import Arrays
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.methods import AFL, FedAvg, QFedAvg
from tests.methods.support import Momentum, global_weight
from tests.support import LeastSquares, Points, Wanderer, assert_same, fit, weights

# L = 1/η = 2. From w = 0: F = (½·2², ½·4²) = (2, 8); the clients go to (1, 0) and (0, 2): L(w − w̄) = (−2, 0), (0, −4).


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # q = 1: Δ = 2·(−2, 0), 8·(0, −4) = (−4, 0), (0, −32); h = 2² + 2·2 = 8, 4² + 2·8 = 32; w = (4, 32)/40 = (.1, .8).
    # Again: F = (½·1.9², ½·3.2²) = (1.805, 5.12); L(w − w̄) = (−1.9, 0), (0, −3.2); h = 1.9² + 2·1.805 = 7.22,
    # 3.2² + 2·5.12 = 20.48; w = (.1 + 1.805·1.9/27.7, .8 + 5.12·3.2/27.7).
    made = fit(tmp_path, algorithm=QFedAvg(q=1.0), max_rounds=2)
    assert global_weight(made) == pytest.approx([0.1 + 3.4295 / 27.7, 0.8 + 16.384 / 27.7], rel=1e-6)
    # Σ L F / Σ h = 2·6.925/27.7
    assert made.metrics["server/step_size"] == pytest.approx(0.5, rel=1e-6)
    # Two weights and a loss and L from each of two clients, 4 bytes each; nothing else comes down than the model.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (32, 16)


def test_a_larger_q_by_hand(tmp_path: Path) -> None:
    # q = 2: Δ = 4·(−2, 0), 64·(0, −4); h = 2·2·2² + 2·4 = 24, 2·8·4² + 2·64 = 384.
    made = fit(tmp_path, algorithm=QFedAvg(q=2.0), max_rounds=1)
    assert global_weight(made) == pytest.approx([8 / 408, 256 / 408], rel=1e-6)


def test_a_client_can_weigh_by_its_samples(tmp_path: Path) -> None:
    # q = 1, 1 and 3 samples: w = (4, 3·32)/(8 + 3·32).
    made = fit(tmp_path, algorithm=QFedAvg(weighting="samples"), max_rounds=1)
    assert global_weight(made) == pytest.approx([4 / 104, 96 / 104], rel=1e-6)


def test_the_loss_is_a_mean_over_samples_before_training(tmp_path: Path) -> None:
    # 8 samples of client 0 in one batch, 12 of client 1 in batches of 8 and 4; F = (2, 8) as above, and two steps take
    # client 1 to 3: L(w − w̄) = (0, −6). w = (4, 8·6)/(8 + 6² + 2·8).
    made = fit(tmp_path, data=Points(sizes=(8, 12)), algorithm=QFedAvg(), max_rounds=1)
    assert global_weight(made) == pytest.approx([4 / 60, 48 / 60], rel=1e-6)


def test_l_is_the_inverse_of_the_learning_rate_also_with_momentum(tmp_path: Path) -> None:
    # Two steps with ρ = ½: client 0 goes 0 → 1 → 1 + ½·1 + ½·1 = 2, client 1 to 4. L(w − w̄) = (−4, 0), (0, −8).
    # h = 16 + 4 = 20, 64 + 16 = 80; w = (2·4, 8·8)/100.
    made = fit(tmp_path, Momentum(0.5), algorithm=QFedAvg(), max_rounds=1, local_epochs=2)
    assert global_weight(made) == pytest.approx([0.08, 0.64], rel=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_q_of_0_it_is_fedavg(tmp_path: Path, weighting: Any) -> None:
    def run(algorithm: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)  # batch norm's statistics and dropout, too
        data = Points(4, sizes=(5, 3))
        return weights(fit(tmp_path, Wanderer(), data, algorithm, max_rounds=3, local_epochs=2))

    assert_same(run(QFedAvg(q=0.0, weighting=weighting)), run(FedAvg(weighting)))


def test_a_large_q_helps_the_worst_client(tmp_path: Path) -> None:
    # Targets 0 and 4 with 3 and 1 samples: the optimum of q = 0 is 1, that of q → ∞ is 2, where both lose 2.
    losses = []
    for q in (0.0, 5.0):
        made = fit(tmp_path, data=Opposed(), algorithm=QFedAvg(q, "samples"), max_rounds=60)
        losses.append(made.metrics["clients/loss_worst"])
    # q = 0: ½(1 − 4)² = 4.5. q = 5: 3·w^11 = (4 − w)^11 at w = 4/(1 + 3^(1/11)).
    assert losses == [pytest.approx(4.5, rel=1e-4), pytest.approx(0.5 * (4 - 4 / (1 + 3 ** (1 / 11))) ** 2, rel=1e-2)]


class Opposed(Points):
    """All inputs are (1, 0); client 0 has three samples of target 0, client 1 has one of target 4."""

    def load_arrays(self) -> Arrays:
        x, y, clients = np.tile(np.array([1, 0], np.float32), (4, 1)), np.array([0, 0, 0, 4]), np.array([0, 0, 0, 1])
        return Arrays(x, y, x, y, clients, clients, "opposed")


class Negative(LeastSquares):
    """A loss below 0."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch) - 5


@pytest.mark.parametrize("algorithm", [QFedAvg(), AFL()])
def test_a_loss_below_0_is_refused_by_client(tmp_path: Path, algorithm: Any) -> None:
    with pytest.raises(ClientFailure, match=r"client 0 .*the client's loss is below 0, .* use a loss"):
        fit(tmp_path, Negative(), algorithm=algorithm)


def test_refused_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.q is -1; it must be at least 0"):
        QFedAvg(q=-1)
