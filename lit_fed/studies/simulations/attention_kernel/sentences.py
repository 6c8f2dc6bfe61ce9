"""The figures of FedFrozen as the tables that their claims are about.

Rows and columns by panel, for the sentences of `lit_fed.studies.claims`:

====================================  =======================================  ===========================
panel                                 rows                                     columns
====================================  =======================================  ===========================
profile, rho …                        h (a curve over rounds), and of it       rho=0, rho=1, …
                                      first, lowest, last, step
loss ratio by E                       ratio                                    E=1, E=5, …
loss by warm-up                       frozen                                   warm=0, warm=0.25, …
loss by rho                           fedavg, fedprox, scaffold, fedfrozen     rho=0, rho=0.5, …
loss by warm-up and rho               rho=0, rho=0.5, …                        warm=0, warm=0.25, …
loss by ridge, drift by ridge         loss, drift                              ridge=0, ridge=0.1, …
====================================  =======================================  ===========================

Values are natural logarithms, since the losses of two seeds differ by factors: ``a > b + 0.05`` says that a is 5 %
above b. ``step`` is the largest change between two neighbouring points of h, so that ``0 > step`` says that h falls
throughout.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from math import inf, log

from lit_fed.studies.simulations.simulation import Curves, Place, Point, Values

_AXES = {
    "loss ratio by E": ("ratio", "E"),
    "loss by warm-up": ("frozen", "warm"),
    "loss by rho": ("", "rho"),
    "loss by warm-up and rho": ("", "warm"),
    "loss by ridge": ("loss", "ridge"),
    "drift by ridge": ("drift", "ridge"),
}


def readings(points: Sequence[Point]) -> tuple[Values, Curves]:
    """Numbers and curves of a figure by row, column and seed."""
    curves = _curves(points)
    return _values(points, curves), curves


def _curves(points: Sequence[Point]) -> dict[Place, dict[int, list[tuple[int, float]]]]:
    curves: dict[Place, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.panel.startswith("profile, rho "):
            column = f"rho={point.panel.removeprefix('profile, rho ')}"
            curves["h", column][point.seed].append((int(point.x), _log(point.value)))
    return curves


def _values(points: Sequence[Point], curves: Curves) -> dict[Place, dict[int, float]]:
    values: dict[Place, dict[int, float]] = defaultdict(dict)
    for point in points:
        if point.panel in _AXES:
            row, axis = _AXES[point.panel]
            row = row or point.line.lower().replace(" ", "=")
            values[row, f"{axis}={point.x:g}"][point.seed] = _log(point.value)
    for (_, column), seeds in curves.items():
        for seed, curve in seeds.items():
            numbers = [value for _, value in curve]
            steps = [later - sooner for sooner, later in itertools.pairwise(numbers)]
            of_curve = {"h": numbers[-1], "first": numbers[0], "lowest": min(numbers), "last": numbers[-1]}
            for row, number in (of_curve | {"step": max(steps, default=inf)}).items():
                values[row, column][seed] = number
    return values


def _log(value: float) -> float:
    """The logarithm; infinite for what diverged."""
    return log(value) if 0 < value < inf else inf
