"""FedSMOO against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, two steps a round, ρ = α = ½.
"""

from pathlib import Path

import pytest
import torch

from lit_fed import objective_of
from lit_fed.errors import ConfigError
from lit_fed.methods import FedDyn, FedSAM, FedSMOO
from tests.engine.vectorized.test_executor import federate
from tests.methods.support import client_state, global_weight
from tests.support import LeastSquares, assert_same, fit, weights


def test_one_round_by_hand(tmp_path: Path) -> None:
    # μ = s = 0, and gradients are below 0. Client 0:
    #   u = −2, ŝ = μ = −½; at −½ the gradient is −2.5 → w₁ = 1.25
    #   u = −0.75 + ½, ŝ = −½, μ = −1; at 0.75: −1.25 + ½·1.25 = −0.625 → w₁ = 1.5625; g₀ = −0.78125; sends μ − ŝ = −½
    # Client 1: −4.5 → 2.25; u = −1.75 + ½, μ = −1; at 1.75: −2.25 + ½·2.25 = −1.125 → w₂ = 2.8125; sends −½
    # The mean and FedDyn's shift are (0.78125, 1.40625) each; s = ½·(−1, −1)/√2.
    made = fit(tmp_path, algorithm=FedSMOO(0.5, 0.5), max_rounds=1, local_epochs=2)
    assert global_weight(made) == [1.5625, 2.8125]
    assert client_state(made, 0) == {
        "state/dual.network.weight": [[-0.78125, 0.0]],
        "state/perturbation_dual.network.weight": [[-1.0, 0.0]],
    }
    s = made.run.federation.server["perturbation"]["network.weight"]
    assert s[0].tolist() == pytest.approx([-(8**-0.5), -(8**-0.5)])
    assert (made.metrics["comm/downlink_bytes"], made.metrics["comm/uplink_bytes"]) == (32, 32)


def test_without_perturbation_it_is_feddyn_to_the_bit(tmp_path: Path) -> None:
    smoo = federate(tmp_path / "smoo", "sequential", FedSMOO(rho=0.0, alpha=0.1), max_rounds=3)
    assert_same(weights(smoo), weights(federate(tmp_path / "dyn", "sequential", FedDyn(0.1), max_rounds=3)))


def test_while_its_duals_are_zero_it_is_fedsam_to_the_bit(tmp_path: Path) -> None:
    # The first step of the first round, and α = 0.
    settings = {"max_rounds": 1, "local_epochs": None, "local_steps": 1}
    smoo = federate(tmp_path / "smoo", "sequential", FedSMOO(alpha=0.0), **settings)
    assert_same(weights(smoo), weights(federate(tmp_path / "sam", "sequential", FedSAM(), **settings)))


def test_groups_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.objective moves client\.results\['perturbation_dual'\] from st"):
        federate(tmp_path, "vectorized", FedSMOO())


def test_it_trains_under_a_plain_trainer() -> None:
    # x = (1, 0), y = 2: at w₁ = −½ the loss is ½·2.5².
    batch = torch.tensor([[1.0, 0.0]]), torch.tensor([2.0])
    assert objective_of(LeastSquares(), FedSMOO(rho=0.5)).training_step(batch, 0).item() == 3.125


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.rho is -1"):
        FedSMOO(rho=-1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is -1"):
        FedSMOO(alpha=-1.0)
