"""What a paper says about a figure, checked over seeds in the sentences of `lit_fed.studies.claims`.

A figure's points are a table to these sentences, with rows and columns by panel:

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
from collections.abc import Mapping, Sequence
from math import inf, log

from lit_fed.errors import ConfigError
from lit_fed.simulations.figures import Point, Settings
from lit_fed.studies.claims import Claim, Verdict, check, parse_claim

Place = tuple[str, str]

_AXES = {
    "loss ratio by E": ("ratio", "E"),
    "loss by warm-up": ("frozen", "warm"),
    "loss by rho": ("", "rho"),
    "loss by warm-up and rho": ("", "warm"),
    "loss by ridge": ("loss", "ridge"),
    "drift by ridge": ("drift", "ridge"),
}


def verdicts(settings: Settings, points: Sequence[Point]) -> list[tuple[Claim, Verdict, int]]:
    """How the claims of a figure's file stand, and for how many seeds each is so when taken alone.

    Raises:
        ConfigError: If a claim is no sentence of the grammar, or names what the figure does not have.
    """
    curves = _curves(points)
    values = _values(points, curves)
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*values, strict=True))
    gaps = set(itertools.product(rows, columns)) - set(values)

    def value(place: Place, seed: int) -> float | None:
        return values[place].get(seed)

    def curve(place: Place, seed: int) -> list[tuple[int, float]]:
        return curves.get(place, {}).get(seed, [])

    found = []
    for number, content in enumerate(settings.claims, 1):
        claim = parse_claim(content, f"simulate.claims, {number}", rows, columns, gaps)
        if claim.metric or claim.report:
            raise ConfigError(f"simulate.claims, {number}: a simulation has neither metric nor report")
        every = range(settings.seeds)
        alone = [check(claim, [seed], value, curve).margin or 0.0 for seed in every]
        found.append((claim, check(claim, every, value, curve), sum(margin > 0 for margin in alone)))
    return found


def _curves(points: Sequence[Point]) -> dict[Place, dict[int, list[tuple[int, float]]]]:
    curves: dict[Place, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.panel.startswith("profile, rho "):
            column = f"rho={point.panel.removeprefix('profile, rho ')}"
            curves["h", column][point.seed].append((int(point.x), _log(point.value)))
    return curves


def _values(
    points: Sequence[Point], curves: Mapping[Place, Mapping[int, list[tuple[int, float]]]]
) -> dict[Place, dict[int, float]]:
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
