"""Claims: how a sentence is read, and how seeds decide it."""

from __future__ import annotations

from math import inf, nan

import pytest
from scipy.stats import ttest_1samp

from lit_fed.errors import ConfigError
from lit_fed.studies.file.claims import Link, Verdict, by_holm, check, decide, parse_claim, rejected, rise

ROWS, COLUMNS = ["fedavg", "prox", "dr+"], ["s=2", "s=10"]


def parsed(text, rows=ROWS, columns=COLUMNS, skip=()):
    return parse_claim(text, "study.yaml: claim 1", rows, columns, skip)


def error(text, **kwargs):
    with pytest.raises(ConfigError) as caught:
        parsed(text, **kwargs)
    return str(caught.value)


# --- decisions -------------------------------------------------------------------------------------------------------


def test_three_seeds_that_agree_hold():
    # 2, 3, 4: mean 3, sample variance (1 + 0 + 1)/2 = 1; t(2) = 4.303, so the spread is 4.303·1/√3 = 2.4841 < 3.
    verdict = decide([2.0, 3.0, 4.0])
    assert (verdict.outcome, verdict.margin, verdict.seeds) == ("holds", 3.0, 3)
    assert verdict.spread == pytest.approx(2.4841, abs=1e-4)


def test_holm_takes_the_claims_of_a_study_together():
    """0.005 ≤ 0.05/4 and 0.01 ≤ 0.05/3, and 0.03 > 0.05/2, so neither it nor 0.04 remains: Holm's step-down."""
    assert rejected([0.005, 0.01, 0.03, 0.04], 4) == 2
    assert rejected([0.005, 0.01, 0.03, 0.04], 6) == 2  # 0.05/6 = 0.0083 and 0.05/5 = 0.01
    assert rejected([0.005, 0.01, 0.03, 0.04], 7) == 1  # 0.05/7 = 0.0071 and 0.05/6 = 0.0083
    found = [("holds", 0.01), ("fails", 0.04), ("holds", 0.03), ("fails", 0.005), ("undecided", None)]
    noted = by_holm([Verdict(outcome, p=p, note="at worst a > b") for outcome, p in found])
    apart = "at worst a > b; not by Holm"
    assert [verdict.note for verdict in noted] == ["at worst a > b", apart, apart, *["at worst a > b"] * 2]
    assert [(verdict.outcome, verdict.p) for verdict in noted] == found
    # An undecided claim is a question, too: 0.03 of two is compared with 0.05/2, and alone with 0.05.
    (one, _), (alone,) = (
        by_holm([Verdict("holds", p=0.03), Verdict("undecided", p=0.4)]),
        by_holm([Verdict("holds", p=0.03)]),
    )
    assert (one.note, alone.note) == ("not by Holm", "")


def test_the_opposite_fails():
    assert decide([-2.0, -3.0, -4.0]).outcome == "fails"


def test_within_the_spread_is_undecided_though_all_seeds_agree():
    # 1 and 4: mean 2.5, s = 3/√2 = 2.1213; t(1) = 12.706, so the spread is 12.706·2.1213/√2 = 19.059 > 2.5.
    verdict = decide([1.0, 4.0])
    assert (verdict.outcome, verdict.note) == ("undecided", "within the spread")
    assert verdict.spread == pytest.approx(19.059, abs=1e-3)


def test_two_seeds_decide_what_is_clear():
    # 20 and 21: mean 20.5, s = 0.7071, spread 12.706·0.5 = 6.353.
    assert decide([20.0, 21.0]).outcome == "holds"


def test_exact_equality_is_undecided():
    assert decide([0.0, 0.0, 0.0]).outcome == "undecided"


def test_what_does_not_vary_is_decided():
    assert decide([1.0, 1.0]).outcome == "holds"


def test_a_difference_that_is_surely_small_is_equal():
    # −0.5, 0.5, 0.3: mean 0.1, sample variance (0.36 + 0.16 + 0.04)/2 = 0.28; t(2) = 4.303, so the spread is
    # 4.303·√0.28/√3 = 1.3145. The interval, −1.2145 to 1.4145, lies within 1.5 of zero on both sides, not within 1.4.
    verdict = decide([-0.5, 0.5, 0.3], equal=1.5)
    assert (verdict.outcome, verdict.note) == ("equal", "within 1.5")
    assert verdict.spread == pytest.approx(1.3145, abs=1e-4)
    assert decide([-0.5, 0.5, 0.3], equal=1.4).outcome == "undecided"
    assert decide([0.0, 0.0, 0.0], equal=0.1).outcome == "equal"
    assert decide([0.1], equal=1.0).outcome == "undecided"


def test_equality_is_symmetric_and_needs_both_of_its_tests():
    # 5 seeds, t(4) = 2.776. −0.4 ± 0.2: mean −0.4, s = √(2·0.04/4) = 0.1414, spread 2.776·0.1414/√5 = 0.1756: it fails.
    # With s ten times as large the spread is 1.756, and −0.4 − 1.756 = −2.156: equal within 2.16, not within 2.15,
    # though the test against the upper bound, −0.4 + 1.756 = 1.356 < 2.15, rejects there too.
    near = [-0.6, -0.4, -0.4, -0.4, -0.2]
    wide = [-2.4, -0.4, -0.4, -0.4, 1.6]
    assert decide(near, equal=1.0).outcome == "fails"
    assert decide(wide, equal=2.16).outcome == "equal"
    assert decide(wide, equal=2.15).outcome == "undecided"
    assert decide([-value for value in wide], equal=2.16).outcome == "equal"


@pytest.mark.parametrize(
    ("differences", "note"),
    [([], "no seed has finished"), ([5.0], "one seed has no spread"), ([1.0, float("nan")], "a value is not finite")],
)
def test_too_little_decides_nothing(differences, note):
    verdict = decide(differences)
    assert (verdict.outcome, verdict.note) == ("undecided", note)


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [
        ([inf] * 6, "holds"),  # 2·2⁻⁶ = 0.03125
        ([inf] * 5, "undecided"),  # 2·2⁻⁵ = 0.0625
        ([inf, 0.1, 2.0, 3.0, 4.0, 5.0], "holds"),
        ([-inf, -0.1, -2.0, -3.0, -4.0, -5.0], "fails"),
        ([inf, -0.1, 2.0, 3.0, 4.0], "undecided"),
        ([inf, 0.0, 2.0, 3.0, 4.0], "undecided"),
        ([inf, inf, inf, inf, nan], "undecided"),
        ([inf, -inf, 1.0, 2.0, 3.0], "undecided"),
        ([inf, *[1.0] * 8, -1.0], "holds"),  # the sign test's tables: one of ten, 2·(1 + 10)/2¹⁰ = 0.021
        ([-inf, *[-1.0] * 8, 1.0], "fails"),
        ([inf, *[1.0] * 7, -1.0, -1.0], "undecided"),  # two of ten, 2·(1 + 10 + 45)/2¹⁰ = 0.109
        ([inf, *[1.0] * 7, 0.0, nan], "undecided"),
        ([inf, *[1.0] * 7, -1.0], "holds"),  # one of nine, 2·10/2⁹ = 0.039
        ([inf, *[1.0] * 6, -1.0], "undecided"),  # one of eight, 2·9/2⁸ = 0.070
    ],
)
def test_where_a_value_is_infinite_signs_decide(differences, outcome):
    verdict = decide(differences, equal=1.0)
    assert verdict.outcome == outcome
    assert verdict.note.startswith("a value is not finite")


def test_many_seeds_have_a_quantile_of_their_own():
    # Student's t of 40 degrees of freedom has the 97.5 % quantile 2.021 in printed tables; s of 0, 1, 0, 1, … over 41.
    verdict = decide([float(seed % 2) for seed in range(41)])
    assert verdict.spread == pytest.approx(2.021 * 0.50605 / 41**0.5, rel=1e-3)


def test_the_p_value_is_the_two_sided_t_tests():
    for values in ([2.0, 3.0, 4.0], [-0.5, 0.5, 0.3], [-3.0, 1.0, 0.5, -2.0], [20.0, 21.0]):
        verdict = decide(values)
        assert verdict.p == pytest.approx(ttest_1samp(values, 0.0).pvalue)
        assert (verdict.p <= 0.05) == (abs(verdict.margin) > verdict.spread)
    assert (decide([1.0, 1.0]).p, decide([0.0, 0.0]).p) == (0.0, 1.0)


def test_a_claim_fails_at_the_level_over_its_places_and_holds_where_each_does():
    # Three seeds of −2, −3, −4: |t| = 3·√3 = 5.196, p = 0.0351 (two degrees of freedom: p = 1 − t/√(t² + 2)).
    down, up, zero = [-2.0, -3.0, -4.0], [2.0, 3.0, 4.0], [0.0] * 3
    p = 1 - 27**0.5 / (27 + 2) ** 0.5
    assert decide(down).p == pytest.approx(p)
    assert decide(down, inequalities=2).p == pytest.approx(2 * p)
    assert (decide(down).outcome, decide(down, inequalities=2).outcome) == ("fails", "undecided")
    claim = parsed("dr+ > fedavg at s=2 s=10")
    for second, outcome in ((up, "holds"), (down, "undecided"), ([-20.0, -21.0, -22.0], "fails")):
        values = {("dr+", "s=2"): up, ("dr+", "s=10"): second, ("fedavg", "s=2"): zero, ("fedavg", "s=10"): zero}
        verdict = check(claim, range(3), lambda place, seed, values=values: values[place][seed], lambda *_: [])
        assert verdict.outcome == outcome


def test_the_worst_place_is_the_farthest_from_holding_in_units_of_its_spread():
    # 1 ± 0.25 holds with the smaller margin; 5 ± 7.5 does not hold.
    values = {"s=2": [0.9, 1.0, 1.1], "s=10": [2.0, 5.0, 8.0]}
    verdict = check(parsed("dr+ > 0 at s=2 s=10"), range(3), lambda p, seed: values[p[1]][seed], lambda *_: [])
    assert (verdict.outcome, verdict.margin) == ("undecided", 5.0)


def test_a_rise_is_the_last_third_over_the_first():
    # Seven values, thirds of two: (6 + 8)/2 − (1 + 3)/2 = 5.
    assert rise([1, 3, 100, -100, 0, 6, 8]) == 5.0
    assert rise([1, 4]) == 3.0
    assert rise([1]) is None


VALUES = {("fedavg", "s=2"): [10.0, 11.0], ("prox", "s=2"): [15.0, 16.1], ("fedavg", "s=10"): [50.0, 51.0]}


def value(place, seed):
    values = VALUES.get(place, [])
    return values[seed] if seed < len(values) else None


def outcome(text, seeds=(0, 1), curve=lambda place, seed: []):
    return check(parsed(text), seeds, value, curve)


def test_seeds_are_paired():
    # Unpaired, 10 and 11 against 15 and 16.1 vary by 1; paired differences 5 and 5.1 by 0.1: 5.05 ± 12.706·0.0707/√2.
    verdict = outcome("prox > fedavg at s=2")
    assert verdict.outcome == "holds"
    assert verdict.margin == pytest.approx(5.05)
    assert verdict.spread == pytest.approx(12.706 * 0.05, abs=1e-4)


def test_a_margin_counts():
    assert outcome("prox - fedavg > 4 at s=2").outcome == "holds"
    assert outcome("prox - fedavg > 6 at s=2").outcome == "fails"
    assert outcome("prox - fedavg > 5 at s=2").outcome == "undecided"
    assert outcome("fedavg + 4 < prox at s=2").margin == pytest.approx(1.05)


def test_a_chain_stands_as_its_worst_link():
    # prox − fedavg is 5.05 and fedavg − 50 is −39.5.
    verdict = outcome("prox > fedavg > 50 at s=2")
    assert (verdict.outcome, verdict.margin) == ("fails", pytest.approx(-39.5))
    assert verdict.note == "at worst fedavg > 50 at s=2"
    # 10.5 ± 6.35 is nearer to zero, in units of its spread, than 5.05 ± 0.64.
    assert outcome("0 < fedavg < prox at s=2").margin == pytest.approx(10.5)


def test_a_claim_is_equal_where_a_link_is_and_none_is_worse():
    # prox − fedavg is 5.05 ± 0.64: 5 more than that is 0.05 ± 0.64, equal within 1; fedavg > 50 fails all the same.
    claim = {"claim": "prox - fedavg > 5 at s=2", "equal": 1.0}
    assert outcome(claim).outcome == "equal"
    assert outcome(claim | {"claim": "fedavg + 20 > prox > fedavg + 5 at s=2"}).outcome == "equal"
    assert outcome(claim | {"claim": "prox - 5 > fedavg > 50 at s=2"}).outcome == "fails"
    assert outcome(claim | {"claim": "prox > fedavg at s=2"}).outcome == "holds"
    assert outcome(claim).link.text == "prox - fedavg > 5 at s=2"


def test_differences_of_differences():
    # (50 − 10) − (15 − 10) = 35 and (51 − 11) − (16.1 − 11) = 34.9.
    verdict = outcome("fedavg/s=10 - fedavg/s=2 > prox/s=2 - fedavg/s=2")
    assert (verdict.outcome, verdict.margin) == ("holds", pytest.approx(34.95))


def test_a_place_may_count_several_times():
    # 3·(10 and 11) = 30 and 33; 2·(15 and 16.1) = 30 and 32.2: the differences are 0 and 0.8.
    verdict = outcome("3*fedavg > 2*prox at s=2")
    assert verdict.margin == pytest.approx(0.4)
    assert outcome("prox + prox > 2*fedavg + 2*3 at s=2").margin == pytest.approx(2 * 5.05 - 6)


def test_seeds_without_all_of_it_do_not_count():
    verdict = outcome("prox > fedavg at s=2", seeds=(0, 1, 2))
    assert (verdict.outcome, verdict.seeds, verdict.note) == ("holds", 2, "some seeds are missing")
    assert outcome("dr+ > fedavg at s=2").note == "no seed has finished"


def test_the_shape_of_a_curve():
    curves = {0: [(0, 1.0), (5, 2.0), (9, 4.0)], 1: [(0, 1.0), (5, 2.0), (9, 4.1)]}

    def curve(place, seed):
        return curves[seed]

    # Last less first third: 3 and 3.1; from round 5 on, 2 and 2.1.
    assert outcome("fedavg rises by 2 at s=2", curve=curve).margin == pytest.approx(1.05)
    assert outcome("fedavg rises from 5 at s=2", curve=curve).margin == pytest.approx(2.05)
    assert outcome("fedavg rises to 5 at s=2", curve=curve).margin == pytest.approx(1.0)
    assert outcome("fedavg falls at s=2", curve=curve).outcome == "fails"
    assert outcome("fedavg rises from 9 at s=2", curve=curve).note == "no seed has finished"


# --- sentences -------------------------------------------------------------------------------------------------------


def test_rows_columns_and_places_can_be_named():
    expected = (Link(((1.0, ("dr+", "s=2")), (-1.0, ("fedavg", "s=2")))),)
    for text in ("dr+ > fedavg at s=2", "fedavg < dr+ at s=2", "dr+/s=2 > fedavg/s=2", "dr+ − fedavg > 0 at s=2"):
        assert parsed(text).links == expected
    assert parsed("s=10 > s=2 at fedavg").links == (Link(((1.0, ("fedavg", "s=10")), (-1.0, ("fedavg", "s=2")))),)
    assert [link.terms[0][1] for link in parsed("dr+ > fedavg at s=2, s=10").links] == [("dr+", "s=2"), ("dr+", "s=10")]
    assert parsed("dr+ > fedavg", columns=["all"]).links[0].terms[0] == (1.0, ("dr+", "all"))
    claim = parsed({"claim": "dr+ > fedavg at s=2", "says": "It is better.", "metric": "train/loss", "report": "mean"})
    assert (claim.says, claim.metric, claim.report) == ("It is better.", "train/loss", "mean")
    assert claim.places == [("dr+", "s=2"), ("fedavg", "s=2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fedavg", "write a > b, a < b, or a rises or a falls"),
        ("fedavg > prox < dr+ at s=2", "the claim mixes > and <; use one of them"),
        ("fedavg > prox", "'fedavg' has several columns; end it with 'at' and one of s=2, s=10"),
        ("fedavg > prux at s=2", "the row 'prux' does not exist; did you mean prox?"),
        ("fedavg > prox at s=3", "the column 's=3' does not exist; did you mean s=2?"),
        ("fedavg > prox at", "missing after 'at'"),
        ("fedavg > at s=2", "'nothing' is not a sum"),
        ("fedavg prox > 0 at s=2", "'fedavg prox' is not a sum"),
        ("1 > 0", "it names neither a row nor a column"),
        ("much*fedavg > prox at s=2", "'much' in 'much*fedavg' is not a number; write it as in 3*fedavg"),
        ("fedavg rises by much at s=2", "'much' follows 'by'; write a number"),
        ("fedavg rises quickly at s=2", "write by, from or to"),
        ("fedavg rises from 5 to 5 at s=2", "the curve from round 5 to 5 is empty"),
        ("fedavg prox rises at s=2", "write one row or column before 'rises'"),
        ({"says": "x"}, "it must be a text such as 'a > b at c'"),
        ({"claim": "fedavg > 0 at s=2", "says": "x", "why": "y"}, "'why' must be a text named claim, says, metric"),
        ({"claim": "fedavg > 0 at s=2", "equal": "1"}, "or a number named equal or published"),
        ({"claim": "fedavg > 0 at s=2", "equal": 0}, "equal is 0; it must be above 0"),
        (
            {"claim": "fedavg > 0 at s=2", "report": "first"},
            "report is 'first'; it must be last, best, mean, 'best of' and a metric, or 'first', a metric, 'at' and a "
            "number",
        ),
    ],
)
def test_what_is_no_claim_says_why(text, expected):
    assert expected in error(text)


def test_a_claim_over_a_skipped_place_is_refused():
    assert "prox/s=2 is skipped" in error("prox > fedavg at s=2", skip={("prox", "s=2")})
