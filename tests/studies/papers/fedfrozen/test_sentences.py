"""What is claimed about a figure, from points made by hand."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from lit_fed.studies.papers.fedfrozen import Figure1, Figure2, Figure3, Proposition1
from lit_fed.studies.papers.fedfrozen.panels import KernelFigure
from lit_fed.studies.simulations.run_simulation import claims, summary
from lit_fed.studies.simulations.simulation import Point, verdicts


def curve(rho: float, *values: float) -> list[Point]:
    """A curve after rounds 0, 5, … of three seeds, which differ by a factor that no claim may depend on."""
    return [
        Point(f"profile, rho {rho:g}", "h", 5 * number, seed, value * 10**seed)
        for seed in range(3)
        for number, value in enumerate(values)
    ]


def outcomes(figure: type[KernelFigure], points: list[Point], *texts: Any) -> list[tuple[str, float | None]]:
    found = verdicts(figure(seeds=3, claims=list(texts)), points)
    return [(verdict.outcome, verdict.margin) for _, verdict, _ in found]


def test_a_curve_that_falls_and_one_that_turns_upward() -> None:
    points = [*curve(0, 8, 4, 3, 2), *curve(2, 8, 4, 5, 6)]
    found = outcomes(
        Figure1,
        points,
        "0 > step at rho=0",  # the smallest fall is from 4 to 3
        "0 > step at rho=2",  # the largest rise is from 4 to 5
        "last > lowest + 0.01 at rho=2",
        "first > lowest at rho=2",
        "h rises from 5 at rho=2",  # thirds of 4, 5, 6
    )
    expected = [log(4 / 3), -log(5 / 4), log(6 / 4) - 0.01, log(8 / 4), log(6 / 4)]
    assert [outcome for outcome, _ in found] == ["holds", "fails", "holds", "holds", "holds"]
    assert [margin for _, margin in found] == pytest.approx(expected)


def test_losses_of_figure_2_by_method_and_rho_and_ratios_by_local_steps() -> None:
    points = [Point("loss by rho", "FedAvg", 2, seed, 6 * 10**seed) for seed in range(3)]
    points += [Point("loss by rho", "FedFrozen", 2, seed, 3 * 10**seed) for seed in range(3)]
    points += [Point("loss ratio by E", "FedFrozen/FedAvg", e, seed, 2 / e) for e in (1, 5) for seed in range(3)]
    points += [Point("loss by warm-up", "FedFrozen", 0.25, seed, 1) for seed in range(3)]
    found = outcomes(Figure2, points, "fedavg > fedfrozen at rho=2", "ratio/E=1 > ratio/E=5", "0 > ratio at E=1")
    assert [outcome for outcome, _ in found] == ["holds", "holds", "fails"]
    assert [margin for _, margin in found] == pytest.approx([log(2), log(5), -log(2)])


def test_rows_of_figure_3_are_rhos() -> None:
    points = [Point("loss by warm-up and rho", "rho 2", x, seed, 4 * x) for x in (0.5, 1) for seed in range(3)]
    points += [Point("drift by ridge", "FedFrozen", 100, seed, 1) for seed in range(3)]
    assert outcomes(Figure3, points, "warm=1 > warm=0.5 at rho=2") == [("holds", pytest.approx(log(2)))]


def test_rows_of_proposition_1_are_its_terms_and_warm_ups_are_no_logarithms() -> None:
    points = []
    for seed in range(3):
        for panel, values in {
            "freezing bias by round": (8, 4, 2),
            "residual by round": (1, 2, 4),
            "bound by round": (9, 6, 6),
            "excess by round": (3, 3, 4),
        }.items():
            points += [Point(panel, "rho 1", 10 * n, seed, value * 10**seed) for n, value in enumerate(values)]
        points += [Point("best warm-up by rho", line, 1, seed, x) for line, x in (("bound", 0.5), ("run", 0.25))]
        points.append(Point("loss over the best by rho", "bound", 1, seed, 2))
    found = outcomes(
        Proposition1,
        points,
        "bias falls at rho=1",  # thirds of 8, 4, 2
        "residual rises from 10 at rho=1",
        "slack > 0 at rho=1",  # the least of 9/3, 6/3, 6/4
        "warm_bound/rho=1 - 0.2 > warm_run/rho=1",
        "0.1 > regret at rho=1",
    )
    assert [outcome for outcome, _ in found] == ["holds", "holds", "holds", "holds", "fails"]
    expected = [log(8 / 2), log(4 / 2), log(6 / 4), 0.05, 0.1 - log(2)]
    assert [margin for _, margin in found] == pytest.approx(expected)


def test_a_loss_that_diverged_decides_nothing() -> None:
    points = [Point("loss by rho", "FedAvg", 2, seed, float("nan") if seed == 1 else 6) for seed in range(3)]
    points += [Point("loss by rho", "FedFrozen", 2, seed, 3) for seed in range(3)]
    claim = "fedavg > fedfrozen at rho=2"
    ((_, verdict, seeds),) = verdicts(Figure2(seeds=3, claims=[claim]), points)
    assert (verdict.outcome, seeds) == ("undecided", 3)  # infinite is above 3, as 6 is


def test_claims_that_the_figure_cannot_answer() -> None:
    points = curve(0, 2, 1)
    with pytest.raises(ConfigError, match=r"simulate\.claims, 1.*the column 'rho=7' does not exist"):
        outcomes(Figure1, points, "last > lowest at rho=7")
    with pytest.raises(ConfigError, match="a simulation has neither metric nor report"):
        outcomes(Figure1, points, {"claim": "first > last at rho=0", "metric": "global/acc"})


def test_the_table_says_what_is_claimed_in_words() -> None:
    settings = Figure1(seeds=3, claims=[{"says": "It falls", "claim": "first > last at rho=0"}])
    assert "| It falls (`first > last at rho=0`) | holds | +0.6931 ± " in claims(settings, curve(0, 2, 1))


def test_of_a_long_line_some_numbers_are_shown_and_the_last() -> None:
    short = [Point("loss", "a", float(x), 0, x / 2) for x in range(3)]
    assert summary(short) == "loss | a | 0: 0, 1: 0.5, 2: 1"
    # Of 1,001 numbers every 84th, for 1001/12 = 83.4: twelve, and the last.
    long = [Point("loss", "b", float(x), 0, x) for x in range(1001)]
    assert summary(long) == "loss | b | " + ", ".join(f"{x:g}: {x:.4g}" for x in [*range(0, 1000, 84), 1000])
