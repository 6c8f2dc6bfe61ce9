"""FedEx-LoRA against arithmetic and algebra, with matrices that are not square."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed import FederatedTrainer
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedExLoRA
from lit_fed.networks import adapters_of
from tests.methods.low_rank.support import (
    Beside,
    OnTwo,
    assert_groups_are_sequential,
    drawn,
    layer,
    products,
    stepped,
)
from tests.support import Points, fit, weights

WEIGHTS = (1.0, 3.0, 4.0)


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: all have A = (1, 1), so that nothing is lacking: B = (1 + 3·2)/4 = 1.75.
    # Round 1: client 0: residual −0.25: A = (1 + ½·0.25·1.75, 1) = (1.21875, 1), B = 1.875; client 1: residual −2.25:
    #   A = (1, 1 + ½·2.25·1.75) = (1, 2.96875), B = 2.875. Ā = ((1.21875 + 3)/4, (1 + 8.90625)/4), B̄ = 2.625.
    #   Mean product ((1.875·1.21875 + 3·2.875)/4, (1.875 + 3·2.875·2.96875)/4) = (2.7275390625, 6.8701171875);
    #   B̄Ā = (2.7685546875, 6.5009765625), so that the base takes (−0.041015625, 0.369140625).
    made = fit(tmp_path, Beside(), algorithm=FedExLoRA(), max_rounds=2)
    expected = {"lora_A": [1.0546875, 2.4765625], "lora_B": [2.625], "weight": [-0.041015625, 0.369140625]}
    assert layer(made) == {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}
    assert made.metrics["lora/cross_term"] == pytest.approx((0.041015625**2 + 0.369140625**2) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("sizes", [(7, 5, 4), (60, 50, 40)], ids=["as_matrices", "as_factors"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_base_and_the_mean_product_are_the_mean_of_weights(sizes: Any, rounds: int) -> None:
    """W₀ + sB̄Ā + residual = Σ p_i(W₀ + sB_iA_i); after t equal rounds the base has t residuals."""
    torch.manual_seed(0)
    task, method = OnTwo(sizes=sizes), FedExLoRA()
    updates = [drawn(task, seed) for seed in range(3)]
    server, metrics = stepped(
        method, {"model": task}, [("model", *pair) for pair in zip(updates, WEIGHTS, strict=True)], rounds
    )
    sent = method.broadcast(server, rounds, "model")
    tested = {**server["models"]["model"], **method.tested(server, rounds, "model")}
    square = 0.0
    for one in adapters_of(task):
        base = task.get_parameter(one.base).double()
        mean = sum(w / 8 * products(task, update)[one.base] for w, update in zip(WEIGHTS, updates, strict=True))
        of_means = one.scale * tested[one.lora_b].double() @ tested[one.lora_a].double()
        torch.testing.assert_close(tested[one.base].double(), base + rounds * (mean - of_means), rtol=0, atol=1e-4)
        square += float((mean - of_means).square().sum())
        # The base itself stays, and what is smaller travels: factors of rank 3·2 + 2 a round, or the matrix.
        assert torch.equal(server["models"]["model"][one.base], task.get_parameter(one.base))
        (m, n), width = base.shape, 8 * rounds
        assert (f"left.{one.base}" in sent) == (width * (m + n) < m * n) == (one.base not in sent)
    assert metrics["lora/cross_term"] == pytest.approx(square**0.5, rel=1e-4)
    head = sum(w / 8 * update["network.head.bias"].double() for w, update in zip(WEIGHTS, updates, strict=True))
    torch.testing.assert_close(tested["network.head.bias"].double(), head, rtol=0, atol=1e-6)


def test_one_client_trains_as_alone(tmp_path: Path) -> None:
    one, other = (
        fit(tmp_path / type(method).__name__, Beside(), Points(num_clients=1), method, max_rounds=4)
        for method in (FedExLoRA(), FedAvg())
    )
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(one)[name], tensor, rtol=0, atol=1e-6)
    assert one.metrics["lora/cross_term"] == pytest.approx(0.0, abs=1e-6)


def test_kinds_are_refused(tmp_path: Path) -> None:
    made = FederatedTrainer(accelerator="cpu", max_rounds=1, default_root_dir=str(tmp_path), enable_progress_bar=False)
    with pytest.raises(ConfigError, match="FedExLoRA combines weights, so all clients need the same network"):
        made.fit({"one": Beside(), "other": Beside()}, Points(), FedExLoRA())


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FedExLoRA")
