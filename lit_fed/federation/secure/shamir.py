"""Shares of a secret, of which any t give it back and fewer give nothing.

Shamir: "How to Share a Secret", Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**521 - 1
"""The order of the field: a Mersenne prime, above every secret of 32 bytes."""
SHARE_BYTES = 66


def split(secret: int, threshold: int, points: Iterable[int], prime: int = PRIME) -> dict[int, int]:
    """Return a secret's share at each point from 1; the polynomial of degree t − 1 is drawn anew."""
    return shares([secret, *(secrets.randbelow(prime) for _ in range(threshold - 1))], points, prime)


def shares(polynomial: list[int], points: Iterable[int], prime: int = PRIME) -> dict[int, int]:
    """Return a polynomial's values at some points; its constant coefficient, the secret, comes first."""
    found = {}
    for point in points:
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * point + coefficient) % prime
        found[point] = value
    return found


def combine(given: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret from exactly t shares by their points: Lagrange's interpolation at 0."""
    total = 0
    for point, value in given.items():
        above, below = 1, 1
        for other in given.keys() - {point}:
            above, below = above * other % prime, below * (other - point) % prime
        total += value * above * pow(below, -1, prime)
    return total % prime
