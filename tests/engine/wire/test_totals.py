"""Sums that do not depend on who has added which part."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.engine.evaluation.protocols import ClientRow, spread
from lit_fed.engine.loop.ledger import RoundLedger
from lit_fed.engine.wire.totals import Total, exact_sum, totals_of

numbers = st.floats(-1e300, 1e300)


@given(st.lists(st.tuples(numbers, st.integers(0, 5)), min_size=1, max_size=20), st.data())
def test_a_mean_is_the_same_whoever_adds_up_which_part(column: list[tuple[float, int]], data: st.DataObject) -> None:
    home = data.draw(st.lists(st.integers(0, 3), min_size=len(column), max_size=len(column)))
    nodes = [[pair for pair, place in zip(column, home, strict=True) if place == node] for node in range(4)]
    totals = [totals_of([({"a": value}, weight) for value, weight in held]) for held in nodes if held]
    assert sum(part["a"].weight for part in totals) == sum(weight for _, weight in column)
    parts = [one for part in totals for one in part["a"].parts]
    assert exact_sum(parts) == exact_sum([value * weight for value, weight in column])


@given(st.lists(numbers, min_size=1, max_size=20))
def test_a_total_is_exact(column: list[float]) -> None:
    (total,) = totals_of([({"a": value}, 1) for value in column]).values()
    assert sum(map(Fraction, total.parts)) == sum(map(Fraction, column))
    assert len(total.parts) <= 40


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([1e308, 1e308], math.inf),
        ([math.inf, 1.0], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan], math.nan),
    ],
)
def test_what_is_no_number_stays_none(column: list[float], expected: float) -> None:
    (total,) = totals_of([({"a": value}, 1) for value in column]).values()
    assert exact_sum(column) == pytest.approx(expected, nan_ok=True)
    assert exact_sum(total.parts) == pytest.approx(expected, nan_ok=True)


def test_over_clients_without_rows_there_is_a_mean_only() -> None:
    # (1 + 2 + 6 + 7)/4 = 4; the loss is that of the two with rows: mean 3, standard deviation 1.
    rows = [ClientRow(0, "test", "acc", 1.0), ClientRow(1, "test", "acc", 2.0)]
    rows += [ClientRow(0, "test", "loss", 2.0), ClientRow(1, "test", "loss", 4.0)]
    found = spread("clients", rows, [{"acc": Total((13.0,), 2), "f1": Total((1.0, 0.5), 3)}])
    assert {name for name in found if not name.startswith("clients/loss")} == {"clients/acc_mean", "clients/f1_mean"}
    assert (found["clients/acc_mean"], found["clients/f1_mean"]) == (4.0, 0.5)
    assert (found["clients/loss_mean"], found["clients/loss_std"]) == (3.0, 1.0)


def test_training_means_are_weighted_by_samples_over_all() -> None:
    # Client 0 has 2 samples and loss 4; two clients with 6 samples add up to 8: (2·4 + 8)/(2 + 6) = 2.
    ledger = RoundLedger(None, logged={0: {"train/loss": 4.0}})
    ledger.totals = [{"train/loss": Total((8.0,), 6), "train/extra": Total((), 0)}]
    assert ledger._training_means(lambda ids: [2] * len(ids)) == {"train/loss": 2.0, "train/extra": 0.0}
