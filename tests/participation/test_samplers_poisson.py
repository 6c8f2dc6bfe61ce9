"""Every client by a draw of its own."""

import numpy as np
import pytest

from lit_fed.errors import ConfigError
from lit_fed.participation import PoissonParticipation

ROUNDS, CLIENTS, Q = 4000, 40, 0.3


def drawn(fraction: float, seed: int = 0, clients: int = CLIENTS) -> PoissonParticipation:
    participation = PoissonParticipation(fraction)
    participation.setup(clients, lambda _: 1, seed)
    return participation


def test_clients_take_part_independently_with_their_probability() -> None:
    participation = drawn(Q)
    present = np.zeros((ROUNDS, CLIENTS))
    for round_idx in range(ROUNDS):
        cohort = participation.select(round_idx)
        assert len(set(cohort)) == len(cohort)
        present[round_idx, cohort] = 1
    # Of R Bernoulli draws the mean's standard error is sqrt(q(1-q)/R) = 0.0072; of 40 clients all are within five.
    assert np.abs(present.mean(0) - Q).max() < 5 * (Q * (1 - Q) / ROUNDS) ** 0.5
    # A cohort of fixed size has correlations of -1/39 between two clients; independent ones 0 ± 1/sqrt(R) = 0.016, and
    # the mean over the 780 pairs is within 0.016 / sqrt(780) = 0.0006 of 0, five times that being 0.003.
    correlation = np.corrcoef(present.T)[np.triu_indices(CLIENTS, 1)]
    assert abs(correlation.mean()) < 0.003
    # Binomial: mean 12, variance 40 · 0.3 · 0.7 = 8.4, its sample's standard error 8.4 · sqrt(2/R) = 0.19.
    assert abs(present.sum(1).var() - 8.4) < 5 * 8.4 * (2 / ROUNDS) ** 0.5


def test_a_cohort_may_be_empty_and_the_whole_population() -> None:
    assert any(not drawn(0.1, clients=5).select(round_idx) for round_idx in range(20))
    assert sorted(drawn(1.0).select(3)) == list(range(CLIENTS))


def test_a_plan_is_a_pure_function_of_seed_and_round() -> None:
    assert drawn(Q, seed=1).select(7) == drawn(Q, seed=1).select(7)
    assert drawn(Q, seed=1).select(7) != drawn(Q, seed=2).select(7)


def test_the_probability_is_the_fraction() -> None:
    assert drawn(Q).probability(3) == Q
    assert drawn(Q).nominal_cohort_size == 12


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"participation\.fraction is .*; it must be above 0 and at most 1"):
        drawn(fraction)
