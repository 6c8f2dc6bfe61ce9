"""Effective steps against the closed form of FedNova's paper, and against torch's own SGD along a constant gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_fed.engine.method.client import EffectiveSteps

momenta = st.floats(0.0, 0.99)
rates = st.floats(1e-3, 1.0)


def sgd(lr: float, **kwargs: Any) -> torch.optim.SGD:
    """Over one float64 parameter at 0 whose gradient is 1."""
    parameter = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=lr, **kwargs)


def run(optimizer: torch.optim.SGD, lrs: list[float], counted: EffectiveSteps) -> float:
    """Step with these learning rates, counting; returns how far the parameter went."""
    group = optimizer.param_groups[0]
    for lr in lrs:
        group["lr"] = lr
        counted.count(optimizer)
        optimizer.step()
    return -group["params"][0].item()


@given(st.integers(1, 60), momenta)
def test_momentum_is_the_closed_form(num_steps: int, rho: float) -> None:
    counted = EffectiveSteps()
    run(sgd(0.1, momentum=rho), [0.1] * num_steps, counted)
    expected = (num_steps - rho * (1 - rho**num_steps) / (1 - rho)) / (1 - rho)
    assert counted.steps == pytest.approx(expected, rel=1e-9)


def test_three_steps_by_hand() -> None:
    # ρ = ½: the velocities are 1, 1½ and 1¾, together 4¼; the closed form gives (3 − ½·(1 − ⅛)/½)/½ = 4.25.
    counted = EffectiveSteps()
    run(sgd(0.5, momentum=0.5), [0.5] * 3, counted)
    assert counted.steps == 4.25
    # Nesterov adds ½ of the next velocity to each gradient: 1 + ½·(1, 1½, 1¾) = 1½, 1¾, 1⅞, together 5⅛.
    counted = EffectiveSteps()
    run(sgd(0.5, momentum=0.5, nesterov=True), [0.5] * 3, counted)
    assert counted.steps == 5.125


@settings(deadline=None)
@given(st.lists(rates, min_size=1, max_size=20), momenta, st.floats(0.0, 1.0), st.booleans())
def test_distance_is_what_sgd_goes(lrs: list[float], rho: float, dampening: float, nesterov: bool) -> None:
    if nesterov:  # which torch allows with momentum and without dampening only
        rho, dampening = max(rho, 0.01), 0.0
    counted = EffectiveSteps()
    went = run(sgd(lrs[0], momentum=rho, dampening=dampening if rho else 0.0, nesterov=nesterov), lrs, counted)
    assert counted.distance == pytest.approx(went, rel=1e-9)
    assert counted.steps == pytest.approx(went / lrs[0], rel=1e-9)


@given(st.lists(st.lists(rates, min_size=1, max_size=5), min_size=1, max_size=3), momenta)
def test_every_phase_has_an_optimizer_of_its_own(phases: list[list[float]], rho: float) -> None:
    counted = EffectiveSteps()
    optimizers = [sgd(lrs[0], momentum=rho) for lrs in phases]
    went = 0.0
    for optimizer, lrs in zip(optimizers, phases, strict=True):
        counted.begin_phase()
        went += run(optimizer, lrs, counted)
    assert counted.distance == pytest.approx(went, rel=1e-9)


def test_adam_counts_plain_steps() -> None:
    counted = EffectiveSteps()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    for _ in range(7):
        counted.count(optimizer)
    assert counted.steps == pytest.approx(7)


def test_nothing_counted_is_no_step() -> None:
    assert EffectiveSteps().steps == 0.0
