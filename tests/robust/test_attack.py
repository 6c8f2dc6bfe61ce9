"""Who attacks: by fraction, name or position, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fed.data import Parts
from lit_fed.errors import ConfigError
from lit_fed.methods import LocalOnly
from lit_fed.protocols import ClientTest
from lit_fed.robust import ALIE, Backdoor, GaussianNoise, InnerProduct, LabelFlip, Scaling, SignFlip, TrimmedMean
from tests.robust.support import Spots, moved
from tests.support import Points, fit, rows


class Named(Spots):
    """Clients whose names are not their positions: client 0 is called 2."""

    @property
    def client_names(self) -> list[str] | None:
        return ["2", "1", "ward"]


def attackers(folder: Path, data: Any, **who: Any) -> frozenset[int]:
    attack = SignFlip(**who)
    fit(folder, data=data, attack=attack, max_rounds=1)
    return attack.attackers


def test_a_name_wins_over_a_position(tmp_path: Path) -> None:
    data = (2, 4, 6)
    assert attackers(tmp_path, Named(data), clients=["2"]) == {0}
    assert attackers(tmp_path, Named(data), clients=["ward", "1"]) == {1, 2}
    assert attackers(tmp_path, Named(data), positions=[2]) == {2}
    assert attackers(tmp_path, Spots(data), clients=[2]) == {2}


def test_a_fraction_is_chosen_by_the_seed(tmp_path: Path) -> None:
    chosen = [
        frozenset(_fraction(tmp_path, seed)) for seed in (0, 0, 1, 2, 3)
    ]  # fmt: skip
    assert all(len(one) == 3 for one in chosen)
    assert chosen[0] == chosen[1]
    assert len(set(chosen)) > 1


def _fraction(folder: Path, seed: int) -> frozenset[int]:
    attack = SignFlip(fraction=0.3)
    fit(folder, data=Points(10), attack=attack, max_rounds=1, seed=seed)
    return attack.attackers


def test_the_attackers_of_a_round_are_counted(tmp_path: Path) -> None:
    _, made = moved(tmp_path, (2, 4, 6), attack=Scaling(clients=[0, 2]))
    assert made.metrics["attack/attackers"] == 2
    assert made.run.federation.server["around.attack"] == {"attack": "Scaling", "attackers": "0, 2"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SignFlip(), "trainer.attack has no choice of attackers; give either trainer.attack.fraction or"),
        (lambda: SignFlip(fraction=0.5, clients=[1]), "trainer.attack has two choices of attackers; give either"),
        (lambda: SignFlip(fraction=0.0), "trainer.attack.fraction is 0.0; it must be above 0 and below 1"),
        (lambda: SignFlip(-1.0, fraction=0.5), "trainer.attack.factor is -1.0"),
        (lambda: Scaling(float("inf"), fraction=0.5), "trainer.attack.factor is inf"),
        (lambda: GaussianNoise(0.0, fraction=0.5), "trainer.attack.std is 0.0"),
        (lambda: ALIE(0.0, fraction=0.5), "trainer.attack.z is 0.0"),
        (lambda: InnerProduct(0.0, fraction=0.5), "trainer.attack.factor is 0.0"),
        (lambda: Backdoor(-1, fraction=0.5), "trainer.attack.target is -1"),
        (lambda: Backdoor(poisoned=1.5, fraction=0.5), "trainer.attack.poisoned is 1.5"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (SignFlip(clients=[7]), "trainer.attack.clients: there is no client 7; clients are 0 to 2"),
        (SignFlip(positions=[-1]), "trainer.attack.positions: there is no client -1"),
        (SignFlip(clients=[]), "trainer.attack chooses none of 3 clients"),
        (SignFlip(fraction=0.1), "trainer.attack chooses none of 3 clients"),
        (Backdoor(101, clients=[0]), "trainer.attack.target is 101; it must be at least 0 and below 101"),
    ],
)
def test_unknown_attackers_and_classes_are_refused_before_training(attack: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        moved(tmp_path, (2, 4, 6), attack=attack)


@pytest.mark.parametrize("attack", [SignFlip(clients=[0]), ALIE(clients=[0])])
def test_an_attack_on_updates_needs_updates(attack: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clients of LocalOnly send nothing; choose another attack"):
        moved(tmp_path, (2, 4, 6), attack=attack, algorithm=LocalOnly())


def test_labels_need_classes(tmp_path: Path) -> None:
    class Unclassed(Spots):
        num_classes = None  # type: ignore[assignment]

        def load_arrays(self) -> Parts:
            found = super().load_arrays()
            return Parts(*(replace(part, y=part.y.astype(np.float32)) for part in (found.train, found.test)))

    with pytest.raises(ConfigError, match="LabelFlip changes classes, and the data have none; choose another attack"):
        fit(tmp_path, data=Unclassed((2, 4)), attack=LabelFlip(clients=[0]))


def test_honest_clients_accuracy_leaves_the_attackers_out(tmp_path: Path) -> None:
    # Client k's own test loss is (w − t)² / 2 for its target t, and w is one model for all: the mean over the honest
    # clients 0 and 1, and not over the attacker 2.
    _, made = moved(
        tmp_path, (2.0, 4.0, 6.0), attack=SignFlip(clients=[2]), evaluate_every=1, protocols=[ClientTest()], logger=True
    )
    found = {
        int(row["client_id"]): float(row["value"])
        for row in rows(made.log_dir / "clients.csv")
        if (row["stage"], row["metric"]) == ("test", "loss")
    }
    assert sorted(found) == [0, 1, 2]
    assert made.metrics["honest/loss_mean"] == pytest.approx((found[0] + found[1]) / 2)
    assert made.metrics["honest/loss_min"] == min(found[0], found[1])
    assert made.metrics["clients/loss_mean"] == pytest.approx(sum(found.values()) / 3)


def test_a_cohort_with_more_attackers_than_its_rule_bears_is_said_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of five attack, and the trimmed mean is for one: 3 − 1 = 2 too many, in both rounds."""
    settings = {"attack": SignFlip(positions=[0, 1, 2]), "max_rounds": 2}
    made = fit(tmp_path, data=Points(5), aggregation=TrimmedMean(attackers=1), **settings)
    assert made.metrics["attack/beyond"] == 2
    assert capsys.readouterr().out.count("round 0: 3 of 5 updates are attackers', and the rule bears 1;") == 1
    none = fit(tmp_path / "none", data=Points(5), aggregation=TrimmedMean(attackers=2), attack=SignFlip(positions=[0]))
    assert none.metrics["attack/beyond"] == 0
    assert "attack/beyond" not in fit(tmp_path / "mean", data=Points(5), **settings).metrics
