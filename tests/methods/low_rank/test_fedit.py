"""FedIT against arithmetic, and beside FedAvg over adapters."""

import copy
from pathlib import Path

import pytest
import torch

from lit_fed import FederatedTrainer
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedIT
from lit_fed.networks import adapters_of
from tests.methods.low_rank.support import Beside, OnTwo, assert_groups_are_sequential, drawn, layer, stepped
from tests.support import Points, assert_same, fit, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: all have A = (1, 1), so that nothing is lacking: B = (1 + 3·2)/4 = 1.75.
    # Round 1: client 0: residual −0.25: A = (1 + ½·0.25·1.75, 1) = (1.21875, 1), B = 1.875; client 1: residual −2.25:
    #   A = (1, 1 + ½·2.25·1.75) = (1, 2.96875), B = 2.875. Ā = ((1.21875 + 3)/4, (1 + 8.90625)/4), B̄ = 2.625.
    #   Mean product ((1.875·1.21875 + 3·2.875)/4, (1.875 + 3·2.875·2.96875)/4) = (2.7275390625, 6.8701171875);
    #   B̄Ā = (2.7685546875, 6.5009765625): the difference is (−0.041015625, 0.369140625), and the base stays.
    made = fit(tmp_path / "one", Beside(), algorithm=FedIT(), max_rounds=1)
    assert made.metrics["lora/cross_term"] == pytest.approx(0.0, abs=1e-6)
    made = fit(tmp_path / "two", Beside(), algorithm=FedIT(), max_rounds=2)
    assert layer(made) == {"lora_A": [1.0546875, 2.4765625], "lora_B": [2.625], "weight": [0.0, 0.0]}
    assert made.metrics["lora/cross_term"] == pytest.approx((0.041015625**2 + 0.369140625**2) ** 0.5, rel=1e-5)


def test_the_cross_term_is_over_all_layers_with_their_scale_by_hand() -> None:
    # In both layers, of weights ¼ and ¾: B₁A₁ = (1, 0)ᵀ(1, 0), B₂A₂ = (0, 1)ᵀ(0, 1): the mean product is diag(¼, ¾);
    #   B̄Ā = (¼, ¾)ᵀ(¼, ¾); the difference ((3, −3), (−3, 3))/16, of the norm 6/16; s = 1.5: 9/16 in each layer.
    task = OnTwo(rank=1, sizes=(2, 2, 2))
    updates = []
    for place, weight in enumerate((1.0, 3.0)):
        one = torch.eye(2)[place]
        factors = {
            name: value
            for names in adapters_of(task)
            for name, value in ((names.lora_a, one[None]), (names.lora_b, one[:, None]))
        }
        updates.append(("model", drawn(task, place) | factors, weight))
    server, metrics = stepped(FedIT(), {"model": task}, updates)
    assert metrics == {"lora/cross_term": pytest.approx(9 / 16 * 2**0.5, rel=1e-6)}
    assert server["models"]["model"]["network.first.lora_A"].tolist() == [[0.25, 0.75]]


def test_the_weights_are_those_of_fedavg_over_adapters(tmp_path: Path) -> None:
    task = OnTwo(sizes=(2, 6, 5))
    one, other = (
        fit(tmp_path / type(method).__name__, copy.deepcopy(task), algorithm=method, max_rounds=4)
        for method in (FedIT(), FedAvg())
    )
    assert_same(weights(one), weights(other))
    assert one.metrics["lora/cross_term"] > 0
    assert "lora/cross_term" not in other.metrics


def test_one_client_lacks_nothing(tmp_path: Path) -> None:
    made = fit(tmp_path, Beside(), Points(num_clients=1), FedIT(), max_rounds=4)
    assert made.metrics["lora/cross_term"] == 0.0


def test_kinds_are_refused(tmp_path: Path) -> None:
    made = FederatedTrainer(accelerator="cpu", max_rounds=1, default_root_dir=str(tmp_path), enable_progress_bar=False)
    with pytest.raises(ConfigError, match="FedIT combines weights, so all clients need the same network"):
        made.fit({"one": Beside(), "other": Beside()}, Points(), FedIT())


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FedIT")
