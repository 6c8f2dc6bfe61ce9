"""RAF's theory of the last layer: its least squares by autograd, its constants by hand, and its two equations."""

from __future__ import annotations

import re
from math import log

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.studies.papers.raf import LastLayer
from lit_fed.studies.papers.raf.convergence import draw
from tests.support import ROOT

SMALL = LastLayer(seeds=1, num_clients=3, samples=4, dim=2, pixels=4, levels=2, rounds=20, rates=(1.0, 0.34))


def test_gradients_are_autograds() -> None:
    """Of the objective with RAF's teacher, which has no gradient, and with one that has; drawn as `draw` does."""
    heads = draw(SMALL, torch.Generator().manual_seed(5))
    draws = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    best = normal(2) + SMALL.apart * normal(3, 1, 2)
    higher = normal(3, 4, 4, 2) / 2**0.5
    target = (higher @ best[:, :, :, None]).squeeze(-1) + 0.1 * normal(3, 4, 4)
    lower = (higher[:, :, 0::2] + higher[:, :, 1::2]) / 2 + 0.3 * normal(3, 4, 2, 2) / 2**0.5
    w = torch.tensor([0.7, -1.2], dtype=torch.float64, requires_grad=True)
    for stops, matrix in ((True, heads.own), (False, heads.full)):
        teacher = (higher[1] @ w).detach() if stops else higher[1] @ w
        student = (lower[1] @ w).repeat_interleave(2, 1)
        each = (higher[1] @ w - target[1]).square().sum(1) + (teacher - student).square().sum(1)
        (gradient,) = torch.autograd.grad(each.mean() + SMALL.gamma / 2 * w.square().sum(), w)
        torch.testing.assert_close((matrix[1] @ w.detach() - heads.pull[1]).mean(0), gradient)


def test_the_papers_two_equations_in_one_dimension() -> None:
    """A student 2w and a teacher 3w at w = 1.5: the objective has 1.5² = 2.25, Eq. 12 has 1.5·2·(3 − 2)·1.5 = 4.5."""
    w = torch.tensor(1.5, requires_grad=True)
    objective = (3 * w.detach() - 2 * w) ** 2
    alternative = w * 2 * (3 - 2) * w
    assert (objective.item(), alternative.item()) == (2.25, 4.5)
    gradients = [torch.autograd.grad(one, w)[0].item() for one in (objective, alternative)]
    assert gradients == [-6.0, 6.0]  # −2·2·1.5, and 2·2·1.5


def test_the_bound_by_hand() -> None:
    """One client of one sample and one level is gradient descent: no variance, no drift, no heterogeneity."""
    alone = LastLayer(
        seeds=1, num_clients=2, samples=1, dim=1, pixels=1, levels=1, apart=0.0, local_steps=1, rounds=20, rates=(1.0,)
    )
    points = {(point.line, point.x): point.value for point in alone.points() if point.panel == "gap by step"}
    heads = draw(alone, torch.Generator().manual_seed(0))
    hessians, pulls = heads.full[:, 0, 0, 0], heads.pull[:, 0, 0]
    big, small = float(hessians.max()), float(hessians.min())
    best = float(pulls.sum() / hessians.sum())
    begin = 8 * big / small
    # Γ = F* − mean of F_k* = mean of ½h(w* − w_k*)²; σ = 0, E = 1, and all take part.
    spread = float((hessians * (best - pulls / hessians) ** 2).mean() / 2)
    for step in (1, 20):
        bound = big / small / (begin + step - 1) * (12 * big * spread / small + small * begin / 2 * best**2)
        assert points["rate=1, bound", step] == pytest.approx(bound, rel=1e-9)
    first = 2 / (small * begin) * float(pulls.mean())  # a step of 2/(μg) from 0
    gap = float(hessians.mean()) / 2 * (first - best) ** 2
    assert points["rate=1", 1] == pytest.approx(gap, rel=1e-6)


def test_readings_are_logarithms_and_the_least_slack() -> None:
    points = SMALL.points()
    values, curves = SMALL.readings(points)
    assert {column for _, column in values} == {"rate=1", "rate=0.34"}
    gaps, bounds = (curves[row, "rate=1"][0] for row in ("gap", "gap_bound"))
    assert values["gap_slack", "rate=1"][0] == min(b - a for (_, a), (_, b) in zip(gaps, bounds, strict=True))
    raw = {(point.panel, point.line, point.x): point.value for point in points}
    assert values["smooth", "rate=1"][0] == pytest.approx(log(raw["propositions by rate", "smooth", 1.0]))
    assert values["power", "rate=1"][0] == raw["power by rate", "power", 1.0]
    assert points == SMALL.points()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"simulate\.pixels"):
        LastLayer(pixels=2, levels=3)
    with pytest.raises(ConfigError, match=r"simulate\.rates"):
        LastLayer(rates=(0.0,))


def test_the_shipped_file_asks_what_the_figure_gives() -> None:
    text = (ROOT / "configs/papers/raf/simulations/raf_theorem1.yaml").read_text(encoding="utf-8")
    values, _ = SMALL.readings(SMALL.points())
    rows = {row for row, _ in values}
    asked = {row for row in rows if re.search(rf"(claim: |[<>] ){row}\b", text)}
    assert asked == rows - {"gap", "gap_bound"}
