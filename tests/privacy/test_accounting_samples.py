"""The account of samples, against values of dp-accounting 0.6.0 and of Opacus 1.6.0, and client by client."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_fed.privacy.accounting import Mechanism, SampleAccount

pytest.importorskip("dp_accounting")


def account(*clients: tuple[int, int], batch_size: int = 100, z: float = 1.0, delta: float = 1e-5) -> SampleAccount:
    """Of clients with samples and steps a round."""
    sizes, steps = np.array(clients, np.int64).T
    return SampleAccount(sizes, steps, batch_size, z, delta)


# q = 100 / n. Opacus 1.6.0 gives 16.500153 (RDP) and 15.369406 (PRV) for the first.
@pytest.mark.parametrize(
    ("n", "z", "steps", "delta", "pld"),
    [
        (2_000, 1, 1500, 1e-6, 15.358794),
        (10_000, 1.1, 10_000, 1e-5, 5.192620),
        (1_000, 1, 100, 1e-3, 4.784350),
        (100, 5, 100, 1e-5, 9.997256),
        (100_000, 0.8, 1500, 1e-6, 0.518948),
    ],
)
@pytest.mark.parametrize("rounds", [1, 10])
def test_epsilon_is_that_of_the_clients_own_rate_and_steps(
    n: int, z: float, steps: int, delta: float, pld: float, rounds: int
) -> None:
    made = account((n, steps // rounds), z=z, delta=delta)
    found, accountant = made.epsilon(np.array([rounds]), {1: rounds})
    assert pld - 2e-6 <= found < pld + 5e-3  # on a grid ten times wider
    assert accountant == "PLD"


@pytest.mark.parametrize(("rounds", "z"), [(1, 0.6162), (2, 0.6329)])
def test_noise_is_worked_out_for_the_hardest_client(rounds: int, z: float) -> None:
    # dp-accounting's calibration of q = 1e-3 with 1,500 and 3,000 steps to ε = 2 at δ = 1e-6. The other client draws
    # its samples half as often.
    made = account((200_000, 1500), (100_000, 1500), delta=1e-6)
    assert made.calibrated(np.array([rounds, rounds]), 2.0) == pytest.approx(z, abs=5e-4)


def test_the_largest_epsilon_of_all_is_that_of_each_client_by_itself() -> None:
    clients = [(50, 1), (150, 2), (400, 4), (400, 9), (1000, 10), (3000, 30)]
    rounds = np.array([3, 7, 5, 2, 9, 4])
    made = account(*clients, z=1.5)
    alone = [
        Mechanism("poisson", n, min(100, n), 1.5).epsilon({1: int(taken) * steps}, 1e-5)
        for (n, steps), taken in zip(clients, rounds, strict=True)
    ]
    assert made.epsilon(rounds, {1: 10}) == max(alone)
    budget = sorted(one for one, _ in alone)[3]
    over = made.exceeds(rounds, {1: 10}, budget)
    assert over.tolist() == [one > budget for one, _ in alone]


def test_a_round_that_is_released_twice_counts_as_one_with_less_noise() -> None:
    made = account((1_000, 10))
    expected = Mechanism("poisson", 1000, 100, 1.0).epsilon({1: 20, 2: 10}, 1e-5)
    assert made.epsilon(np.array([3]), {1: 8, 2: 1})[0] == pytest.approx(expected[0], rel=1e-9)
    # Of a client in one round, the repeated round may be the one.
    once = Mechanism("poisson", 1000, 100, 1.0).epsilon({2: 10}, 1e-5)
    assert made.epsilon(np.array([1]), {1: 8, 2: 1}) == once


def test_who_made_no_step_has_spent_nothing_and_without_noise_nothing_is_bounded() -> None:
    assert account((100, 3), (0, 0)).epsilon(np.array([0, 5]), {1: 5})[0] == 0
    assert account((100, 3), z=0.0).epsilon(np.array([1]), {1: 1})[0] == math.inf
