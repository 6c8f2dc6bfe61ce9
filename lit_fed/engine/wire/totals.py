"""Exact sums: a mean does not depend on how its terms are split over processes and nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple


class Total(NamedTuple):
    """An exact weighted sum over clients.

    Args:
        parts: Numbers that add up to it.
        weight: Sum of the weights.
    """

    parts: tuple[float, ...]
    weight: int


Totals = Mapping[str, Total]
"""Sums of several clients' metrics, by name."""


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once and independent of the order; NaN or infinity if a value is, or on overflow."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum too large, or of infinities of both signs
        return sum(values)


def totals_of(clients: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, Total]:
    """Sum the metrics of clients, each given with its weight."""
    columns: dict[str, list[tuple[float, int]]] = {}
    for metrics, weight in clients:
        for name, value in metrics.items():
            columns.setdefault(name, []).append((value * weight, weight))
    return {
        name: Total(_parts([value for value, _ in column]), sum(weight for _, weight in column))
        for name, column in columns.items()
    }


def _parts(values: list[float]) -> tuple[float, ...]:
    """A few numbers with the exact sum of the values."""
    if not math.isfinite(total := exact_sum(values)):
        return (total,)
    return exact_parts(sum(map(Fraction, values), Fraction()))


def exact_parts(total: Fraction) -> tuple[float, ...]:
    """A few numbers with an exact sum, which is a whole multiple of float64's smallest number."""
    rest, parts = total, list[float]()
    while rest:
        parts.append(float(rest))
        rest -= Fraction(parts[-1])
    return tuple(parts)
