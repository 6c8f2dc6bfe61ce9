"""What every simulation of a paper offers: its points by seed, and the claims about them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

from lit_fed.errors import ConfigError
from lit_fed.studies.claims import Claim, Verdict, check, parse_claim
from lit_fed.studies.simulations.jobs import ALONE, Jobs

Place = tuple[str, str]
Values = Mapping[Place, Mapping[int, float]]
Curves = Mapping[Place, Mapping[int, Sequence[tuple[int, float]]]]


class Point(NamedTuple):
    """A number of a figure, for one seed.

    Args:
        panel: The panel.
        line: The line in it.
        x: Where on the horizontal axis.
        seed: The seed.
        value: The number.
    """

    panel: str
    line: str
    x: float
    seed: int
    value: float


class Simulation(ABC):
    """A paper's figure whose task is no data set.

    Attributes:
        seeds: How many seeds.
        first_seed: The first of them.
        claims: What the paper says about the figure, in the sentences of `lit_fed.studies.claims`.
    """

    seeds: int
    first_seed: int
    claims: Sequence[Any]

    @abstractmethod
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        """All its numbers.

        Args:
            jobs: Runs its jobs.
        """

    @abstractmethod
    def readings(self, points: Sequence[Point]) -> tuple[Values, Curves]:
        """The points as the table that claims are about: numbers, and curves over rounds, by row, column and seed."""

    @property
    def every_seed(self) -> range:
        """Its seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def dress(self, axes: Any, panel: str) -> None:
        """Scales and labels of a panel's axes; its title says what is drawn, and by what."""
        drawn, _, by = panel.rpartition(" by ")
        axes.set_xlabel(by)
        axes.set_ylabel(drawn)


def logarithm(value: float) -> float:
    """The natural logarithm; infinite for what diverged."""
    return log(value) if 0 < value < inf else inf


def verdicts(simulation: Simulation, points: Sequence[Point]) -> list[tuple[Claim, Verdict, int]]:
    """How the claims of a figure stand, and for how many seeds each is so when taken alone.

    Raises:
        ConfigError: If a claim is no sentence of the grammar, or names what the figure does not have.
    """
    values, curves = simulation.readings(points)
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*values, strict=True))
    gaps = set(itertools.product(rows, columns)) - set(values)

    def value(place: Place, seed: int) -> float | None:
        return values[place].get(seed)

    def curve(place: Place, seed: int) -> Sequence[tuple[int, float]]:
        return curves.get(place, {}).get(seed, [])

    found = []
    for number, content in enumerate(simulation.claims, 1):
        claim = parse_claim(content, f"simulate.claims, {number}", rows, columns, gaps)
        if claim.metric or claim.report:
            raise ConfigError(f"simulate.claims, {number}: a simulation has neither metric nor report")
        every = simulation.every_seed
        alone = [check(claim, [seed], value, curve).margin or 0.0 for seed in every]
        found.append((claim, check(claim, every, value, curve), sum(margin > 0 for margin in alone)))
    return found
