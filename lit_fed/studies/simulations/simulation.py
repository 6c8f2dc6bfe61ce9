"""The interface of simulations: points by seed, and claims about the points."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

from lit_fed.errors import ConfigError
from lit_fed.studies.file.claims import Claim, Verdict, by_holm, check, parse_claim
from lit_fed.studies.simulations.jobs import ALONE, Jobs

Place = tuple[str, str]
Values = Mapping[Place, Mapping[int, float]]
Curves = Mapping[Place, Mapping[int, Sequence[tuple[int, float]]]]


class Point(NamedTuple):
    """A number of a figure, for one seed.

    Args:
        panel: The panel.
        line: The line in the panel.
        x: The position on the horizontal axis.
        seed: The seed.
        value: The number.
    """

    panel: str
    line: str
    x: float
    seed: int
    value: float


class Simulation(ABC):
    """A paper's figure that needs no data set.

    Attributes:
        seeds: The number of seeds.
        first_seed: The first seed.
        claims: The paper's claims about the figure, in the grammar of `lit_fed.studies.file.claims`.
        network: The network, for the page of results.
        data: The data, likewise.
    """

    network = ""
    data = "drawn"

    seeds: int
    first_seed: int
    claims: Sequence[Any]

    @abstractmethod
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        """Return all numbers of the figure; ``jobs`` runs the work."""

    @abstractmethod
    def readings(self, points: Sequence[Point]) -> tuple[Values, Curves]:
        """Return the points as the table of claims: numbers, and curves over rounds, by row, column and seed."""

    @property
    def every_seed(self) -> range:
        """All seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def dress(self, axes: Any, panel: str) -> None:
        """Set scales and labels of a panel's axes, from its title of the form "y by x"."""
        drawn, _, by = panel.rpartition(" by ")
        axes.set_xlabel(by)
        axes.set_ylabel(drawn)


def readings_of(
    points: Sequence[Point], curves: Mapping[str, str], column: str, plain: Collection[str] = ()
) -> tuple[Values, Curves]:
    """Return points as the table of claims, in natural logarithms.

    The lines of a panel with curves are columns, or ``<column>, bound``, whose row is ``<row>_bound``; where there is a
    bound, ``<row>_slack`` is the least distance. In other panels a line is a row, and x its column, ``<column>=<x>``.

    Args:
        points: The points.
        curves: Rows by the panels that have curves.
        column: What the columns differ by.
        plain: Rows whose values are no logarithms.
    """
    by_place: dict[Place, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    values: dict[Place, dict[int, float]] = defaultdict(dict)
    for point in points:
        if point.panel in curves:
            line, _, bound = point.line.partition(", ")
            row = curves[point.panel] + ("_bound" if bound else "")
            by_place[row, line][point.seed].append((int(point.x), logarithm(point.value)))
        else:
            value = point.value if point.line in plain else logarithm(point.value)
            values[point.line, f"{column}={point.x:g}"][point.seed] = value
    for (row, line), seeds in [*by_place.items()]:
        for seed, curve in seeds.items():
            values[row, line][seed] = curve[-1][1]
            if (f"{row}_bound", line) in by_place:
                over = by_place[f"{row}_bound", line][seed]
                slack = min(a - b for (_, a), (_, b) in zip(over, curve, strict=True))
                values[f"{row}_slack", line][seed] = slack
    return values, by_place


def logarithm(value: float) -> float:
    """Return the natural logarithm; infinite for a diverged value."""
    return log(value) if 0 < value < inf else inf


def verdicts(simulation: Simulation, points: Sequence[Point]) -> list[tuple[Claim, Verdict, int]]:
    """Return a figure's claims with their verdicts, and the number of seeds that alone fulfil each claim."""
    values, curves = simulation.readings(points)
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*values, strict=True))
    gaps = set(itertools.product(rows, columns)) - set(values)

    def value(place: Place, seed: int) -> float | None:
        return values[place].get(seed)

    def curve(place: Place, seed: int) -> Sequence[tuple[int, float]]:
        return curves.get(place, {}).get(seed, [])

    verdicts_found = []
    for number, content in enumerate(simulation.claims, 1):
        claim = parse_claim(content, f"simulate.claims, {number}", rows, columns, gaps)
        if claim.metric or claim.report:
            raise ConfigError(f"simulate.claims, {number}: a simulation has neither metric nor report; remove the key")
        every = simulation.every_seed
        alone = [check(claim, [seed], value, curve).margin or 0.0 for seed in every]
        verdicts_found.append((claim, check(claim, every, value, curve), sum(margin > 0 for margin in alone)))
    noted = by_holm([verdict for _, verdict, _ in verdicts_found])
    return [(claim, verdict, agree) for (claim, _, agree), verdict in zip(verdicts_found, noted, strict=True)]
