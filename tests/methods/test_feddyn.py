"""FedDyn against arithmetic.

Client 0 has x = (1, 0), y = 2, client 1 has x = (0, 1), y = 4; learning rate ½, two steps a round, α = ½.
"""

from pathlib import Path
from typing import Any

import pytest

from lit_fed import FederatedTrainer
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg, FedDyn
from tests.methods.support import Automatic, ByHand, Rota, client_state, global_weight
from tests.support import assert_same, fit, weights


def run(folder: Path, rounds: int, alpha: float = 0.5, **kwargs: Any) -> FederatedTrainer:
    """Two steps a round."""
    return fit(folder, algorithm=FedDyn(alpha), max_rounds=rounds, **({"local_epochs": 2} | kwargs))


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0, g = 0:
    #   client 0: w₁ = 1; then (1 − 2) + ½·(1 − 0) = −½ → w₁ = 1.25;  g₀ = −½·1.25 = −0.625
    #   client 1: twice that: w₂ = 2.5, g₁ = −1.25
    #   mean (0.625, 1.25); h = −½·½·((1.25, 0) + (0, 2.5)); −h/α = (0.625, 1.25);  w = (1.25, 2.5)
    # Round 1:
    #   client 0: (1.25 − 2) + 0.625 = −0.125 → 1.3125; (1.3125 − 2) + 0.625 + ½·0.0625 = −0.03125 → 1.328125
    #     g₀ = −0.625 − ½·0.078125 = −0.6640625
    #   client 1: twice that: w₂ = 2.65625, g₁ = −1.328125
    #   mean ((1.328125 + 1.25)/2, (2.5 + 2.65625)/2) = (1.2890625, 2.578125)
    #   −h/α = (0.625, 1.25) + (0.0390625, 0.078125);  w = (1.953125, 3.90625)
    made = run(tmp_path, 2)
    assert global_weight(made) == [1.953125, 3.90625]
    assert client_state(made, 0) == {"state/dual.network.weight": [[-0.6640625, 0.0]]}
    assert client_state(made, 1) == {"state/dual.network.weight": [[0.0, -1.328125]]}


def test_partial_participation_by_hand(tmp_path: Path) -> None:
    # Round 0, client 0 alone: mean (1.25, 0), −h/α = ½·(1.25, 0), since m = 2;  w = (1.875, 0)
    # Round 1, client 1 alone, g₁ = 0: w₂ = 0 → 2 → 2.5; mean (1.875, 2.5)
    #   −h/α = (0.625, 0) + ½·(0, 2.5);  w = (2.5, 3.75)
    made = run(tmp_path, 2, participation=Rota())
    assert global_weight(made) == [2.5, 3.75]


def test_the_clients_agree_in_the_end(tmp_path: Path) -> None:
    # The stationary point is the minimum of the sum of the objectives, (2, 4), where g₀ = g₁ = 0.
    made = run(tmp_path, 40, evaluate_every=0)
    assert global_weight(made) == pytest.approx([2.0, 4.0], abs=1e-4)


def test_without_alpha_it_is_fedavg(tmp_path: Path) -> None:
    dyn = run(tmp_path, 3, alpha=0.0)
    fedavg = fit(tmp_path, algorithm=FedAvg("uniform"), max_rounds=3, local_epochs=2)
    assert global_weight(dyn) == pytest.approx(global_weight(fedavg), abs=1e-6)


def test_bytes_are_fedavgs(tmp_path: Path) -> None:
    metrics = run(tmp_path, 1).metrics
    assert metrics["comm/total_bytes"] == 32


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is -1"):
        FedDyn(alpha=-1.0)


def test_another_methods_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=1)
    with pytest.raises(CheckpointError, match=r"saved by FedAvg .* does not fit FedDyn .* 'shift' here only"):
        run(tmp_path, 2, ckpt_path="last")


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_modules_that_optimise_by_hand(tmp_path: Path, num_optimizers: int) -> None:
    """Every parameter is corrected once a step, whatever optimizer it has, also where all step after one backward."""
    automatic = run(tmp_path, 3, module=Automatic())
    assert_same(weights(run(tmp_path, 3, module=ByHand(num_optimizers))), weights(automatic))
    assert any(client_state(automatic, 0)["state/dual.network.bias"]), "nothing was corrected"
