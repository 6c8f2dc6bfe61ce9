"""FedAvgM against arithmetic, and its reduction to FedAvg."""

from pathlib import Path

import pytest
import torch

from lit_fed.methods import FedAvg, FedAvgM
from tests.support import LeastSquares, Points, fit, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # β = ½, η = 2. Round 0 from w = 0, see tests/methods/test_fedavg.py: Δ = v = (0.25, 1.5), so w = 2v = (0.5, 3).
    # Round 1: client 0 moves by ½·(2 − 0.5) = 0.75, client 1 by ½·(4 − 3) = 0.5;
    #   Δ = (0.75/4, 3·0.5/4) = (0.1875, 0.375); v = ½·(0.25, 1.5) + Δ = (0.3125, 1.125)
    #   w = (0.5, 3) + 2v = (1.125, 5.25), moved by 2·√(0.3125² + 1.125²) = 2·√1.36328125 = 2.3351927
    made = fit(tmp_path, algorithm=FedAvgM(beta=0.5, server_lr=2.0), max_rounds=2)
    assert weights(made)["network.weight"].tolist() == [[1.125, 5.25]]
    assert made.metrics["server/update_norm"] == pytest.approx(2.3351927)


def test_without_momentum_it_is_fedavg(tmp_path: Path) -> None:
    plain = fit(tmp_path, LeastSquares(), Points(), FedAvg(), max_rounds=4, local_epochs=2)
    other = fit(tmp_path, LeastSquares(), Points(), FedAvgM(beta=0.0), max_rounds=4, local_epochs=2)
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)
