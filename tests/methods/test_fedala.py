"""FedALA against arithmetic: the data of `tests.support.Points`, one layer w from 0, learning rate ½, η = 1."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_fed import Client, Model
from lit_fed.algorithm import Terms
from lit_fed.errors import ConfigError
from lit_fed.methods import FedALA
from lit_fed.methods.fedala import ALA, LEARNT
from tests.methods.support import client_state, global_weight, run_quickstart
from tests.support import LeastSquares, Points, Wanderer, assert_same, fit, saved_weights, weights


class Counting(FedALA):
    """Counts the batches of learning by round."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[int] = []

    def objective(self, client: Client, batch: Any) -> Terms:
        if client.phase == ALA and LEARNT not in client.results and client.stage == "train" and client.id == 0:
            self.seen.append(client.round_idx)
        return super().objective(client, batch)


def test_three_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0 is FedAvg's, because all models are equal: own (1, 0) and (0, 2), global (0.25, 1.5).
    # Round 1: client 0: Θ − Θ₀ = (−0.75, 1.5), W = 1: residual −1.75: W₁ = 1 − 1.75·0.75 → 0, so Θ̂ = (1, 1.5), where it
    #   stays: W₁ = 0 − 1·0.75 → 0. Ten equal losses after the first: eleven passes. Training: (1.5, 1.5).
    #   client 1: Θ − Θ₁ = (0.25, −0.5), residual −2.5: W₂ = 1 − 2.5·0.5 → 0, Θ̂ = (0.25, 2); training: (0.25, 3).
    #   Global ((1.5 + 3·0.25)/4, (1.5 + 3·3)/4) = (0.5625, 2.625).
    # Round 2, one pass: client 0: Θ̂ = (1.5, 2.625), W₁ = 0 − 0.5·0.9375 → 0; training: (1.75, 2.625). client 1:
    #   Θ̂ = (0.5625, 3), W₂ = 0 − 1·0.375 → 0; training: (0.5625, 3.5). Global ((1.75 + 1.6875)/4, (2.625 + 10.5)/4).
    method = Counting()
    made = fit(tmp_path, algorithm=method, max_rounds=3)
    assert global_weight(made) == [0.859375, 3.28125]
    assert client_state(made, 0) == {
        "state/local.network.weight": [[1.75, 2.625]],
        "state/weight.network.weight": [[0.0, 1.0]],
        "state/learnt": 1.0,
    }
    assert client_state(made, 1)["state/weight.network.weight"] == [[1.0, 0.0]]
    assert method.seen == [1] * 11 + [2]
    # Tests learn W before, too, and stay at 1.75 and 3.5.
    assert made.metrics["clients/loss_mean"] == pytest.approx((0.25**2 + 0.5**2) / 4)


def test_w_moves_within_its_bounds(tmp_path: Path) -> None:
    # η = 0.05, and a threshold that ends the first learning after eleven passes. Client 0, with d = Θ − Θ₀ = −0.75 and
    # the residual e, from −1.75: W ← W − 0.05·e·d moves Θ̂ by d times that, so that e ← e(1 − 0.05·d²).
    made = fit(tmp_path, algorithm=FedALA(eta=0.05, threshold=100.0), max_rounds=2)
    error = -1.75 * (1 - 0.05 * 0.75**2) ** 11  # = −1.2780: before the bound
    own = client_state(made, 0)
    assert own["state/weight.network.weight"][0] == pytest.approx([1 - (error + 1.75) / 0.75, 1.0], rel=1e-5)
    assert own["state/local.network.weight"][0] == pytest.approx([2 + error / 2, 1.5], rel=1e-5)


def test_without_layers_it_is_fedavg(tmp_path: Path) -> None:
    fedala = run_quickstart(tmp_path / "fedala", "--algorithm", "FedALA", "--algorithm.layers", "0", rounds=3)
    assert_same(saved_weights(fedala), saved_weights(run_quickstart(tmp_path / "fedavg", rounds=3)))


def test_the_top_layers_are_the_last_modules_with_parameters() -> None:
    model = Model(Wanderer())
    assert FedALA(layers=1)._top(model) == ("network.3.weight", "network.3.bias")
    assert {name[:9] for name in FedALA(layers=2)._top(model)} == {"network.3", "network.1"}
    assert FedALA(layers=9)._top(model) == tuple(model.parameters)


def test_learning_leaves_the_buffers_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Wanderer(lr=0.1)
    made = fit(tmp_path, task, Points(sizes=(2, 3)), FedALA(layers=3), max_rounds=2)
    norm: Any = weights(made)
    assert norm["network.1.num_batches_tracked"] == 2  # one training step a round
    assert isinstance(task.network, nn.Sequential)


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.layers is -1"):
        FedALA(layers=-1)
    with pytest.raises(ConfigError, match=r"algorithm\.share is 1\.5"):
        FedALA(share=1.5)
    for name in ("eta", "threshold"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} is 0"):
            FedALA(**{name: 0.0})
    with pytest.raises(ConfigError, match="algorithm FedALA needs one client at a time"):
        fit(tmp_path, LeastSquares(), algorithm=FedALA(), executor="vectorized")
