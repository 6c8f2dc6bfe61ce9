"""FedNova against arithmetic, with unequal local steps and with momentum, and its reduction to FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Fabric

from lit_fed.engine.method.reducers import WeightedMean
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedNova
from lit_fed.methods.fednova import NormalizedMean
from lit_fed.participation import FullParticipation, Stragglers
from tests.methods.support import Automatic, ByHand, Momentum
from tests.support import LeastSquares, Points, assert_same, fit, weights

ALONE = Workers(Fabric(accelerator="cpu", devices=1))


def unequal() -> Points:
    """Client 0 has one batch of 8, client 1 three: one step and three, weights ¼ and ¾."""
    return Points(sizes=(8, 24))


def test_two_rounds_by_hand_with_unequal_steps(tmp_path: Path) -> None:
    # Round 0 from w = 0: client 0 takes one step, to 1: Δ/a = 1/1. Client 1 takes three, 0 → 2 → 3 → 3.5: Δ/a = 3.5/3.
    #   τ_eff = ¼·1 + ¾·3 = 2.5; w = 2.5·(¼·1, ¾·3.5/3) = 2.5·(0.25, 0.875) = (0.625, 2.1875)
    # Round 1: client 0 moves by ½·(2 − 0.625) = 0.6875, client 1 by ⅞·(4 − 2.1875) = 1.5859375
    #   w = (0.625 + 2.5·¼·0.6875, 2.1875 + 2.5·¾·1.5859375/3) = (1.0546875, 3.1787109375)
    made = fit(tmp_path, LeastSquares(), unequal(), FedNova(), max_rounds=2)
    assert weights(made)["network.weight"][0].tolist() == pytest.approx([1.0546875, 3.1787109375], rel=1e-6)
    assert made.metrics["server/effective_steps"] == 2.5


def test_one_round_by_hand_uniform(tmp_path: Path) -> None:
    # As above with p = ½: τ_eff = ½·1 + ½·3 = 2; w = 2·(½·1, ½·3.5/3) = (1, 3.5/3). FedAvg would be at (0.5, 1.75).
    made = fit(tmp_path, LeastSquares(), unequal(), FedNova(weighting="uniform"), max_rounds=1)
    assert weights(made)["network.weight"][0].tolist() == pytest.approx([1.0, 3.5 / 3], rel=1e-6)


def test_one_round_by_hand_with_momentum(tmp_path: Path) -> None:
    # ρ = ½. Client 0: one step to 1, a = 1. Client 1: velocities −4, ½·(−4) − 2 = −4, ½·(−4) + 0 = −2, so 0 → 2 → 4 →
    # 5; its steps are worth 1 + 1.5 + 1.75 = 4.25. τ_eff = ¼ + ¾·4.25 = 3.4375.
    #   w = 3.4375·(¼·1, ¾·5/4.25) = (0.859375, 3.0330882)
    made = fit(tmp_path, Momentum(0.5), unequal(), FedNova(), max_rounds=1)
    assert weights(made)["network.weight"][0].tolist() == pytest.approx([0.859375, 3.0330882], rel=1e-6)
    assert made.metrics["server/effective_steps"] == 3.4375


def test_the_servers_learning_rate_by_hand(tmp_path: Path) -> None:
    # Half of the first round above.
    made = fit(tmp_path, LeastSquares(), unequal(), FedNova(server_lr=0.5), max_rounds=1)
    assert weights(made)["network.weight"][0].tolist() == pytest.approx([0.3125, 1.09375], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(momentum: float, tmp_path: Path) -> None:
    both = (FedAvg(), FedNova())
    runs = [fit(tmp_path, Momentum(momentum), Points(), one, max_rounds=3, local_epochs=3) for one in both]
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=1e-6, atol=1e-6)


def test_with_equal_steps_late_updates_are_fedavgs_too(tmp_path: Path) -> None:
    # Client 1's three samples take 0.03 simulated seconds, which is late: round 1 gets both clients' of round 0 and 1.
    late = FullParticipation(stragglers=Stragglers(deadline=0.02, speed_sigma=0.0, late="next_round"))
    plain = fit(tmp_path, LeastSquares(), Points(), FedAvg(), max_rounds=3, participation=late)
    other = fit(tmp_path, LeastSquares(), Points(), FedNova(), max_rounds=3, participation=late)
    assert other.metrics["participation/count"] == 2
    torch.testing.assert_close(weights(other), weights(plain), rtol=1e-6, atol=1e-6)
    # Round 0: only client 0, w = (1, 0). Round 1: client 1's (0, 2) of round 0, and client 0's (1.5, 0):
    # ¼·(1.5, 0) + ¾·(0, 2) = (0.375, 1.5).
    second = fit(tmp_path, LeastSquares(), Points(), FedNova(), max_rounds=2, participation=late)
    assert weights(second)["network.weight"][0].tolist() == pytest.approx([0.375, 1.5], rel=1e-6)


def test_a_step_counter_costs_four_bytes_a_client(tmp_path: Path) -> None:
    plain = fit(tmp_path, LeastSquares(), Points(4), FedAvg(), max_rounds=1).metrics
    other = fit(tmp_path, LeastSquares(), Points(4), FedNova(), max_rounds=1).metrics
    assert other["comm/uplink_bytes"] == plain["comm/uplink_bytes"] + 4 * 4
    assert other["comm/downlink_bytes"] == plain["comm/downlink_bytes"]


# --- the reducer -----------------------------------------------------------------------------------------------------

value = st.integers(-(2**20), 2**20).map(lambda k: k * 2.0**-12)
client = st.tuples(st.integers(1, 10**4), st.lists(value, min_size=3, max_size=3), st.integers(1, 50))


def updates(clients: list[tuple[int, list[float], int]]) -> list[ClientUpdate]:
    return [
        ClientUpdate(
            client_id,
            {"w": torch.tensor(x), "count": torch.tensor(steps), "local_steps": torch.tensor(float(steps))},
            weight,
        )
        for client_id, (weight, x, steps) in enumerate(clients)
    ]


def combined(made: list[ClientUpdate], origin: list[float]) -> Any:
    reducer = NormalizedMean({"w": torch.tensor(origin)})
    for update in made:
        reducer.add(update)
    return reducer.result(ALONE)


@given(st.lists(client, min_size=1, max_size=6), st.lists(value, min_size=3, max_size=3))
def test_the_reducer_is_the_equation(clients: list[tuple[int, list[float], int]], origin: list[float]) -> None:
    found = combined(updates(clients), origin)
    total = sum(weight for weight, _, _ in clients)
    tau = sum(weight * steps for weight, _, steps in clients) / total
    for k in range(3):
        direction = sum(weight * (x[k] - origin[k]) / steps for weight, x, steps in clients) / total
        # float32 holds 24 bits: the quotients (below 2⁹), their mean, τ and the sum are each rounded once.
        assert found["w"][k].item() == pytest.approx(origin[k] + tau * direction, rel=2e-6, abs=2e-6 * 512 * tau)
    assert found["count"].item() == torch.tensor(tau, dtype=torch.float64).round()  # no parameter: a plain mean


@given(st.lists(client, min_size=1, max_size=6), st.lists(value, min_size=3, max_size=3), st.randoms())
def test_the_order_of_clients_does_not_matter(clients: Any, origin: list[float], random: Any) -> None:
    shuffled = updates(clients)
    random.shuffle(shuffled)
    assert_same(combined(shuffled, origin), combined(updates(clients), origin))


@given(st.lists(client, min_size=1, max_size=6), st.lists(value, min_size=3, max_size=3))
def test_equal_steps_are_the_weighted_mean(clients: Any, origin: list[float]) -> None:
    made = updates([(weight, x, 7) for weight, x, _ in clients])
    plain = WeightedMean()
    for update in made:
        plain.add(update)
    expected = plain.result(ALONE)
    assert expected is not None
    torch.testing.assert_close(combined(made, origin)["w"], expected["w"], rtol=1e-6, atol=512 * 1e-6)


def test_updates_and_origin_are_left_alone() -> None:
    x, origin = torch.tensor([3.0]), torch.tensor([1.0])
    update = ClientUpdate(0, {"w": x, "local_steps": torch.tensor(2.0)})
    reducer = NormalizedMean({"w": origin})
    reducer.add(update)
    assert update.payload["w"] is x
    assert (x.item(), origin.item()) == (3.0, 1.0)
    x.fill_(100.0)  # the next client overwrites the module
    # A client without a step, though its model is another (it may come late): w = 1 + ½·(2 + 0)·½·((3 − 1)/2 + 0) = 1.5
    reducer.add(ClientUpdate(1, {"w": torch.tensor([9.0]), "local_steps": torch.tensor(0.0)}))
    result = reducer.result(ALONE)
    assert result is not None
    assert result["w"].tolist() == [1.5]
    assert origin.item() == 1.0


# --- modules that optimise by hand -----------------------------------------------------------------------------------


def test_steps_by_hand_are_counted(tmp_path: Path) -> None:
    by_hand = fit(tmp_path, ByHand(), unequal(), FedNova(), max_rounds=2)
    assert by_hand.metrics["server/effective_steps"] == 2.5  # as above
    assert_same(weights(by_hand), weights(fit(tmp_path, Automatic(), unequal(), FedNova(), max_rounds=2)))


def test_several_optimizers_are_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ByHand has 2 optimizers, and algorithm FedNova needs a single optimizer"):
        fit(tmp_path, ByHand(2), algorithm=FedNova())
