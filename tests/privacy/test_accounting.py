"""The accountant against published and closed-form values."""

import math
from itertools import pairwise
from typing import Literal

import pytest

from lit_fed.errors import ConfigError
from lit_fed.privacy.accounting import Mechanism, calibrate
from tests.privacy.support import gaussian_delta

pytest.importorskip("dp_accounting")


# Opacus 1.6.0 gives 16.500153 (RDP) and 15.369406 (PRV) for the first.
@pytest.mark.parametrize(
    ("q", "z", "releases", "delta", "rdp", "pld"),
    [
        (0.05, 1, 1500, 1e-6, 16.571858, 15.358794),
        (0.01, 1.1, 10_000, 1e-5, 5.632010, 5.192620),
        (0.1, 1, 100, 1e-3, 5.655053, 4.784350),
        (1, 5, 100, 1e-5, 10.725510, 9.997256),
        (1e-3, 0.8, 1500, 1e-6, 1.486410, 0.518948),
    ],
)
def test_epsilon_is_that_of_the_library_composed_anew(
    q: float, z: float, releases: int, delta: float, rdp: float, pld: float
) -> None:
    mechanism = Mechanism("poisson", 1000, 1000 * q, z)
    assert mechanism.rdp_epsilon({1: releases}, delta) == pytest.approx(rdp, abs=2e-6)
    assert mechanism.pld_epsilon({1: releases}, delta, 1e-4) == pytest.approx(pld, abs=2e-6)
    found, accountant = mechanism.epsilon({1: releases}, delta)
    assert pld - 2e-6 <= found < pld + 5e-3  # on a grid ten times wider
    assert accountant == "PLD"


def test_a_bound_with_amplification_that_exceeds_the_one_without_is_not_taken() -> None:
    # 18 of 20 clients, z = 4: noise 2 in units of 2C. RDP with sampling without replacement gives 5.56 for these four
    # releases; four Gaussian releases with noise 2 are one with noise 1, whose exact ε by the closed form is below 4.4.
    sampled = Mechanism("fixed_size", 20, 18, 4.0)
    plain = Mechanism("none", 20, 18, 4.0)
    amplified, (found, accountant) = sampled.rdp_epsilon({1: 4}, 1e-5), sampled.epsilon({1: 4}, 1e-5)
    assert found < amplified
    assert (found, accountant) == plain.epsilon({1: 4}, 1e-5)
    assert gaussian_delta(1.0, found) == pytest.approx(1e-5, rel=0.02)
    assert calibrate("fixed_size", 20, 18, 4, found, 1e-5) == pytest.approx(4.0, rel=1e-3)


def test_a_cohort_of_fixed_size_is_accounted_by_rdp_for_a_client_replaced() -> None:
    # The library gives 32.679 for noise 1 in units of the sum's sensitivity, 50 of 1,000 clients, 1,500 rounds and
    # δ = 1e-6. One client replaced by another moves the sum by up to 2C, so that noise 1 takes z = 2.
    found, accountant = Mechanism("fixed_size", 1000, 50, 2.0).epsilon({1: 1500}, 1e-6)
    assert found == pytest.approx(32.679, abs=1e-3)
    assert accountant == "RDP"


def test_a_fixed_cohort_of_all_is_no_amplification() -> None:
    everyone = Mechanism("fixed_size", 20, 20, 3.0).rdp_epsilon({1: 7}, 1e-5)
    assert everyone == pytest.approx(Mechanism("none", 20, 20, 3.0).rdp_epsilon({1: 7}, 1e-5), rel=1e-9)


def test_without_amplification_replacing_a_client_halves_the_noise() -> None:
    # One client replaced moves the sum by 2C: noise z is noise z/2 for a sum of sensitivity 1.
    everyone, _ = Mechanism("poisson", 10, 10, 2.5).epsilon({1: 100}, 1e-5)
    assert Mechanism("none", 10, 3, 5.0).epsilon({1: 100}, 1e-5)[0] == pytest.approx(everyone, rel=1e-9)


def test_a_bound_that_promises_nothing_is_not_computed_for_minutes() -> None:
    # 100 releases with z = .1 and q = ½: the distribution takes half a minute, and gives 3,238.
    found, accountant = Mechanism("poisson", 100, 50, 0.1).epsilon({1: 100}, 1e-3)
    assert found > 3_000
    assert accountant == "RDP"


@pytest.mark.parametrize(("z", "epsilon", "delta"), [(1, 1, 0.12693673750664392), (2, 0.5, 0.05244032328766951)])
def test_one_release_has_the_closed_form(z: float, epsilon: float, delta: float) -> None:
    assert gaussian_delta(z, epsilon) == pytest.approx(delta, rel=1e-12)
    assert Mechanism("poisson", 1, 1, z).pld_epsilon({1: 1}, delta) == pytest.approx(epsilon, abs=1e-4)


@pytest.mark.parametrize(
    ("q", "releases", "epsilon", "delta", "z"),
    [(1e-3, 1500, 2, 1e-6, 0.6162), (1e-3, 3000, 2, 1e-6, 0.6329), (0.05, 300, 8, 1e-3, 0.7297)],
)
def test_noise_is_calibrated_to_the_budget(q: float, releases: int, epsilon: float, delta: float, z: float) -> None:
    found = calibrate("poisson", 1000, 1000 * q, releases, epsilon, delta)
    assert found == pytest.approx(z, abs=2e-4)
    assert Mechanism("poisson", 1000, 1000 * q, found).pld_epsilon({1: releases}, delta) <= epsilon


@pytest.mark.parametrize("epsilon", [1e6, 1e300])
def test_a_budget_without_end_gets_little_noise(epsilon: float) -> None:
    assert 0 < calibrate("poisson", 20, 10, 8, epsilon, 1e-3) <= 0.02


def test_a_budget_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"epsilon is 1e-09; no noise_multiplier up to a million keeps 8 rounds"):
        calibrate("poisson", 20, 20, 8, 1e-9, 1e-30)


@pytest.mark.parametrize("sampling", ["fixed_size", "none"])
def test_noise_is_calibrated_for_every_sampling(sampling: Literal["fixed_size", "none"]) -> None:
    found = calibrate(sampling, 100, 10, 20, 8.0, 1e-3)
    assert Mechanism(sampling, 100, 10, found).epsilon({1: 20}, 1e-3)[0] <= 8
    assert Mechanism(sampling, 100, 10, found * 0.999).epsilon({1: 20}, 1e-3)[0] > 8


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "none"])
def test_epsilon_grows_with_every_release(sampling: Literal["poisson", "fixed_size", "none"]) -> None:
    mechanism = Mechanism(sampling, 100, 10, 1.0)
    spent = [mechanism.rdp_epsilon({1: releases} if releases else {}, 1e-5) for releases in range(5)]
    assert spent[0] == 0
    assert all(earlier < later for earlier, later in pairwise(spent))


def test_without_noise_nothing_bounds_the_loss() -> None:
    assert Mechanism("poisson", 10, 5, 0.0).epsilon({1: 1}, 1e-5) == (math.inf, "RDP")


def test_a_round_released_twice_costs_more_than_two_rounds_that_are_sampled_apart() -> None:
    # Two releases for one cohort are one with noise z / √2; with q = 1 that is two rounds exactly, with less more.
    everyone = Mechanism("poisson", 10, 10, 2.0)
    assert everyone.rdp_epsilon({2: 1}, 1e-5) == pytest.approx(everyone.rdp_epsilon({1: 2}, 1e-5), rel=1e-9)
    sampled = Mechanism("poisson", 1000, 10, 1.0)
    assert sampled.rdp_epsilon({2: 1}, 1e-5) > 1.1 * sampled.rdp_epsilon({1: 2}, 1e-5)
    assert sampled.rdp_epsilon({2: 1}, 1e-5) == pytest.approx(
        Mechanism("poisson", 1000, 10, 1 / math.sqrt(2)).rdp_epsilon({1: 1}, 1e-5), rel=1e-9
    )
