"""Rules in a federation: by hand, refused, skipped, resumed, in groups, over nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedNova, LocalOnly, Scaffold
from lit_fed.participation import PoissonParticipation, UniformParticipation
from lit_fed.privacy import ClientLevel
from lit_fed.robust import (
    NNM,
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBounding,
    Scaling,
    TrimmedMean,
)
from tests.federation.support import deploy, simulate, small
from tests.robust.support import Spots, W, close, moved
from tests.support import Points, Threes, Wanderer, assert_same, fit, rows, weights

RULES: dict[str, Any] = {
    "median": lambda: Median(),
    "trimmed_mean": lambda: TrimmedMean(1),
    "krum": lambda: Krum(1),
    "multi_krum": lambda: MultiKrum(1, before=NNM(1)),
    "geometric_median": lambda: GeometricMedian(),
    "clipping": lambda: CentredClipping(0.5, 2),
    "bounding": lambda: NormBounding(0.5),
    "bucketing": lambda: Median(Bucketing(2)),
}
every = pytest.mark.parametrize("name", RULES)


# ---------------------------------------------------------------------- by hand

# Clients move to 1, 2, 3, 4 and 50: half of their targets.
TARGETS = (2.0, 4.0, 6.0, 8.0, 100.0)
BY_HAND = {
    # rule: result, kept, left out
    "median": (Median(), 3.0, None, None),
    "trimmed_mean": (TrimmedMean(1), 3.0, None, None),  # (2 + 3 + 4) / 3
    # Two nearest: 1: 1 + 4, 2: 1 + 1, 3: 1 + 1, 4: 1 + 4, 50: far; of equal scores the first.
    "krum": (Krum(1), 2.0, 1, 4),
    "multi_krum": (MultiKrum(1), 2.5, 4, 1),  # without 50
    "clipping": (CentredClipping(2.0), 9 / 5, 5, 0),  # (1 + 2 + 2 + 2 + 2) / 5
    "bounding": (NormBounding(3.0), 12 / 5, 5, 0),  # (1 + 2 + 3 + 3 + 3) / 5
    "geometric_median": (GeometricMedian(), 3.0, 5, 0),  # on a line it is the median
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_rule_takes_the_place_of_the_mean(name: str, tmp_path: Path) -> None:
    rule, expected, kept, left_out = BY_HAND[name]
    found, made = moved(tmp_path, TARGETS, aggregation=rule)
    assert found == pytest.approx(expected, abs=1e-5)
    assert made.metrics["aggregation/skipped"] == 0
    assert made.metrics.get("aggregation/kept") == kept
    assert made.metrics.get("aggregation/left_out") == left_out


def test_weights_stand_beside_the_attackers_in_clients_csv(tmp_path: Path) -> None:
    attack = Scaling(100.0, clients=[4])
    _, made = moved(tmp_path, TARGETS, aggregation=MultiKrum(1), attack=attack, logger=True)
    found = {
        (row["metric"], int(row["client_id"])): float(row["value"])
        for row in rows(made.log_dir / "clients.csv")
        if row["metric"].startswith(("aggregation/", "attack/"))
    }
    assert found == {("attack/attacker", 4): 1} | {
        ("aggregation/weight", client_id): 0.25 if client_id < 4 else 0.0 for client_id in range(5)
    }


def test_centred_clipping_goes_on_from_the_previous_aggregate(tmp_path: Path) -> None:
    # Targets 2, 4, 6 and τ = 1. Round 0 from w = 0: moves 1, 2, 3 are cut to 1 each: w = 1, the centre is 1.
    # Round 1: moves ½(2 − 1), ½(4 − 1), ½(6 − 1) = ½, 3/2, 5/2 are −½, ½, 3/2 from the centre; the last is cut to 1:
    # 1 + (−½ + ½ + 1) / 3 = 4/3, and w = 7/3.
    found, _ = moved(tmp_path, (2.0, 4.0, 6.0), aggregation=CentredClipping(1.0), max_rounds=2)
    assert found == pytest.approx(7 / 3, abs=1e-6)


def test_scaffolds_model_and_change_are_chosen_together(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Spots(TARGETS), algorithm=Scaffold(), aggregation=Krum(1), max_rounds=1)
    # Krum takes client 1, as above: its model 2, and its change of the control: (0 − 2) / (1 step · lr ½) = −4, which
    # the server takes as the mean over all five.
    assert weights(made)[W].flatten()[0] == 2.0
    assert made.run.federation.server["control"][W].flatten()[0] == -4.0


def test_buffers_and_counters_are_their_medians(tmp_path: Path) -> None:
    data, rule = Threes(4), CentredClipping(1e-3)
    made = fit(tmp_path, Wanderer(), data, FedAvg(), aggregation=rule, max_rounds=1)
    plain = fit(tmp_path, Wanderer(), Threes(4), FedAvg(), aggregation=Median(), max_rounds=1)
    buffers = [name for name in weights(made) if "running" in name or "num_batches" in name]
    assert len(buffers) == 3
    for name in buffers:
        assert torch.equal(weights(made)[name], weights(plain)[name])
    assert weights(made)["network.1.num_batches_tracked"] == 1
    assert not torch.equal(weights(made)["network.0.weight"], weights(plain)["network.0.weight"])


# ---------------------------------------------------------------------- refused, skipped, said


@pytest.mark.parametrize(
    ("rule", "algorithm", "words"),
    [
        (Median(), FedNova(), "cannot replace the mean of FedNova: its server does not average what clients send"),
        (Median(), LocalOnly(), "has nothing to combine: clients of LocalOnly send nothing"),
        (TrimmedMean(2), FedAvg(), "TrimmedMean needs cohorts of at least 5 clients, and a round has 4"),
        (Krum(1), FedAvg(), "Krum needs cohorts of at least 5 clients, and a round has 4"),
        (Krum(2, "byzfl"), FedAvg(), "Krum needs cohorts of at least 5 clients, and a round has 4"),
        (Median(NNM(2)), FedAvg(), "Median after NNM needs cohorts of at least 5 clients"),
        (TrimmedMean(1, Bucketing(2)), FedAvg(), "TrimmedMean after Bucketing needs cohorts of at least 5 clients"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_training(
    rule: Any, algorithm: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        fit(tmp_path, data=Points(4), algorithm=algorithm, aggregation=rule)
    assert "\n" not in str(error.value)


def test_a_rule_and_privacy_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hides in a sum; leave one out"):
        fit(tmp_path, aggregation=Median(), privacy=ClientLevel(1.0, 1.0, delta=0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrimmedMean(-1), "trainer.aggregation.attackers is -1; it must be at least 0"),
        (lambda: Krum(1, "blanchar"), "Krum.definition is 'blanchar'"),  # type: ignore[arg-type]
        (lambda: MultiKrum(1, keep=0), "trainer.aggregation.keep is 0"),
        (lambda: CentredClipping(0.0), "trainer.aggregation.radius is 0.0"),
        (lambda: NormBounding(float("nan")), "trainer.aggregation.norm is nan"),
        (lambda: GeometricMedian(0.0), "trainer.aggregation.smoothing is 0.0"),
        (lambda: Bucketing(0), "trainer.aggregation.before.size is 0"),
        (lambda: NNM(-1), "trainer.aggregation.before.attackers is -1"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_round_with_too_few_updates_is_skipped_and_counted(tmp_path: Path) -> None:
    # Of four clients some drop out; a trimmed mean with one attacker needs three.
    made = fit(
        tmp_path, data=Spots((2.0, 4.0, 6.0, 8.0)), aggregation=TrimmedMean(1), max_rounds=12, logger=True,
        participation=UniformParticipation(4, dropout_before=0.4),
    )  # fmt: skip
    found = rows(made.log_dir / "metrics.csv")
    skipped = [row["aggregation/skipped"] == "1.0" for row in found]
    assert skipped == [int(row["participation/count"]) < 3 for row in found]
    assert any(skipped)
    assert not all(skipped)


def test_a_round_without_updates_is_skipped_too(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Points(3), aggregation=Median(), participation=PoissonParticipation(1e-9), max_rounds=1)
    assert made.metrics["aggregation/skipped"] == 1
    assert weights(made)[W].tolist() == [[0.0, 0.0]]


def test_ignored_weights_are_said_once_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, data=Points(4), aggregation=Median())
    assert capsys.readouterr().out.count("Median ignores the clients' numbers of samples") == 1
    fit(tmp_path, data=Points(4), aggregation=Median(), algorithm=FedAvg(weighting="uniform"))
    assert "ignores" not in capsys.readouterr().out


# ---------------------------------------------------------------------- resumed, in groups, over nodes


def run(folder: Path, name: str, rounds: int = 3, **kwargs: Any) -> Any:
    """Rounds of a rule over Spots whose clients differ."""
    settings: dict[str, Any] = {"participation": UniformParticipation(6)} | kwargs
    return fit(folder, data=Spots(range(8)), max_rounds=rounds, aggregation=RULES[name](), **settings)


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
    make = small(data=lambda: Spots(range(8)), max_rounds=2, aggregation=RULES[name]())
    simulated = simulate(make, tmp_path / "one")
    make = small(data=lambda: Spots(range(8)), max_rounds=2, aggregation=RULES[name]())
    deployed = deploy(make, tmp_path / "grid", [[0, 1, 5], [2, 3, 4, 6, 7]])
    assert_same(weights(simulated), weights(deployed))
