"""FedAsync by hand, and its reductions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAsync, FedBuff
from lit_fed.participation import Asynchronous, Speeds
from tests.methods.test_fedbuff import run, timed
from tests.support import LeastSquares, Threes, assert_same, fit, weights


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # τ = 0, 1, 4, 5, 14; α = 0.6
        ({"weight": "constant"}, [0.6, 0.6, 0.6, 0.6, 0.6]),
        # 0.6 (1 + τ)^−½: 0.6 / √1, √2, √5, √6, √15
        ({}, [0.6, 0.4242641, 0.2683282, 0.2449490, 0.1549193]),
        # 0.6 up to τ = 4, then 0.6 / (10 (τ − 4) + 1): 0.6 / 11 and 0.6 / 101
        ({"weight": "hinge", "a": 10.0}, [0.6, 0.6, 0.6, 0.0545455, 0.0059406]),
    ],
)
def test_the_share_of_a_stale_model(settings: dict[str, Any], expected: list[float]) -> None:
    found = [FedAsync(**settings).mixing(staleness) for staleness in (0, 1, 4, 5, 14)]
    assert found == pytest.approx(expected, abs=1e-7)


def test_two_clients_by_hand(tmp_path: Path) -> None:
    """Clients 0 and 1 of 2 and 3 seconds, every arrival a step; α = ½, a = 1. Client 0 halves 2 − w₁, 1 halves 4 − w₂.

    2 s: client 0 (τ 0) from (0, 0): (1, 0); α = ½: w = (½, 0); client 0 starts again, from version 1
    3 s: client 1 (τ 1) from (0, 0): (0, 2); α = ¼: w = ¾ (½, 0) + ¼ (0, 2) = (⅜, ½); it starts from version 2
    4 s: client 0 (τ 1) from (½, 0): (1¼, 0); α = ¼: w = ¾ (⅜, ½) + ¼ (1¼, 0) = (19/32, ⅜)
    """
    participation = Asynchronous(2, 1, speeds=timed(tmp_path, 2, 3))
    for rounds, w in ((1, (0.5, 0.0)), (2, (0.375, 0.5)), (3, (0.59375, 0.375))):
        made = run(tmp_path / f"{rounds}", rounds, FedAsync(alpha=0.5, a=1.0), participation, 2)
        assert weights(made)["network.weight"].tolist() == [list(w)]


def test_with_alpha_1_and_one_client_it_is_sequential_sgd(tmp_path: Path) -> None:
    made = fit(
        tmp_path, LeastSquares(0.1), Threes(1), FedAsync(alpha=1.0), max_rounds=5, participation=Asynchronous(1, 1)
    )
    module = LeastSquares(0.1)
    loader = made.run.federation.data.train_loader(0, torch.Generator())  # one batch of its three samples
    optimizer = module.configure_optimizers()
    for _ in range(5):
        for batch in loader:
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    torch.testing.assert_close(weights(made)["network.weight"], module.network.weight, rtol=1e-6, atol=1e-7)


def test_alone_in_flight_it_is_fedbuff_with_a_buffer_of_one(tmp_path: Path) -> None:
    """Without staleness w + ½ (w_i − w) = ½ w + ½ w_i."""
    found = [
        weights(run(tmp_path / name, 8, algorithm, Asynchronous(1, 1), 4))["network.weight"]
        for name, algorithm in (("mixed", FedAsync(alpha=0.5)), ("buffered", FedBuff(server_lr=0.5)))
    ]
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def test_groups_and_one_after_the_other_give_the_same(tmp_path: Path) -> None:
    speeds = Speeds(sigma=1.0)
    found = [
        weights(run(tmp_path / name, 12, FedAsync(), Asynchronous(5, 1, speeds=speeds), 8, executor=name))
        for name in ("sequential", "vectorized")
    ]
    assert_same(*found)  # gradients of one sample: nothing to round


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": 0.0}, r"algorithm.alpha is 0.0; it must be above 0 and at most 1"),
        ({"alpha": 1.5}, r"algorithm.alpha is 1.5"),
        ({"a": -1.0}, r"algorithm.a is -1.0; it must be at least 0"),
        ({"b": -1.0}, r"algorithm.b is -1.0; it must be at least 0"),
        ({"weight": "linear"}, r"algorithm.weight is 'linear'; it must be 'constant', 'polynomial' or 'hinge'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FedAsync(**settings)
