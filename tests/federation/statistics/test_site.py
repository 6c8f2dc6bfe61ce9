"""Exact sums, and the join of sites."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.federation.statistics.site import exact_sum

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=50)


@given(NUMBERS)
def test_a_sum_is_exact(values: list[float]) -> None:
    """Also of subnormal numbers and of the largest."""
    assert exact_sum(np.array(values)) == sum(map(Fraction, values), Fraction())


@given(NUMBERS, st.integers(0, 50))
def test_a_sum_does_not_depend_on_how_it_is_split(values: list[float], at: int) -> None:
    array = np.array(values)
    assert exact_sum(array[:at]) + exact_sum(array[at:]) == exact_sum(array)


def test_a_sum_with_weights() -> None:
    """2 · 0.1 + 3 · 1e300, exactly."""
    found = exact_sum(np.array([0.1, 1e300]), np.array([2, 3]))
    assert found == 2 * Fraction(0.1) + 3 * Fraction(1e300)


def test_many_numbers_that_a_float_would_lose() -> None:
    """1 + 10⁶ · 2⁻⁶⁰, where float64 keeps 53 bits: fsum agrees."""
    values = np.array([1.0] + [2.0**-60] * 10**6)
    assert float(exact_sum(values)) == math.fsum(values)
    assert exact_sum(values) - 1 == Fraction(10**6, 2**60)
