"""FedFrozen's figures as the tables of their claims.

Rows and columns by panel, for the grammar of `lit_fed.studies.file.claims`:

====================================  =======================================  ===========================
panel                                 rows                                     columns
====================================  =======================================  ===========================
profile, rho …                        h (a curve over rounds), and of it       rho=0, rho=1, …
                                      first, lowest, last, step
loss ratio by E                       ratio                                    E=1, E=5, …
loss by warm-up                       frozen                                   warm=0, warm=0.25, …
loss by E                             fedavg, kernel, pooled                   E=10, E=20, …
loss by rho                           fedavg, fedprox, scaffold, fedfrozen     rho=0, rho=0.5, …
loss by warm-up and rho               rho=0, rho=0.5, …                        warm=0, warm=0.25, …
loss by ridge, drift by ridge         loss, drift                              ridge=0, ridge=0.1, …
drift at rest by ridge                few, solved                              ridge=0, ridge=0.1, …
loss at rest by ridge                 loss=few, loss=solved                    ridge=0, ridge=0.1, …
freezing bias by round                bias (a curve over rounds)               rho=0, rho=1, …
residual by round                     residual (a curve)                       rho=0, rho=1, …
residual after phase 2 by round       left (a curve)                           rho=0, rho=1, …
distance of the values by round       distance (a curve)                       rho=0, rho=1, …
bound by round, excess by round       bound, excess (curves); slack            rho=0, rho=1, …
best warm-up by rho                   warm_bound, warm_run (not logarithms)    rho=0, rho=1, …
loss over the best by rho             regret                                   rho=0, rho=1, …
====================================  =======================================  ===========================

Values are natural logarithms, because the losses of two seeds differ by factors: ``a > b + 0.05`` means that a is 5 %
above b. ``step`` is the largest change between two consecutive points of h, so that ``0 > step`` means that h decreases
throughout. The value of any other curve is its last, and ``slack`` is the minimum over rounds of bound over excess.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from math import inf

from lit_fed.studies.simulations.simulation import Curves, Place, Point, Values, logarithm

_AXES = {
    "loss ratio by E": ("ratio", "E"),
    "loss by warm-up": ("frozen", "warm"),
    "loss by E": ("", "E"),
    "loss by rho": ("", "rho"),
    "loss by warm-up and rho": ("", "warm"),
    "loss by ridge": ("loss", "ridge"),
    "drift by ridge": ("drift", "ridge"),
    "drift at rest by ridge": ("", "ridge"),
    "loss at rest by ridge": ("", "ridge"),
    "loss over the best by rho": ("regret", "rho"),
}
_CURVES = {
    "freezing bias by round": "bias",
    "residual by round": "residual",
    "residual after phase 2 by round": "left",
    "distance of the values by round": "distance",
    "bound by round": "bound",
    "excess by round": "excess",
}


def readings(points: Sequence[Point]) -> tuple[Values, Curves]:
    """Return a figure's numbers and curves by row, column and seed."""
    curves = _curves(points)
    return _values(points, curves), curves


def _curves(points: Sequence[Point]) -> dict[Place, dict[int, list[tuple[int, float]]]]:
    curves: dict[Place, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.panel.startswith("profile, rho "):
            column = f"rho={point.panel.removeprefix('profile, rho ')}"
            curves["h", column][point.seed].append((int(point.x), logarithm(point.value)))
        elif point.panel in _CURVES:
            place = _CURVES[point.panel], point.line.replace(" ", "=")
            curves[place][point.seed].append((int(point.x), logarithm(point.value)))
    return curves


def _values(points: Sequence[Point], curves: Curves) -> dict[Place, dict[int, float]]:
    values: dict[Place, dict[int, float]] = defaultdict(dict)
    for point in points:
        if point.panel in _AXES:
            row, axis = _AXES[point.panel]
            row = row or point.line.lower().replace(" ", "=")
            values[row, f"{axis}={point.x:g}"][point.seed] = logarithm(point.value)
        elif point.panel == "best warm-up by rho":
            values[f"warm_{point.line}", f"rho={point.x:g}"][point.seed] = point.value
    for (row, column), seeds in curves.items():
        for seed, curve in seeds.items():
            numbers = [value for _, value in curve]
            values[row, column][seed] = numbers[-1]
            if row == "h":
                steps = [later - sooner for sooner, later in itertools.pairwise(numbers)]
                values["first", column][seed], values["lowest", column][seed] = numbers[0], min(numbers)
                values["last", column][seed], values["step", column][seed] = numbers[-1], max(steps, default=inf)
            if row == "bound":
                excess = [value for _, value in curves["excess", column][seed]]
                slack = (over - under for over, under in zip(numbers, excess, strict=True))
                values["slack", column][seed] = min(slack)
    return values
