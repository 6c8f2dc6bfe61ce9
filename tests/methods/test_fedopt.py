"""FedAdam, FedYogi and FedAdagrad against arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.methods import FedAdagrad, FedAdam, FedYogi
from tests.support import Points, fit, weights

# Two rounds with uniform weights, η = 1, β₁ = β₂ = ½, τ = ½, so that v starts at ¼. A client that is off by e moves by
# ½·e, and the mean of two clients that each move one weight by half of that: Δ = ¼·(2 − w₁, 4 − w₂).
#
# Round 0, w = 0: Δ = (0.5, 1), Δ² = (0.25, 1), m = ½·0 + ½·Δ = (0.25, 0.5); corrected for bias, it would be Δ.
#   Adam:     v = ½·0.25 + ½·Δ² = (0.25, 0.625), √v = (0.5, 0.790569)
#             w = m/(√v + ½) = (0.25/1, 0.5/1.290569) = (0.25, 0.387426)
#   Yogi:     sign(v − Δ²) = (0, −1), v = (0.25, 0.25 + ½·1) = (0.25, 0.75), √v = (0.5, 0.866025)
#             w = (0.25/1, 0.5/1.366025) = (0.25, 0.366025)
#   Adagrad:  v = 0.25 + Δ² = (0.5, 1.25), √v = (0.707107, 1.118034)
#             w = (0.25/1.207107, 0.5/1.618034) = (0.207107, 0.309017)
# Round 1:
#   Adam:     Δ = (0.4375, 0.903144), Δ² = (0.191406, 0.815668), m = ½·(0.25, 0.5) + ½·Δ = (0.34375, 0.701572)
#             v = ½·(0.25, 0.625) + ½·Δ² = (0.220703, 0.720334), √v = (0.469791, 0.848725)
#             w = (0.25 + 0.34375/0.969791, 0.387426 + 0.701572/1.348725) = (0.604458, 0.907600)
#   Yogi:     Δ = (0.4375, 0.908494), Δ² = (0.191406, 0.825361), m = (0.34375, 0.704247), sign(v − Δ²) = (1, −1)
#             v = (0.25 − ½·0.191406, 0.75 + ½·0.825361) = (0.154297, 1.162680), √v = (0.392806, 1.078277)
#             w = (0.25 + 0.34375/0.892806, 0.366025 + 0.704247/1.578277) = (0.635022, 0.812238)
#   Adagrad:  Δ = (0.448223, 0.922746), Δ² = (0.200904, 0.851460), m = (0.349112, 0.711373)
#             v = (0.5, 1.25) + Δ² = (0.700904, 2.101460), √v = (0.837200, 1.449641)
#             w = (0.207107 + 0.349112/1.3372, 0.309017 + 0.711373/1.949641) = (0.468183, 0.673891)
HALVES: dict[str, Any] = {"server_lr": 1.0, "beta1": 0.5, "tau": 0.5, "weighting": "uniform"}


@pytest.mark.parametrize(
    ("algorithm", "first", "second"),
    [
        (FedAdam(beta2=0.5, **HALVES), [0.25, 0.387426], [0.604458, 0.907600]),
        (FedYogi(beta2=0.5, **HALVES), [0.25, 0.366025], [0.635022, 0.812238]),
        (FedAdagrad(**HALVES), [0.207107, 0.309017], [0.468183, 0.673891]),
    ],
    ids=["adam", "yogi", "adagrad"],
)
def test_two_rounds_by_hand(algorithm: Any, first: list[float], second: list[float], tmp_path: Path) -> None:
    for rounds, expected in ((1, first), (2, second)):
        made = fit(tmp_path, algorithm=algorithm, max_rounds=rounds)
        assert weights(made)["network.weight"][0].tolist() == pytest.approx(expected, abs=2e-6)


def test_without_memory_and_far_from_adaptive_it_is_fedavg(tmp_path: Path) -> None:
    # β₁ = β₂ = 0 and τ = η = 2²⁰: m = Δ and √v = |Δ| ≤ 4, so η·m/(√v + τ) = Δ/(1 + |Δ|/2²⁰), within 4·10⁻⁶ of Δ.
    algorithm = FedAdam(server_lr=2.0**20, beta1=0.0, beta2=0.0, tau=2.0**20)
    plain, other = fit(tmp_path, max_rounds=3), fit(tmp_path, algorithm=algorithm, max_rounds=3)
    torch.testing.assert_close(weights(other), weights(plain), rtol=4e-6, atol=0)


def test_a_weight_that_never_moves_stays(tmp_path: Path) -> None:
    # Only client 0 exists: the second weight has no gradient, its m is 0, and v decays towards 0 but τ stays.
    made = fit(tmp_path, data=Points(num_clients=1), algorithm=FedAdam(beta2=0.0), max_rounds=3)
    assert weights(made)["network.weight"][0, 1] == 0
