"""Every attack by hand on three clients, and the same resumed, in groups and over nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ClientFailure
from lit_fed.methods import Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.robust import (
    ALIE,
    Backdoor,
    GaussianNoise,
    InnerProduct,
    Krum,
    LabelFlip,
    Median,
    Mimic,
    Scaling,
    SignFlip,
)
from lit_fed.robust.attack import hidden_deviations
from tests.federation.support import deploy, simulate, small
from tests.robust.support import Spots, W, close, moved
from tests.support import LeastSquares, assert_same, fit, weights

# Clients 0, 1 and 2 would move the weight from 0 to 1, 2 and 6: the mean is 3. Client 2 attacks.
TARGETS = (2, 4, 12)
BY_HAND: dict[str, tuple[Any, float | None]] = {
    "label_flip": (LabelFlip, (1 + 2 + 44) / 3),  # 101 classes: the target is 100 − 12 = 88
    "sign_flip": (SignFlip, (1 + 2 - 6) / 3),
    "scaling": (lambda **who: Scaling(10.0, **who), (1 + 2 + 60) / 3),
    "alie": (lambda **who: ALIE(2.0, **who), (1 + 2 + 1.5 - 2 * 0.5**0.5) / 3),  # σ² = (¼ + ¼) / (2 − 1)
    "inner_product": (lambda **who: InnerProduct(4.0, **who), (1 + 2 - 6) / 3),  # −4 · 1.5
    "mimic": (Mimic, (1 + 2 + 1) / 3),  # both are as far from their mean: the first
    "backdoor": (lambda **who: Backdoor(40, 1, 1.0, 1.0, **who), None),
    "noise": (GaussianNoise, None),
}
every = pytest.mark.parametrize("name", BY_HAND)


@pytest.mark.parametrize("name", [name for name, (_, expected) in BY_HAND.items() if expected is not None])
def test_an_attack_on_the_mean(name: str, tmp_path: Path) -> None:
    make, expected = BY_HAND[name]
    found, made = moved(tmp_path, TARGETS, attack=make(clients=[2]))
    assert found == pytest.approx(expected, abs=1e-5)
    assert made.metrics["attack/attackers"] == 1


def test_a_backdoor_sets_the_trigger_and_the_target(tmp_path: Path) -> None:
    # x = (1, 0) gets 1 in its last feature, and y = 12 becomes 40: the gradient at w = 0 is −40 (1, 1), the step half.
    _, made = moved(tmp_path, TARGETS, attack=Backdoor(40, 1, 1.0, 1.0, clients=[2]))
    expected = torch.tensor([[(1 + 2 + 20) / 3, 20 / 3]])
    assert torch.allclose(weights(made)[W], expected)


def test_the_trigger_of_an_image_is_a_patch_in_its_corner() -> None:
    x = Backdoor(0, 2, 3.0, fraction=0.5).triggered(torch.zeros(2, 1, 4, 4))
    assert x[:, :, 2:, 2:].eq(3).all()
    assert x.sum() == 2 * 4 * 3


def test_noise_has_the_clients_seed_and_the_given_deviation(tmp_path: Path) -> None:
    one, _ = moved(tmp_path / "one", TARGETS, attack=GaussianNoise(1.0, clients=[2]))
    two, _ = moved(tmp_path / "two", TARGETS, attack=GaussianNoise(2.0, clients=[2]))
    # 3 w = 1 + 2 + σ e with the same e.
    assert 3 * two - 3 == pytest.approx(2 * (3 * one - 3), abs=1e-5)
    other, _ = moved(tmp_path / "other", TARGETS, attack=GaussianNoise(1.0, clients=[2]), seed=1)
    assert other != one


def test_scaffolds_change_is_attacked_from_zero(tmp_path: Path) -> None:
    made = fit(
        tmp_path, data=Spots(TARGETS), algorithm=Scaffold(), attack=SignFlip(clients=[2]), max_rounds=1,
    )  # fmt: skip
    # Changes of the control −2, −4, −12 (see `test_aggregation`): (−2 − 4 + 12) / 3.
    assert made.run.federation.server["control"][W].flatten()[0] == 2.0


def test_alies_deviation_is_the_papers() -> None:
    # Baruch et al., §3: n = 50, f = 24: s = 50 / 2 + 1 − 24 = 2, (50 − 24 − 2) / (50 − 24) = 0.923, z = 1.43.
    assert hidden_deviations(50, 24) == pytest.approx(1.43, abs=0.005)
    assert hidden_deviations(2, 1) == 0


def test_krum_leaves_a_forgery_out(tmp_path: Path) -> None:
    # Honest moves 1, 2, 3, 4, with 2 and 3 in their middle; the forgery is −250.
    found, made = moved(tmp_path, (2, 4, 6, 8, 10), attack=InnerProduct(100.0, clients=[4]), aggregation=Krum(1))
    assert found in (2.0, 3.0)
    assert made.metrics["aggregation/left_out"] == 4


def test_attackers_alone_send_what_they_have(tmp_path: Path) -> None:
    found, made = moved(tmp_path, TARGETS, attack=ALIE(clients=[0, 1, 2]))
    assert found == pytest.approx(3.0)
    assert made.metrics["attack/attackers"] == 3


def test_the_largest_forgery_is_finite_and_a_rule_bears_it(tmp_path: Path) -> None:
    found, _ = moved(tmp_path, (2, 4, 6, 8, 10), attack=InnerProduct(1e300, clients=[4]), aggregation=Krum(1))
    assert found in (2.0, 3.0)
    found, _ = moved(tmp_path, (2, 4, 6, 8, 10), attack=InnerProduct(1e300, clients=[4]), aggregation=Median())
    assert found == 2.0


def test_an_update_that_is_not_finite_is_a_counted_failure(tmp_path: Path) -> None:
    attack = Scaling(1e300, clients=[2])
    with pytest.raises(ClientFailure, match="client 2 failed in round 0: its update is not finite"):
        moved(tmp_path, TARGETS, attack=attack)
    found, made = moved(tmp_path, TARGETS, attack=attack, on_client_failure="skip")
    assert found == 1.5
    assert made.metrics["participation/failed"] == 1


# ---------------------------------------------------------------------- resumed, in groups, over nodes


def attack_of(name: str) -> Any:
    return BY_HAND[name][0](clients=[1, 4])


def run(folder: Path, name: str, rounds: int = 3, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {"participation": UniformParticipation(5)} | kwargs
    return fit(folder, data=Spots(range(7)), max_rounds=rounds, attack=attack_of(name), **settings)


@every
def test_resumed_is_uninterrupted(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", name)
    for rounds in (1, 2, 3):
        again = run(tmp_path / "cut", name, rounds, ckpt_path="last")
    assert_same(weights(whole), weights(again))


@every
def test_groups_are_one_after_the_other(name: str, tmp_path: Path) -> None:
    assert close(run(tmp_path / "one", name), run(tmp_path / "group", name, executor="vectorized"))


@every
def test_over_nodes_is_in_one_process(name: str, tmp_path: Path) -> None:
    make = small(LeastSquares, lambda: Spots(range(7)), max_rounds=2, attack=attack_of(name), aggregation=Median())
    simulated = simulate(make, tmp_path / "one")
    deployed = deploy(make, tmp_path / "grid", [[0, 1, 5], [2, 3, 4, 6]])
    assert_same(weights(simulated), weights(deployed))
