"""Sums that are added up without rounding, so that a mean does not depend on who has added which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple


class Total(NamedTuple):
    """A weighted sum over clients, exact.

    Args:
        parts: Numbers whose sum it is.
        weight: The sum of the weights.
    """

    parts: tuple[float, ...]
    weight: int


Totals = Mapping[str, Total]
"""What several clients' metrics come to together, by name."""


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once, in whatever order the values come; NaN or infinity where one is, or beyond the largest."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum too large, or of infinities of both signs
        return sum(values)


def totals_of(clients: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, Total]:
    """What some clients' metrics come to.

    Args:
        clients: The metrics of each, and its weight.
    """
    columns: dict[str, list[tuple[float, int]]] = {}
    for metrics, weight in clients:
        for name, value in metrics.items():
            columns.setdefault(name, []).append((value * weight, weight))
    return {
        name: Total(_parts([value for value, _ in column]), sum(weight for _, weight in column))
        for name, column in columns.items()
    }


def _parts(values: list[float]) -> tuple[float, ...]:
    """A few numbers whose sum is that of the values without rounding."""
    if not math.isfinite(total := exact_sum(values)):
        return (total,)
    rest, found = sum(map(Fraction, values), Fraction()), list[float]()
    while rest:
        found.append(float(rest))
        rest -= Fraction(found[-1])
    return tuple(found)
