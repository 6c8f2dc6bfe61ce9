"""Exact samples of the discrete Gaussian, against its closed form and published vectors of the key stream."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chi2

from lit_fed.federation.secure.masks import stream
from lit_fed.federation.secure.noise import Draws, discrete_gaussian
from lit_fed.privacy.accounting import Mechanism


def closed_form(deviation: int, upto: int = 400) -> dict[int, float]:
    """e^(-y² / 2s²) over its sum: what is beyond 400 is below 1e-300 for the deviations here."""
    weight = {y: math.exp(-(y**2) / (2 * deviation**2)) for y in range(-upto, upto + 1)}
    total = math.fsum(weight.values())
    return {y: one / total for y, one in weight.items()}


def fits(counts: Counter[int], due: dict[int, float], number: int) -> bool:
    """Pearson's test at 1e-6, over values that are due at least 10 times, and all others together."""
    often = {y: chance * number for y, chance in due.items() if chance * number >= 10}
    rest = number - sum(often.values())
    terms = [(counts[y] - mean) ** 2 / mean for y, mean in often.items()]
    terms += [(number - sum(counts[y] for y in often) - rest) ** 2 / max(rest, 1.0)]
    return sum(terms) < float(chi2.ppf(1 - 1e-6, len(often)))


@pytest.mark.parametrize("deviation", [1, 2, 3, 10, 31])
def test_samples_have_the_closed_forms_distribution_and_variance(deviation: int) -> None:
    number, due = 200_000, closed_form(deviation)
    drawn = discrete_gaussian(bytes([deviation]) * 32, deviation, number)
    assert fits(Counter(drawn.tolist()), due, number)
    variance = math.fsum(y**2 * chance for y, chance in due.items())
    spread = math.sqrt((math.fsum(y**4 * chance for y, chance in due.items()) - variance**2) / number)
    assert abs((drawn.astype(float) ** 2).mean() - variance) < 5 * spread
    assert abs(drawn.mean()) < 5 * math.sqrt(variance / number)


def test_the_test_of_the_distribution_finds_another() -> None:
    drawn = Counter(discrete_gaussian(b"k" * 32, 10, 200_000).tolist())
    assert not fits(drawn, closed_form(11), 200_000)
    rounded = np.random.default_rng(0).normal(0, 1, 200_000).round()
    assert not fits(Counter(rounded.astype(int).tolist()), closed_form(1), 200_000)


def test_of_a_large_deviation_samples_are_the_normals_but_for_the_grid() -> None:
    """Moments 1, 0 and 3 within five standard errors; shares beyond 1, 2 and 3 deviations by the error function."""
    drawn = discrete_gaussian(b"l" * 32, 2**20, 100_000) / 2**20
    assert abs(drawn.mean()) < 5 / math.sqrt(1e5)
    assert abs((drawn**2).mean() - 1) < 5 * math.sqrt(2 / 1e5)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / 1e5)
    for bound in (1, 2, 3):
        share = math.erfc(bound / math.sqrt(2))
        assert abs((abs(drawn) > bound).mean() - share) < 5 * math.sqrt(share / 1e5)


def test_a_key_gives_its_samples_again_and_no_other_gives_them() -> None:
    one, again, other = (discrete_gaussian(key * 32, 1000, 500) for key in (b"a", b"a", b"b"))
    assert one.tolist() == again.tolist()
    assert one.tolist() != other.tolist()
    assert discrete_gaussian(b"a" * 32, 1000, 0).tolist() == []


def test_whole_numbers_below_a_bound_are_the_streams_words_modulo_it() -> None:
    """Words from 3 · ⌊(2⁶⁴ - 1) / 3⌋ on would be drawn again; with a bound of 2⁶³ - 1 words from 2⁶⁴ - 2 on are."""
    key = b"w" * 32
    for bound in (1, 2, 3, 1000, 2**63 - 1):
        found = Draws(key).below(np.full(50, bound))
        assert found.tolist() == [int(word) % bound for word in stream(key, 50)]


@pytest.mark.parametrize(("above", "below"), [(0, 5), (1, 3), (1, 1), (5, 2), (7, 1)])
def test_a_decision_is_true_with_probability_of_an_exponential(above: int, below: int) -> None:
    number, due = 100_000, math.exp(-above / below)
    found = Draws(b"d" * 32).decays(np.full(number, above), np.full(number, below))
    assert abs(found.mean() - due) <= 5 * math.sqrt(due * (1 - due) / number)


# ---------------------------------------------------------------------- the account


def bound(z: float, nodes: int, deviation: float, size: int) -> float:
    """ε of ½ε²-concentrated privacy (Kairouz, Liu, Steinke 2021, Theorem 1, the second term of its minimum)."""
    tau = 10 * sum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, nodes))
    return 1 / z + tau * math.sqrt(size)


@pytest.mark.parametrize(("z", "rounds", "delta"), [(1.0, 1, 1e-5), (2.0, 100, 1e-5), (8.0, 1000, 1e-6)])
def test_the_account_is_that_of_concentrated_privacy(z: float, rounds: int, delta: float) -> None:
    accounting = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant()
    accountant.compose(accounting.ZCDpEvent(bound(z, 1000, 2.0**19, 10**9) ** 2 / 2), rounds)
    found, by = Mechanism("known", 50, 5, z).epsilon({1: rounds}, delta)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    assert by == "RDP"


def test_the_sum_of_discrete_gaussians_is_another_by_less_than_the_bound() -> None:
    """The largest difference of log-probabilities of the sum of h and of one with variance h s² is at most τ.

    s = 1, h = 3: τ = 10 (e^(-π²) + e^(-4π²/3)) = 5.3e-4.
    """
    one = closed_form(1, 60)
    line = np.array([one[y] for y in sorted(one)])
    summed = np.convolve(np.convolve(line, line), line)
    tau = (bound(1.0, 3, 1.0, 1) - 1) * 1
    assert tau == pytest.approx(10 * (math.exp(-(math.pi**2)) + math.exp(-4 * math.pi**2 / 3)))
    weight = {y: math.exp(-(y**2) / 6) for y in range(-180, 181)}
    total = math.fsum(weight.values())
    gaps = [abs(math.log(summed[y + 180]) - math.log(weight[y] / total)) for y in range(-20, 21)]
    assert 0 < max(gaps) <= tau
    assert all(bound(2.0, 1000, deviation, 10**9) == 0.5 for deviation in (2.0**19, 2.0**20))
    assert all(one >= other for one, other in pairwise(bound(1.0, 5, s / 4, 100) for s in range(2, 20)))
