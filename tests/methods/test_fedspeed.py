"""FedSpeed against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, two steps a round, λ = ½.
"""

from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.methods import FedDyn, FedSpeed
from tests.engine.vectorized.test_executor import assert_close, federate
from tests.methods.support import Rota, client_state, global_weight
from tests.support import fit


def test_one_round_by_hand(tmp_path: Path) -> None:
    # ρ = ½, the perturbation of the client's weight −½ (gradients are below 0).
    #   client 0: at −½: −2.5 → w₁ = 1.25; at 0.75: −1.25 + ½·1.25 = −0.625 → w₁ = 1.5625; ĝ = −½·1.5625 = −0.78125;
    #     sends 1.5625 + 0.78125/½ = 3.125
    #   client 1: −4.5 → 2.25; at 1.75: −2.25 + ½·2.25 = −1.125 → 2.8125; sends 5.625. Mean (1.5625, 2.8125)
    made = fit(tmp_path, algorithm=FedSpeed(rho=0.5, lam=0.5), max_rounds=1, local_epochs=2)
    assert global_weight(made) == [1.5625, 2.8125]
    assert client_state(made, 0) == {"state/dual.network.weight": [[-0.78125, 0.0]]}


def test_a_share_of_the_gradient_at_the_weights_by_hand(tmp_path: Path) -> None:
    # α = ½, one step: the mean of −2 and −2.5 → w₁ = 1.125, sends twice that; of −4 and −4.5 → 2.125.
    made = fit(tmp_path, algorithm=FedSpeed(rho=0.5, lam=0.5, alpha=0.5), max_rounds=1)
    assert global_weight(made) == [1.125, 2.125]


def test_partial_participation_by_hand(tmp_path: Path) -> None:
    # ρ = 0. Round 0, client 0 alone: 1, then (1 − 2) + ½·1 = −½ → 1.25; ĝ = −0.625; the server takes 1.25 + 1.25.
    # Round 1, client 1 alone, ĝ = 0: 2, then −2 + ½·2 = −1 → 2.5; sends 2.5 + 2.5. Its w₁ stays 2.5.
    made = fit(tmp_path, algorithm=FedSpeed(0.0, 0.5), max_rounds=2, local_epochs=2, participation=Rota())
    assert global_weight(made) == [2.5, 5.0]


def test_with_everybody_and_without_perturbation_it_is_feddyn(tmp_path: Path) -> None:
    # Both servers add the mean of −ĝ/λ over all clients; these numbers are exact in float32.
    speed, dyn = (
        global_weight(fit(tmp_path / type(one).__name__, algorithm=one, max_rounds=2, local_epochs=2))
        for one in (FedSpeed(rho=0.0, lam=0.5), FedDyn(0.5))
    )
    assert speed == dyn == [1.953125, 3.90625]  # test_feddyn.py


def test_in_groups_it_is_one_client_after_the_other(tmp_path: Path) -> None:
    alone, grouped = (federate(tmp_path / how, how, FedSpeed(alpha=0.5)) for how in ("sequential", "vectorized"))
    assert_close(alone, grouped, tolerance=1e-5)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.lam is 0"):
        FedSpeed(lam=0.0)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 2"):
        FedSpeed(alpha=2.0)
