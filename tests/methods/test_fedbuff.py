"""FedBuff by hand: three clients' schedule and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.algorithm import Payload
from lit_fed.codecs import Codec, Context
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedBuff
from lit_fed.participation import Asynchronous, FullParticipation, Speeds
from tests.support import Points, fit, weights


def timed(folder: Path, *seconds: float) -> Speeds:
    path = folder / "trace.csv"
    path.write_text("client,seconds\n" + "".join(f"{client},{s}\n" for client, s in enumerate(seconds)))
    return Speeds(trace=str(path))


def run(folder: Path, rounds: int, algorithm: Any, participation: Any, num_clients: int = 3, **kwargs: Any) -> Any:
    return fit(folder, None, Points(num_clients), algorithm, max_rounds=rounds, participation=participation, **kwargs)


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_three_clients_by_hand(tmp_path: Path, executor: str) -> None:
    """Clients of 2, 3 and 4 seconds, a step on every second arrival (`tests/participation/test_asynchronous.py`).

    One step of descent at learning rate ½: clients 0 and 2 move w₁ by ½ (2 − w₁), client 1 moves w₂ by ½ (4 − w₂).

    step 0: client 0 (τ 0) from (0, 0): (1, 0), client 1 (τ 0) from (0, 0): (0, 2); w = (0, 0) + ½ (1, 2) = (½, 1)
    step 1: client 2 (τ 1) from (0, 0): Δ = (1, 0), which counts (1 + 1)^−1 = ½; client 0 (τ 0) from (½, 1):
            Δ = (¾, 0); w = (½, 1) + ½ (½ + ¾, 0) = (1⅛, 1)
    step 2: client 1 (τ 1) from (½, 1): Δ = (0, 1½), which counts ½; client 0 (τ 0) from (1⅛, 1): Δ = (7/16, 0);
            w = (1⅛, 1) + ½ (7/16, ¾) = (1 11/32, 1⅜)
    """
    speeds = timed(tmp_path, 2, 3, 4)
    expected = [(0.5, 1.0), (1.125, 1.0), (1.34375, 1.375)]
    for rounds, w in enumerate(expected, start=1):
        made = run(
            tmp_path / f"{rounds}", rounds, FedBuff(exponent=1.0), Asynchronous(3, 2, speeds=speeds), executor=executor
        )
        assert weights(made)["network.weight"].tolist() == [list(w)]


def test_the_movement_is_from_the_version_it_started_from_and_divided_by_the_buffer(tmp_path: Path) -> None:
    """Client 2 of 10 seconds, and clients 0 and 1 of 1: APPFL's faults would give other numbers.

    Steps 0 to 8 are of clients 0 and 1. Step t adds ½ of each movement: w₁ ← w₁ + ¼ (2 − w₁), w₂ ← w₂ + ¼ (4 − w₂).
    At 10 s client 2, which started first, arrives before the other two, and then client 0 or 1, whichever started
    first. With exponent 0 its movement from (0, 0) is (1, 0), and the step adds ½ (1, 0), although by then
    w₁ = 2 (1 − ¾⁹) = 1.850: from the present model it would be 1 − 1.850 < 0, and divided by all three clients ⅓.
    """
    speeds = timed(tmp_path, 1, 1, 10)
    before, after = (
        weights(run(tmp_path / f"{rounds}", rounds, FedBuff(exponent=0.0), Asynchronous(3, 2, speeds=speeds)))
        for rounds in (9, 10)
    )
    w1, w2 = before["network.weight"][0].tolist()
    assert (w1, w2) == pytest.approx((2 * (1 - 0.75**9), 4 * (1 - 0.75**9)), rel=1e-6)
    moved = (after["network.weight"] - before["network.weight"])[0].tolist()
    plan = Asynchronous(3, 2, speeds=speeds)
    plan.setup(3, lambda client_id: 1, 0)
    (other,) = {one.client_id for one in plan.plan(9)} - {2}
    own = (0.25 * (2 - w1), 0.0) if other == 0 else (0.0, 0.25 * (4 - w2))
    assert moved == pytest.approx((0.5 + own[0], own[1]), rel=1e-5)


def test_without_staleness_it_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    one = run(tmp_path / "one", 4, FedBuff(), Asynchronous(4, 4), 4)
    other = run(tmp_path / "other", 4, FedAvg(weighting="uniform"), FullParticipation(), 4)
    for name, tensor in weights(one).items():  # w + (mean − w) rounds
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-6, atol=0)


def test_with_exponent_0_it_is_fedavg_in_the_same_federation(tmp_path: Path) -> None:
    speeds = Speeds(sigma=1.0)
    found = [
        weights(run(tmp_path / name, 12, algorithm, Asynchronous(5, 2, speeds=speeds), 8))["network.weight"]
        for name, algorithm in (("buffered", FedBuff(exponent=0.0)), ("mean", FedAvg(weighting="uniform")))
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_fedavg_adds_a_stale_movement_to_the_present_model(tmp_path: Path) -> None:
    """As by hand above with exponent 0: step 1 adds ½ (1 + ¾, 0) to (½, 1)."""
    made = run(tmp_path, 2, FedAvg("uniform"), Asynchronous(3, 2, speeds=timed(tmp_path, 2, 3, 4)))
    assert weights(made)["network.weight"].tolist() == [[1.375, 1.0]]


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.exponent is -1; it must be at least 0"):
        FedBuff(exponent=-1)
    with pytest.raises(ConfigError, match=r"algorithm.server_lr is 0; it must be above 0"):
        FedBuff(server_lr=0)


class Whole(Codec):
    """Rounds to whole numbers, halves to even ones."""

    def encode(self, payload: Payload, context: Context) -> Payload:
        return {name: tensor.round() for name, tensor in payload.items()}

    def decode(self, payload: Payload, context: Context) -> Payload:
        return payload


def test_a_stale_movement_is_from_what_the_client_received(tmp_path: Path) -> None:
    """As by hand above; versions 1 and 2, (½, 1) and (1, 1), arrive as (0, 1) and (1, 1).

    step 1: Δ of client 2 counts ½ (1, 0); client 0 from (0, 1) sends (1, 1), which is w + (½, 0);
            w = (½, 1) + ½ (½ + ½, 0) = (1, 1)
    step 2: client 1 (τ 1) from (0, 1) sends (0, 2½): Δ = (0, 1½) counts ½; client 0 from (1, 1) sends (1½, 1);
            w = (1, 1) + ½ (½, ¾) = (1¼, 1⅜)
    """
    participation = Asynchronous(3, 2, speeds=timed(tmp_path, 2, 3, 4))
    made = run(tmp_path, 3, FedBuff(exponent=1.0), participation, downlink_codec=Whole())
    assert weights(made)["network.weight"].tolist() == [[1.25, 1.375]]
