"""FedSA-LoRA against arithmetic, on `tests.methods.low_rank.support.Beside`."""

from pathlib import Path

from lit_fed.methods import FedPer, FedSALoRA
from tests.methods.low_rank.support import Beside, assert_groups_are_sequential
from tests.methods.support import client_state
from tests.support import assert_same, fit, kept, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # Round 0: B = 1 and 2, as B = 0 lets A stay. Round 1: client 0: residual 1·1 − 2 = −1: A₁ = 1 + ½·1·1 = 1.5,
    #   B = 1 + ½·1 = 1.5. client 1: residual 2 − 4 = −2: A₂ = 1 + ½·2·2 = 3, B = 2 + ½·2·1 = 3.
    #   A = ((1.5 + 3·1)/4, (1 + 3·3)/4).
    made = fit(tmp_path, Beside(), algorithm=FedSALoRA(), max_rounds=2)
    assert weights(made)["network.lora_A"].tolist() == [[1.125, 2.5]]
    assert client_state(made, 0) == {"network.lora_B": [[1.5]]}
    assert client_state(made, 1) == {"network.lora_B": [[3.0]]}


def test_it_is_fedper_with_b_personal(tmp_path: Path) -> None:
    one = fit(tmp_path / "fedsa", Beside(), algorithm=FedSALoRA(), max_rounds=3)
    other = fit(tmp_path / "fedper", Beside(), algorithm=FedPer(personal=["*lora_B"]), max_rounds=3)
    assert_same(weights(one), weights(other))
    assert_same(kept(one, 1), kept(other, 1))


def test_groups_are_sequential(tmp_path: Path) -> None:
    assert_groups_are_sequential(tmp_path, "FedSALoRA")
