"""UWA's Proposition 4.2 and its corollaries by hand, and on runs of stage 2 whose gradients are autograd's."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.studies.papers.uwa import Proposition42
from lit_fed.studies.papers.uwa.bounds import (
    Descent,
    Trace,
    best_oracle,
    bias_bound,
    linear_bound,
    linear_floor,
    linear_steps,
    offset,
    oracle,
    stationarity_bound,
    stationarity_floor,
    stationarity_steps,
)
from lit_fed.studies.papers.uwa.stage2 import (
    Data,
    GaussianTask,
    draw,
    measure,
    minimiser,
    mixture,
    private_training,
    refine,
)
from lit_fed.studies.simulations.run_simulation import claims
from lit_fed.studies.simulations.simulation import Point, verdicts
from tests.support import ROOT

SMALL = GaussianTask(num_clients=3, num_classes=4, known=2, dim=5, examples=12, calibration=8, public=20)
HOW = Descent(smoothness=2.0, convexity=1.0, lr=0.25)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trace(gradient: Tensor, mismatch: Tensor, bias: Tensor) -> Trace:
    one = torch.ones_like(gradient)
    return Trace(torch.arange(len(gradient)).double(), one, gradient, bias, mismatch, 3 * one, 0.4 * one)


def test_the_constants_and_bounds_by_hand() -> None:
    # Squared gradients 4 and 1, mismatches 1 and ½: with c = ¼ Assumption C.4 needs b² = max(1 − 1, ½ − ¼) = ¼.
    # α = 1: m = 2·¼ = ½; with G² = 3 and ε = 0.1, ζ² = 2·0.3 + 2·¼ = 1.1. Eq. 4: ½·4 + 1.1 = 3.1, ½·1 + 1.1 = 1.6.
    run = trace(numbers(4, 1), numbers(1, 0.5), numbers(2, 1))
    assert offset(run, 0.25) == 0.25
    known = oracle(0.25, 0.25, 1.0, 3 * 0.1, 0.4)
    assert known == pytest.approx((0.5, 1.1, 0.4))
    assert bias_bound(run, known).tolist() == pytest.approx([3.1, 1.6])
    # Corollary 4.3, L = 2, γ = ¼: it ends at (1.1 + 2·¼·0.4)/½ = 2.6. From F − F* = 5, T = 10: 2·5/(10·¼·½) = 8 more.
    # Twice the floor is reached where 2·5/(T·⅛) = 2.6: T = 80/2.6 = 30.8.
    assert stationarity_floor(known, HOW) == pytest.approx(2.6)
    assert stationarity_bound(numbers(10), 5, known, HOW).item() == pytest.approx(10.6)
    assert stationarity_steps(5, known, HOW) == 31
    # Corollary 4.4, μ = 1: the floor is 2.6/2 = 1.3, the rate 1 − ¼·½ = ⅞; T = 2: 49/64·5 + 1.3 = 5.128125.
    # Twice the floor: log(5/1.3)/(1/8) = 8·1.347 = 10.8.
    assert linear_floor(known, HOW) == pytest.approx(1.3)
    assert linear_bound(numbers(2), 5, known, HOW).item() == pytest.approx(5.128125)
    assert linear_steps(5, known, HOW) == 11
    assert linear_steps(1, known, HOW) == 1, "it begins below the floor"


def test_the_constants_are_the_best_that_the_run_allows() -> None:
    run = trace(numbers(4, 1), numbers(1, 0.5), numbers(2, 1))
    best = best_oracle(run, 0.1)
    assert best.m < 1
    assert best.zeta / (1 - best.m) <= 1.1 / 0.5
    # A perfect teacher, and a mismatch that is a quarter of the gradient: c = ¼ needs neither G² nor b².
    assert best_oracle(trace(numbers(4, 1), numbers(1, 0.25), numbers(1, 0.25)), 0.0).zeta == 0


def test_a_sample_by_hand_meets_lemma_c8() -> None:
    # x = 2, θ = 0, two classes: f = (½, ½). The score's rows are (1 − ½, −½)·2 and its negative: ‖S‖² = 4·(2·½) = 4.
    # p_agg = (1, 0), p* = (¾, ¼): ∇J_agg = 2·(−½, ½) = (−1, 1), ∇J* = (−½, ½). Their difference has ‖·‖² = ½, which is
    # ‖S‖²·ε = 4·2/16. One sample is its own mean: no noise. F: x = 2 of class 0, ∇F = (−1, 1), so β = 0, and
    # ‖∇F − ∇J*‖² = ½. F = ln 2; from a θ* with p* = (¾, ¼), −2θ₁ + 2θ₀ = ln 3.
    x = torch.full((1, 1), 2.0).double()
    task = GaussianTask(num_clients=1, num_classes=2, known=1, dim=1, examples=1, calibration=1, public=1, ridge=1e-12)
    labels = torch.zeros(1, 1, dtype=torch.long)
    data = Data(task, x[None], labels, x[None], labels, x)
    theta, best = torch.zeros(1, 1, 2).double(), numbers(log(3) / 2, 0)[None]
    taught, ideal = numbers(1, 0)[None], (x @ best).softmax(-1)
    assert ideal[0].tolist() == pytest.approx([0.75, 0.25])
    found = [part.item() for part in measure(data, theta, taught, ideal, 1, data.risk(best[None]))]
    # F(θ) − F(θ*) = ln 2 − ln 4/3 = ln 3/2.
    assert found == pytest.approx([log(1.5), 2.0, 0.0, 0.5, 4.0, 0.0], abs=1e-9)


def test_gradients_are_autograds_and_the_minimiser_has_none() -> None:
    data = draw(SMALL, 0)
    theta = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    slope = torch.autograd.grad(data.risk(theta).sum(), theta)[0]
    torch.testing.assert_close(data.slope(theta.detach()), slope)
    each = [F.cross_entropy(x @ theta[0], y) for x, y in zip(data.inputs, data.labels, strict=True)]
    expected = torch.stack(each).mean() + 0.005 * theta[0].square().sum()
    torch.testing.assert_close(data.risk(theta)[0], expected)
    best = minimiser(data)
    assert data.slope(best[None]).abs().max() < 1e-8
    # Along any direction the curvature lies between μ and L.
    curvature = torch.autograd.functional.hessian(lambda t: data.risk(t[None])[0], theta[0].detach()).view(24, 24)
    lowest, *_, highest = torch.linalg.eigvalsh(curvature).tolist()
    assert SMALL.ridge - 1e-9 <= lowest
    assert highest <= data.smoothness


@pytest.mark.parametrize("temperature", [0.0, 0.25, 1.0])
def test_the_bias_stays_below_its_bound_along_a_run(temperature: float) -> None:
    data = draw(SMALL, 1)
    best, begin = minimiser(data), private_training(data, 50)
    taught = mixture(data, begin, temperature)
    torch.testing.assert_close(taught.sum(1), torch.ones(20).double())
    if not temperature:
        torch.testing.assert_close(taught, (data.public @ begin).softmax(-1).mean(0))
    how = Descent(data.smoothness, SMALL.ridge, 0.5 / data.smoothness)
    run = refine(data, begin, taught, best, how, 30, 4, 3, 0)
    assert run.steps.tolist() == list(range(0, 31, 3))
    error = float((taught - (data.public @ best).softmax(-1)).square().sum(1).mean())
    assert (run.bias <= bias_bound(run, best_oracle(run, error))).all()
    assert (run.excess > 0).all()


def test_the_noise_is_the_variance_of_batches() -> None:
    data = draw(SMALL, 2)
    begin = private_training(data, 20)
    taught, ideal = mixture(data, begin, 1.0), (data.public @ minimiser(data)).softmax(-1)
    noise = measure(data, begin, taught, ideal, 5, data.risk(begin[:1]))[-1]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(20, (20000, 5), generator=generator)
    x, errors = data.public, (data.public @ begin[0]).softmax(-1) - taught
    drawn = torch.einsum("sbd,sbc->sdc", x[chosen], errors[chosen]) / 5
    own = (drawn - x.T @ errors / 20).square().sum((1, 2)).mean()
    alone = measure(data, begin[:1], taught, ideal, 5, data.risk(begin[:1]))[-1]
    assert own.item() == pytest.approx(alone.item(), rel=0.03)  # 20,000 batches: a standard error of some 1 %
    assert noise > 0


def test_rows_and_slacks_of_points_by_hand() -> None:
    points = []
    for seed in range(3):
        for line, values in {"tau=0": (2, 1), "tau=0, bound": (6, 2)}.items():
            points += [Point("bias by step", line, 10 * n, seed, v * 10**seed) for n, v in enumerate(values)]
        points.append(Point("floor by τ", "floor_43", 0, seed, 4))
    told: list[Any] = ["bias_slack > 0 at tau=0", "bias_bound > bias at tau=0", "2 > floor_43 at tau=0"]
    found = [verdict.margin for _, verdict, _ in verdicts(Proposition42(seeds=3, claims=told), points)]
    # The least of 6/2 and 2/1; the last of both curves, 2/1.
    assert found == pytest.approx([log(2), log(2), 2 - log(4)])
    assert "| `bias_slack > 0 at tau=0` | holds | +0.6931" in claims(Proposition42(seeds=3, claims=told), points)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"task\.known is 5; it must be at least 1 and at most 4, task\.num_classes"):
        GaussianTask(num_classes=4, known=5)
    with pytest.raises(ConfigError, match=r"task\.ridge is 0\.0; it must be above 0"):
        GaussianTask(ridge=0.0)
    with pytest.raises(ConfigError, match=r"task\.public is 0; it must be at least 1"):
        GaussianTask(public=0)
    with pytest.raises(
        ConfigError, match=r"simulate\.step is 1\.5; it must be above 0 and at most 1, in units of 1/L_F"
    ):
        Proposition42(step=1.5)
    with pytest.raises(ConfigError, match=r"simulate\.every is 0; it must be at least 1"):
        Proposition42(every=0)
    with pytest.raises(ConfigError, match=r"simulate\.temperatures is -1\.0; it must be at least 0"):
        Proposition42(temperatures=(-1.0,))


@pytest.mark.long
def test_a_tiny_version_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs/papers/uwa/simulations/uwa_proposition42.yaml"
    small = ["--simulate.seeds", "2", "--simulate.steps", "40", "--processes", "1"]
    main(["simulate", "-c", str(path), "-o", str(tmp_path), *small])
    assert "enough_44" in capsys.readouterr().out
    assert (tmp_path / "uwa_proposition42.png").stat().st_size > 10_000
