"""AFL against arithmetic, its projection against the conditions of the nearest point, and its reduction to FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.methods import AFL, FedAvg
from lit_fed.methods.afl import SHARES, projected
from tests.methods.support import Rota, global_weight
from tests.support import Points, Wanderer, assert_same, fit, weights


def shares(made: Any) -> list[float]:
    found: list[float] = made.run.federation.server[SHARES].tolist()
    return found


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # γ = .05. Round 0, λ = (½, ½): models (1, 0), (0, 2): w = (.5, 1). F = (2, 8): λ + γF = (.6, .9), which is .5 too
    # much: (.35, .65). Round 1: models (.5 + ½·1.5, 1) and (.5, 1 + ½·3): w = .35·(1.25, 1) + .65·(.5, 2.5).
    # F = (½·1.5², ½·3²) = (1.125, 4.5): (.40625, .875) is .28125 too much: (.265625, .734375).
    made = fit(tmp_path, algorithm=AFL(gamma=0.05), max_rounds=2)
    assert global_weight(made) == pytest.approx([0.7625, 1.975], rel=1e-6)
    assert shares(made) == pytest.approx([0.265625, 0.734375], rel=1e-6)
    assert made.metrics["server/largest_share"] == pytest.approx(0.734375, rel=1e-6)
    # Two weights and a loss of two clients, 4 bytes each.
    assert (made.metrics["comm/uplink_bytes"], made.metrics["comm/downlink_bytes"]) == (24, 16)


def test_clients_outside_the_round_change_by_the_projection_alone(tmp_path: Path) -> None:
    # Client 0 alone: w = (1, 0); λ = (½ + .1·2, ½) − .1 = (.6, .4). Then client 1 alone: (1, 2); F = 8:
    # (.6, .4 + .8) − .4 = (.2, .8).
    made = fit(tmp_path, algorithm=AFL(gamma=0.1), max_rounds=2, participation=Rota())
    assert global_weight(made) == [1.0, 2.0]
    assert shares(made) == pytest.approx([0.2, 0.8], rel=1e-6)


def test_a_client_without_a_share_does_not_count_beside_others(tmp_path: Path) -> None:
    # γ = 1: (½ + 2, ½ + 8) → (0, 1). Round 1: the model of client 1 alone, (.5, 1 + ½·3).
    made = fit(tmp_path, algorithm=AFL(gamma=1.0), max_rounds=2)
    assert global_weight(made) == [0.5, 2.5]
    # Client 1 took all in round 0; if client 0 then is alone, its model counts, and its loss ½(2 − .5)² comes back:
    # (0 + 1.125, 1) is 1.125 too much: (.5625, .4375).
    alone = fit(tmp_path, algorithm=AFL(gamma=1.0), max_rounds=2, participation=BothThenFirst())
    assert global_weight(alone) == [1.25, 1.0]
    assert shares(alone) == pytest.approx([0.5625, 0.4375], rel=1e-6)


class BothThenFirst(Rota):
    """Both clients in round 0, the first one afterwards."""

    def draw(self, round_idx: int) -> Any:
        return np.arange(2 if round_idx == 0 else 1)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_gamma_of_0_it_is_fedavg(tmp_path: Path, weighting: Any) -> None:
    def run(algorithm: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)  # batch norm's statistics and dropout, too
        data = Points(4, sizes=(5, 3))
        return weights(fit(tmp_path, Wanderer(), data, algorithm, max_rounds=3, local_epochs=2))

    # λ = ¼ or 5/16, 3/16: no rounding that FedAvg does not have
    assert_same(run(AFL(gamma=0.0, weighting=weighting)), run(FedAvg(weighting)))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_the_projection_is_the_nearest_point_of_the_simplex(values: list[float]) -> None:
    # The conditions of Karush, Kuhn and Tucker: p ≥ 0, Σp = 1, v − p = θ where p > 0, and v ≤ θ where p = 0.
    v = torch.tensor(values, dtype=torch.float64)
    p = projected(v)
    assert float(p.min()) >= 0
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    gaps = (v - p)[p > 0]
    assert float(gaps.max() - gaps.min()) <= 1e-12
    assert bool((v[p == 0] <= gaps.max() + 1e-12).all())


def test_refused_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.gamma is -1; it must be at least 0"):
        AFL(gamma=-1)
