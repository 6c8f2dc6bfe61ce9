"""ClientMomentum against arithmetic, its reduction to FedAvg, and under a robust rule."""

from pathlib import Path

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.methods import ClientMomentum, FedAvg
from lit_fed.robust import CentredClipping
from tests.support import LeastSquares, Points, assert_same, fit, kept, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # β = ½. Round 0 from w = 0, see tests/methods/test_fedavg.py: m = Δ, of client 0 (1, 0), of client 1 (0, 2), with
    #   weights ¼ and ¾: w = (0.25, 1.5).
    # Round 1: Δ of client 0 is ½·(2 − 0.25) = 0.875, of client 1 ½·(4 − 1.5) = 1.25;
    #   m: ½·1 + ½·0.875 = 0.9375 and ½·2 + ½·1.25 = 1.625; w = (0.25 + 0.9375/4, 1.5 + ¾·1.625) = (0.484375, 2.71875)
    made = fit(tmp_path, algorithm=ClientMomentum(beta=0.5), max_rounds=2)
    assert weights(made)["network.weight"].tolist() == [[0.484375, 2.71875]]
    assert kept(made, 0)["state/momentum.network.weight"].tolist() == [[0.9375, 0]]
    assert kept(made, 1)["state/momentum.network.weight"].tolist() == [[0, 1.625]]


def test_without_momentum_it_is_fedavg(tmp_path: Path) -> None:
    plain = fit(tmp_path, LeastSquares(), Points(), FedAvg(), max_rounds=4, local_epochs=2)
    other = fit(tmp_path, LeastSquares(), Points(), ClientMomentum(beta=0.0), max_rounds=4, local_epochs=2)
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)


def test_a_large_radius_is_the_mean_of_the_momenta(tmp_path: Path) -> None:
    def run(name: str, **settings: object) -> object:
        algorithm = ClientMomentum(beta=0.5, weighting="uniform")
        return weights(fit(tmp_path / name, algorithm=algorithm, max_rounds=3, **settings))

    torch.testing.assert_close(
        run("clipped", aggregation=CentredClipping(radius=1e6)), run("mean"), rtol=1e-6, atol=1e-6
    )


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", algorithm=ClientMomentum(), max_rounds=4)
    fit(tmp_path / "parts", algorithm=ClientMomentum(), max_rounds=2)
    parts = fit(tmp_path / "parts", algorithm=ClientMomentum(), max_rounds=4, ckpt_path="last")
    assert_same(weights(parts), weights(whole))
    assert_same(kept(parts, 1), kept(whole, 1))


@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_a_momentum_without_end_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.beta is"):
        ClientMomentum(beta=beta)
