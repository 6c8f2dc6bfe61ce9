r"""Both sides of UWA's Proposition 4.2 and Corollaries 4.3 and 4.4, for several temperatures of trust.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Section 4.3. Rows for the grammar of `lit_fed.studies.file.claims`, with columns ``tau=0``, ``tau=0.25``, …:

===========================  ====================================================================================
panel                        rows
===========================  ====================================================================================
bias by step                 bias, bias_bound (curves); bias_slack
squared gradient by step     gradient, gradient_bound (means over steps so far); gradient_slack
excess loss by step          excess, excess_bound; excess_slack
teacher error by τ           error, ε_teach
floor by τ                   floor_43, floor_44, the limits of the two corollaries' bounds
steps by τ                   enough_43, enough_44, their T for twice the floor; taken_43, taken_44, the run's T
===========================  ====================================================================================

Values are natural logarithms; a curve's value is its last, and ``…_slack`` is the minimum of bound over bounded value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.studies.papers.uwa.bounds import (
    Descent,
    best_oracle,
    bias_bound,
    linear_bound,
    linear_floor,
    linear_steps,
    stationarity_bound,
    stationarity_floor,
    stationarity_steps,
)
from lit_fed.studies.papers.uwa.stage2 import GaussianTask, draw, minimiser, mixture, private_training, refine
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import (
    Curves,
    Point,
    Simulation,
    Values,
    readings_of,
)

_CURVES = {"bias by step": "bias", "squared gradient by step": "gradient", "excess loss by step": "excess"}


class SeedJob(NamedTuple):
    """A seed of a simulation."""

    figure: Proposition42
    seed: int


@dataclass(frozen=True, kw_only=True)
class Proposition42(Simulation):
    """The bias of the teaching, the squared gradient and the loss of stage 2, with their bounds.

    Args:
        task: The task.
        seeds: The number of seeds.
        first_seed: The first seed.
        temperatures: τ of UWA's weights, one line each: 0 is the average, 0.25 sUWA, 1 UWA.
        private_steps: Steps of stage 1.
        steps: Steps T of stage 2.
        step: Step size γ of stage 2, in units of 1/L_F; at most 1.
        batch: Public examples per step.
        every: Steps between two measurements.
        claims: The paper's claims, in the rows and columns above.

    Note:
        The expectations are means over clients, which differ in their start and batches. The constants hold along the
        measured steps of the run, with c and α chosen for the least floor (`best_oracle`); Eq. 4 therefore holds by its
        proof, and the figure shows how tight it is. F_inf is F*, which is known.
    """

    network = "softmax regression"
    data = "drawn Gaussians"
    task: GaussianTask = field(default_factory=GaussianTask)
    seeds: int = 10
    first_seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.25, 1.0)
    private_steps: int = 200
    steps: int = 1000
    step: float = 0.5
    batch: int = 32
    every: int = 10
    claims: list[str | dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the settings."""
        for key in ("seeds", "private_steps", "steps", "batch", "every"):
            check_range(f"simulate.{key}", getattr(self, key), least=1)
        check_range("simulate.step", self.step, above=0, most=1, why=", in units of 1/L_F")
        for temperature in self.temperatures:
            check_range("simulate.temperatures", temperature, least=0)

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        asked = [SeedJob(self, seed) for seed in self.every_seed]
        return [point for points in jobs.run(solve, asked, (Point,)) for point in points]

    @override
    def readings(self, points: Sequence[Point]) -> tuple[Values, Curves]:
        return readings_of(points, _CURVES, "tau")

    @override
    def dress(self, axes: Any, panel: str) -> None:
        super().dress(axes, panel)
        axes.set_yscale("log")


def solve(job: SeedJob) -> list[Point]:
    """Return all numbers of a seed."""
    torch.set_num_threads(1)  # jobs run in parallel, with small matrices
    figure, seed = job
    data = draw(figure.task, seed)
    best, begin = minimiser(data), private_training(data, figure.private_steps)
    how = Descent(data.smoothness, figure.task.ridge, figure.step / data.smoothness)
    ideal = (data.public @ best).softmax(-1)
    points: list[Point] = []

    def curve(panel: str, line: str, steps: Tensor, values: Tensor) -> None:
        pairs = zip(steps.tolist(), values.tolist(), strict=True)
        points.extend(Point(panel, line, step, seed, value) for step, value in pairs)

    for temperature in figure.temperatures:
        taught = mixture(data, begin, temperature)
        error = float((taught - ideal).square().sum(1).mean())
        trace = refine(data, begin, taught, best, how, figure.steps, figure.batch, figure.every, seed)
        known, excess, line = best_oracle(trace, error), float(trace.excess[0]), f"tau={temperature:g}"
        done = trace.steps + figure.every  # a measurement represents the steps up to the next one
        so_far = trace.gradient.cumsum(0) / torch.arange(1, len(done) + 1)
        curve("bias by step", line, trace.steps, trace.bias)
        curve("bias by step", f"{line}, bound", trace.steps, bias_bound(trace, known))
        curve("squared gradient by step", line, done, so_far)
        curve("squared gradient by step", f"{line}, bound", done, stationarity_bound(done, excess, known, how))
        curve("excess loss by step", line, trace.steps, trace.excess)
        curve("excess loss by step", f"{line}, bound", trace.steps, linear_bound(trace.steps, excess, known, how))
        floors = stationarity_floor(known, how), linear_floor(known, how)
        computed = {
            ("teacher error by τ", "error"): error,
            ("floor by τ", "floor_43"): floors[0],
            ("floor by τ", "floor_44"): floors[1],
            ("steps by τ", "enough_43"): stationarity_steps(excess, known, how),
            ("steps by τ", "enough_44"): linear_steps(excess, known, how),
            ("steps by τ", "taken_43"): _first(done, so_far <= 2 * floors[0]),
            ("steps by τ", "taken_44"): _first(trace.steps, trace.excess <= 2 * floors[1]),
        }
        points += [Point(panel, name, temperature, seed, value) for (panel, name), value in computed.items()]
    return points


def _first(steps: Tensor, reached: Tensor) -> float:
    """Return the first step, at least 1, at which a condition holds; infinite if never."""
    return max(1.0, float(steps[reached][0])) if reached.any() else float("inf")
