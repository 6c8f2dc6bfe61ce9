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


# Samples, expected batch, z, steps and δ; ε by dp-accounting 0.6.0 (PLD on a grid of 1e-4) and by Opacus 1.6.0 (RDP and
# PRV, whose bound is .01 above its estimate).
SETTINGS = [
    (2_000, 100, 1.0, 1_500, 1e-6, 15.358794, 16.500153, 15.369406),
    (10_000, 100, 1.1, 10_000, 1e-5, 5.192620, 5.631992, 5.202865),
    (1_000, 100, 1.0, 100, 1e-3, 4.784350, 5.640521, 4.794894),
    (100, 100, 5.0, 100, 1e-5, 9.997256, 10.725510, 10.007715),
    (100_000, 100, 0.8, 1_500, 1e-6, 0.518948, 1.486410, 0.529029),
    (60_000, 256, 1.1, 14_040, 1e-5, 2.379644, 2.594363, 2.389701),
    (60_000, 256, 0.7, 3_510, 1e-5, 3.402051, 4.062472, 3.412315),
    (50_000, 1024, 1.5, 980, 1e-5, 1.999086, 2.192689, 2.009210),
    (600, 60, 1.2, 200, 1e-4, 6.207614, 6.953127, 6.218073),
    (600, 60, 4.0, 200, 1e-4, 1.194012, 1.334820, 1.204121),
    (500, 20, 0.9, 250, 1e-3, 3.450541, 4.119641, 3.460964),
    (1_437, 32, 1.0, 450, 1e-4, 2.464070, 2.841530, 2.474294),
    (20, 6, 1.0, 8, 1e-2, 2.762359, 3.617878, 2.772971),
    (64, 64, 10.0, 500, 1e-4, 10.230904, 11.103012, 10.241484),
    (300, 30, 2.0, 1_000, 1e-4, 7.275262, 7.974980, 7.285724),
    (5_000, 50, 0.6, 100, 1e-5, 3.815599, 4.830866, 3.826008),
    (5_000, 500, 3.0, 400, 1e-5, 2.920592, 3.180775, 2.930764),
    (1_000_000, 1000, 0.7, 20_000, 1e-7, 2.466803, 3.228200, 2.476913),
    (250, 125, 2.5, 60, 1e-3, 5.755063, 6.484533, 5.765592),
    (10_000, 10, 0.5, 1_000, 1e-5, 3.238881, 4.382023, 3.249325),
]


@pytest.mark.parametrize(("n", "batch_size", "z", "steps", "delta", "pld", "rdp", "prv"), SETTINGS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_epsilon_is_that_of_the_clients_own_rate_and_steps(
    n: int, batch_size: int, z: float, steps: int, delta: float, pld: float, rdp: float, prv: float, rounds: int
) -> None:
    made = account((n, steps // rounds), batch_size=batch_size, z=z, delta=delta)
    found, accountant = made.epsilon(np.array([rounds]), {1: rounds})
    assert pld - 2e-6 <= found < pld + 1e-2  # on a grid ten times wider: .4 % above after 20,000 steps
    assert prv - 0.02 <= found <= prv
    assert found <= rdp
    assert accountant == "PLD"


@pytest.mark.parametrize(("n", "batch_size", "z", "steps", "delta", "pld", "rdp", "prv"), SETTINGS)
def test_the_bound_by_renyi_divergences_is_that_of_opacus(
    n: int, batch_size: int, z: float, steps: int, delta: float, pld: float, rdp: float, prv: float
) -> None:
    """Opacus has fewer orders, and other ones: either bound may be smaller, by less than two per cent."""
    found = Mechanism("poisson", n, batch_size, z).rdp_epsilon({1: steps}, delta)
    assert found == pytest.approx(rdp, rel=0.02)
    assert found >= pld


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
