"""FedAvg against arithmetic."""

from pathlib import Path

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.support import Points, fit, weights


def test_two_rounds_by_hand_weighted_by_samples(tmp_path: Path) -> None:
    # Round 0 from w = (0, 0), learning rate ½:
    #   client 0: w = (0, 0) − ½·(0 − 2, 0) = (1, 0); client 1: w = (0, 0) − ½·(0, 0 − 4) = (0, 2)
    #   mean with weights 1 and 3: (1/4, 3·2/4) = (0.25, 1.5)
    # Round 1:
    #   client 0: w₁ = 0.25 − ½·(0.25 − 2) = 1.125 → (1.125, 1.5)
    #   client 1: w₂ = 1.5 − ½·(1.5 − 4) = 2.75 → (0.25, 2.75)
    #   mean: ((1.125 + 3·0.25)/4, (1.5 + 3·2.75)/4) = (0.46875, 2.4375)
    made = fit(tmp_path, max_rounds=2)
    assert weights(made)["network.weight"].tolist() == [[0.46875, 2.4375]]


def test_one_round_by_hand_uniform(tmp_path: Path) -> None:
    # The plain mean of (1, 0) and (0, 2) is (0.5, 1).
    made = fit(tmp_path, algorithm=FedAvg(weighting="uniform"), max_rounds=1)
    assert weights(made)["network.weight"].tolist() == [[0.5, 1.0]]


def test_metrics_by_hand(tmp_path: Path) -> None:
    # After round 0, w = (0.25, 1.5). Global test set: one sample with loss ½(0.25−2)² = 1.53125 and three with
    # ½(1.5−4)² = 3.125; mean (1.53125 + 3·3.125)/4 = 2.7265625. Over clients: mean (1.53125+3.125)/2 = 2.328125,
    # minimum 1.53125, standard deviation (3.125−1.53125)/2 = 0.796875, 10th percentile 1.53125 + 0.1·1.59375.
    # Training loss at w = 0: ½·4 = 2 and ½·16 = 8, weighted (2 + 3·8)/4 = 6.5.
    # The clients move by (1, 0) and (0, 2): mean norm 1.5, cosine 0. A payload is two float32: 8 bytes, twice.
    metrics = fit(tmp_path, max_rounds=1).metrics
    expected = {
        "global/loss": 2.7265625,
        "clients/loss_mean": 2.328125,
        "clients/loss_std": 0.796875,
        "clients/loss_p10": 1.690625,
        "clients/loss_min": 1.53125,
        "train/loss": 6.5,
        "drift/update_norm_mean": 1.5,
        "drift/cosine_mean": 0.0,
        "comm/uplink_bytes": 16,
        "comm/downlink_bytes": 16,
        "comm/total_bytes": 32,
        "participation/count": 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_one_client_is_plain_gradient_descent(tmp_path: Path) -> None:
    # w₁ ← w₁ − ½(w₁ − 2) for 3 rounds of 2 epochs is 6 steps: 2·(1 − 2⁻⁶) = 1.96875.
    from tests.support import LeastSquares

    made = fit(tmp_path, LeastSquares(), Points(num_clients=1), max_rounds=3, local_epochs=2)
    assert weights(made)["network.weight"].tolist() == [[1.96875, 0.0]]


def test_unknown_weighting() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.weighting is 'size'"):
        FedAvg(weighting="size")  # type: ignore[arg-type]


def test_server_starts_from_the_modules_weights(tmp_path: Path) -> None:
    from tests.support import LeastSquares

    module = LeastSquares(lr=0.0)
    torch.nn.init.constant_(next(module.parameters()), 3.0)
    assert weights(fit(tmp_path, module, max_rounds=1))["network.weight"].tolist() == [[3.0, 3.0]]
