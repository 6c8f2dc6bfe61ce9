"""The accountant against published and closed-form values."""

import math
from itertools import pairwise
from typing import Literal

import pytest

from lit_fed.privacy.accounting import Mechanism, calibrate, gaussian_delta

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
    assert mechanism.rdp_epsilon(releases, delta) == pytest.approx(rdp, abs=2e-6)
    assert mechanism.epsilon(releases, delta) == pytest.approx(pld, abs=2e-6)


def test_a_cohort_of_fixed_size_costs_twice_what_poisson_sampling_does() -> None:
    # Replace-one RDP of 50 of 1,000 clients, z = 1, 1,500 rounds, δ = 1e-6: 32.68 where Poisson's PLD gives 15.36.
    assert Mechanism("fixed_size", 1000, 50, 1.0).epsilon(1500, 1e-6) == pytest.approx(32.679, abs=1e-3)


def test_without_amplification_replacing_a_client_halves_the_noise() -> None:
    # One client replaced moves the sum by 2C: noise z is noise z/2 for a sum of sensitivity 1.
    everyone = Mechanism("poisson", 10, 10, 2.5).epsilon(100, 1e-5)
    assert Mechanism("none", 10, 3, 5.0).epsilon(100, 1e-5) == pytest.approx(everyone, rel=1e-9)


@pytest.mark.parametrize(("z", "epsilon", "delta"), [(1, 1, 0.12693673750664392), (2, 0.5, 0.05244032328766951)])
def test_one_release_has_the_closed_form(z: float, epsilon: float, delta: float) -> None:
    assert gaussian_delta(z, epsilon) == pytest.approx(delta, rel=1e-12)
    assert Mechanism("poisson", 1, 1, z).epsilon(1, delta) == pytest.approx(epsilon, abs=1e-4)


@pytest.mark.parametrize(
    ("q", "releases", "epsilon", "delta", "z"),
    [(1e-3, 1500, 2, 1e-6, 0.6162), (1e-3, 3000, 2, 1e-6, 0.6329), (0.05, 300, 8, 1e-3, 0.7297)],
)
def test_noise_is_calibrated_to_the_budget(q: float, releases: int, epsilon: float, delta: float, z: float) -> None:
    found = calibrate("poisson", 1000, 1000 * q, releases, epsilon, delta)
    assert found == pytest.approx(z, abs=2e-4)
    assert Mechanism("poisson", 1000, 1000 * q, found).epsilon(releases, delta) <= epsilon


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "none"])
def test_epsilon_grows_with_every_release(sampling: Literal["poisson", "fixed_size", "none"]) -> None:
    mechanism = Mechanism(sampling, 100, 10, 1.0)
    spent = [mechanism.rdp_epsilon(releases, 1e-5) for releases in range(5)]
    assert spent[0] == 0
    assert all(earlier < later for earlier, later in pairwise(spent))


def test_without_noise_nothing_bounds_the_loss() -> None:
    assert Mechanism("poisson", 10, 5, 0.0).epsilon(1, 1e-5) == math.inf
