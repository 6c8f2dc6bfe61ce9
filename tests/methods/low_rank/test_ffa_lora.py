"""FFA-LoRA against arithmetic, on `tests.methods.low_rank.support.Beside`."""

from pathlib import Path

import torch

from lit_fed.methods import FedAvg, FFALoRA
from tests.methods.low_rank.support import Beside, assert_groups_are_sequential, layer
from tests.support import assert_same, fit, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # f(x) = B(A·x), A = (1, 1). Round 0: client 0 has the residual −2, so B = 0 + ½·2 = 1; client 1 −4, so B = 2;
    #   mean (1 + 3·2)/4 = 1.75. Round 1: residuals −0.25 and −2.25: B = 1.875 and 2.875; mean 2.625.
    made = fit(tmp_path, Beside(), algorithm=FFALoRA(), max_rounds=2)
    assert layer(made) == {"lora_A": [1.0, 1.0], "lora_B": [2.625], "weight": [0.0, 0.0]}


def test_it_is_fedavg_of_a_model_whose_a_is_frozen(tmp_path: Path) -> None:
    frozen = Beside()
    frozen.get_parameter("network.lora_A").requires_grad_(False)
    one = fit(tmp_path / "ffa", Beside(), algorithm=FFALoRA(), max_rounds=3)
    other = fit(tmp_path / "fedavg", frozen, algorithm=FedAvg(), max_rounds=3)
    assert_same(weights(one), weights(other))


def test_the_mean_of_b_gives_the_mean_of_products() -> None:
    torch.manual_seed(0)
    a, each = torch.randn(2, 7, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mean = torch.einsum("i,imr->mr", p, each) @ a
    torch.testing.assert_close(mean, sum(weight * b @ a for weight, b in zip(p, each, strict=True)))


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FFALoRA")
