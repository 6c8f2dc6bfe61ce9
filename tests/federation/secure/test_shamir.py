"""Shares of a secret: a published example, every subset of t, and nothing from t − 1."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.federation.secure.shamir import PRIME, combine, shares, split

# Wikipedia, "Shamir's secret sharing", its example over the field of p = 1613: the secret 1234, and 166 x + 94 x².
EXAMPLE = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}


def test_the_published_example_is_split_and_joined() -> None:
    assert shares([1234, 166, 94], range(1, 7), 1613) == EXAMPLE
    for three in combinations(EXAMPLE.items(), 3):
        assert combine(dict(three), 1613) == 1234


@given(st.integers(0, 2**256 - 1), st.integers(1, 6))
def test_any_t_shares_give_the_secret_back(secret: int, threshold: int) -> None:
    given = split(secret, threshold, range(1, 8))
    assert all(combine(dict(some)) == secret for some in combinations(given.items(), threshold))


@pytest.mark.parametrize("points", [(1, 2), (2, 4), (1, 3)])
def test_shares_below_t_are_equally_likely_under_every_secret(points: tuple[int, int]) -> None:
    """All 7³ polynomials of degree 2 over the field of 7: two shares take each pair of values once for each secret."""
    for secret in range(7):
        seen = Counter(tuple(shares([secret, *rest], points, 7).values()) for rest in product(range(7), repeat=2))
        assert seen == Counter(product(range(7), repeat=2))


def test_the_field_is_prime_and_above_every_secret() -> None:
    assert pow(3, PRIME - 1, PRIME) == 1
    assert PRIME > 2**256
