"""A client alone beside its group: what is rounding, what has been drawn, and no trace."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from lit_fed.engine.vectorized.alone import Outside, Result, difference


def result(weight: float, loss: float) -> Result:
    model = {"weight": torch.tensor([weight])}
    return Result(model, model, {"loss": loss})


def loop(precision: str) -> Any:
    strategy = SimpleNamespace(precision=SimpleNamespace(precision=precision))
    model = SimpleNamespace(parameters=dict.fromkeys(["weight", "bias", "other.bias"]))
    return SimpleNamespace(model=model, fabric=SimpleNamespace(strategy=strategy, device=torch.device("cpu")))


def test_a_difference_is_measured_by_the_clients_movement_or_by_that_of_rounded_weights() -> None:
    # From 1 to 2: 1e-3 of a movement of 1, and 1e-5 of 2, are rounding; 0.1 in half precision.
    begun = {"weight": torch.tensor([1.0])}
    assert not difference(loop("32-true"), begun, result(2.001, 1), result(2, 1))
    assert "'weight' differs after training" in difference(loop("32-true"), begun, result(2.01, 1), result(2, 1))
    assert "the logged 'loss' differs" in difference(loop("32-true"), begun, result(2, 1.01), result(2, 1))
    assert not difference(loop("bf16-true"), begun, result(2.09, 1.1), result(2, 1))
    # The last bits of the first weights have moved the result alone by .001: 32 times as much is rounding here.
    assert not difference(loop("32-true"), begun, result(2.03, 1.03), result(2, 1), result(2.001, 0.999))
    assert difference(loop("32-true"), begun, result(2.04, 1), result(2, 1), result(2.001, 0.999))


def test_a_tensor_that_hardly_moves_is_measured_by_the_movement_of_all_parameters_under_its_prefix() -> None:
    # The dual's weight is 3, its other bias 4: the bias, which is 0 but for rounding, may be off by 1e-5 of 5.
    def dual(bias: float, prefix: str = "state/") -> Result:
        values = {"weight": 3.0, "bias": bias, "other.bias": 4.0}
        return Result({}, {f"{prefix}{name}": torch.tensor([value]) for name, value in values.items()}, {})

    assert not difference(loop("32-true"), {}, dual(4.9e-5), dual(1e-9))
    assert "gives a different 'state/bias'" in difference(loop("32-true"), {}, dual(5.2e-5), dual(1e-9))
    # Large tensors under another prefix measure no others.
    large = dual(1.0, "large/state/").answer
    found, expected = ({**one.answer, **{n: 1e6 * t for n, t in large.items()}} for one in (dual(1e-4), dual(0)))
    assert "gives a different 'state/bias'" in difference(
        loop("32-true"), {}, Result({}, found, {}), Result({}, expected, {})
    )


class Drawing(nn.Module):
    """Has generators and values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.python, self.inner.numpy = random.Random(0), np.random.default_rng(0)
        self.calls = 0


def test_every_generator_in_reach_is_seen_and_restored() -> None:
    task = Drawing()
    draws = {
        "Python's generator (random)": random.random,
        "NumPy's generator (numpy.random)": np.random.random,
        "self.python": task.inner.python.random,
        "self.numpy": task.inner.numpy.random,
    }
    for name, draw in draws.items():
        outside = Outside(task)
        assert outside.drawn() is None
        value = draw()
        task.calls += 1
        assert outside.drawn() == name
        outside.restore()
        assert outside.drawn() is None
        assert draw() == value
        assert task.calls == 0
