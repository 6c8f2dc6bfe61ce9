"""Figures 1 to 3 of FedFrozen from simulations.

A figure is a list of jobs; each runs a federation for all seeds. A run that trains all parameters serves every length
of warm-up: its kernels are kept, and phase 2 starts from each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.studies.papers.fedfrozen.descent import Work, profile, train, train_values
from lit_fed.studies.papers.fedfrozen.linear_attention import TeacherTask, draw
from lit_fed.studies.papers.fedfrozen.sentences import readings
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Curves, Point, Simulation, Values

LAST = 50  # the drift is averaged over this many last rounds, as in Figure 3


@dataclass(frozen=True)
class RoundsJob:
    """The rounds of one federation, for all seeds.

    Args:
        task: The task.
        rho: ρ.
        seeds: The seeds.
        work: The local work.
        rounds: T.
        profiles: Rounds at which h is computed.
        warmups: Rounds from which phase 2 runs to the end.
        whole: Whether to train beyond the last of ``profiles`` and ``warmups``.
    """

    task: TeacherTask
    rho: float
    seeds: range
    work: Work
    rounds: int
    profiles: tuple[int, ...] = ()
    warmups: tuple[int, ...] = ()
    whole: bool = True


class Outcome(NamedTuple):
    """The outcome of a job, by seed.

    Args:
        profiles: h by round.
        loss: The final global loss of training all parameters; empty if the job did not request it.
        frozen: The final global loss by warm-up.
        drift: The clients' mean distance over the last rounds of phase 2, by warm-up.
    """

    profiles: dict[int, list[float]]
    loss: list[float]
    frozen: dict[int, list[float]]
    drift: dict[int, list[float]]


def solve(job: RoundsJob) -> Outcome:
    """Run a job."""
    torch.set_num_threads(1)  # jobs run in parallel, with small matrices
    clients = draw(job.task, job.rho, list(job.seeds))
    keep = sorted({*job.profiles, *job.warmups})
    rounds = job.rounds if job.whole else max(keep)
    path = train(clients, job.work, rounds, keep)
    profiles = {at: profile(clients, path.weights[at], job.work.ridge).tolist() for at in job.profiles}
    frozen, drift = {}, {}
    plain = replace(job.work, mu=0.0, control=False)
    for at in job.warmups:
        if at < job.rounds:
            second = train_values(clients, plain, path.weights[at], job.rounds - at)
            drifts = path.drifts[:at] + second.drifts
            frozen[at] = second.loss.tolist()
        else:
            drifts, frozen[at] = path.drifts, path.loss.tolist()
        drift[at] = torch.stack([drift_.double() for drift_ in drifts[-LAST:]]).mean(0).tolist()
    return Outcome(profiles, path.loss.tolist() if job.whole else [], frozen, drift)


def solve_all(asked_for: Sequence[RoundsJob], jobs: Jobs) -> list[Outcome]:
    """Run jobs in parallel; jobs that differ only in the requested outputs run once."""
    asked: dict[RoundsJob, list[RoundsJob]] = {}
    for job in asked_for:
        asked.setdefault(replace(job, profiles=(), warmups=(), whole=True), []).append(job)
    together = [
        replace(
            alone,
            profiles=tuple(sorted({at for job in same for at in job.profiles})),
            warmups=tuple(sorted({at for job in same for at in job.warmups})),
            whole=any(job.whole for job in same),
        )
        for alone, same in asked.items()
    ]
    outcomes = dict(zip(asked, jobs.run(solve, together, (Outcome,)), strict=True))
    return [outcomes[replace(job, profiles=(), warmups=(), whole=True)] for job in asked_for]


# ---------------------------------------------------------------------- the figures


@dataclass(frozen=True, kw_only=True)
class KernelFigure(Simulation):
    """The base class of the three figures.

    Args:
        task: The task.
        seeds: The number of seeds.
        first_seed: The first seed.
        rounds: T.
        local_steps: E.
        lr: η.
        ridge: λ.
        rhos: Heterogeneities ρ: the panels of Figure 1, the rows of Figures 2c and 3a.
        claims: The paper's claims, see `lit_fed.studies.papers.fedfrozen.sentences`.
    """

    network = "linear attention"
    data = "drawn tokens"
    task: TeacherTask = field(default_factory=TeacherTask)
    seeds: int = 10
    first_seed: int = 0
    rounds: int = 200
    local_steps: int = 20
    lr: float = 1e-3
    ridge: float = 1e-3
    rhos: tuple[float, ...] = (0.0, 1.0, 2.0)
    claims: list[str | dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the settings."""
        for key in ("seeds", "rounds", "local_steps", "every"):
            check_range(f"simulate.{key}", getattr(self, key, 1), least=1)
        for fraction in (getattr(self, "warmup", 0), *getattr(self, "warmups", ())):
            check_range("simulate.warmups", fraction, least=0, most=1, why=", a fraction of the rounds")

    @property
    def work(self) -> Work:
        """The local work, unless a panel changes it."""
        return Work(lr=self.lr, local_steps=self.local_steps, ridge=self.ridge)

    def round_of(self, fraction: float) -> int:
        """Convert a fraction of the rounds to a round."""
        return round(fraction * self.rounds)

    def job(self, rho: float, work: Work | None = None, **asked: Any) -> RoundsJob:
        """Return a job of this figure; ``work`` defaults to the figure's."""
        return RoundsJob(self.task, rho, self.every_seed, work or self.work, self.rounds, **asked)

    def by_seed(self, panel: str, line: str, x: float, values: Sequence[float]) -> list[Point]:
        """Return one point per seed."""
        return [Point(panel, line, x, seed, value) for seed, value in zip(self.every_seed, values, strict=True)]

    @override
    def readings(self, points: Sequence[Point]) -> tuple[Values, Curves]:
        return readings(points)

    @override
    def dress(self, axes: Any, panel: str) -> None:
        super().dress(axes, panel)
        if panel.startswith("profile"):
            axes.set_xlabel("round")
            axes.set_ylabel("profile objective h")
        if "loss by rho" in panel or "ridge" in panel:
            axes.set_yscale("log")
        if "ridge" in panel:
            axes.set_xscale("symlog", linthresh=0.1)
            axes.set_xlim(left=0)


@dataclass(frozen=True, kw_only=True)
class Figure1(KernelFigure):
    """The profile objective h_λ(Φ_t) during the warm-up, a panel per ρ.

    Args:
        every: Rounds between two points.
    """

    every: int = 5

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        at = tuple(range(0, self.rounds + 1, self.every))
        points = []
        outcomes = solve_all([self.job(rho, profiles=at) for rho in self.rhos], jobs)
        for rho, outcome in zip(self.rhos, outcomes, strict=True):
            for round_idx, values in outcome.profiles.items():
                points += self.by_seed(f"profile, rho {rho:g}", "h", round_idx, values)
        return points


@dataclass(frozen=True, kw_only=True)
class Figure2(KernelFigure):
    """FedFrozen's final loss over FedAvg's by E; final loss by warm-up; final loss of four methods by ρ.

    Args:
        warmup: T_warm / T of panels a and c.
        warmups: T_warm / T of panel b.
        steps: Local steps E of panel a.
        rho: ρ of panels a and b.
        mu: FedProx's μ in panel c.
    """

    warmup: float = 0.25
    warmups: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    steps: tuple[int, ...] = (1, 5, 10, 20, 40)
    rho: float = 1.0
    mu: float = 200.0

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        work, warm = self.work, self.round_of(self.warmup)
        warms = tuple(sorted({self.round_of(fraction) for fraction in self.warmups}))
        ladder = [self.job(self.rho, replace(work, local_steps=steps), warmups=(warm,)) for steps in self.steps]
        trade = self.job(self.rho, warmups=warms)
        kinds = {"FedAvg": work, "FedProx": replace(work, mu=self.mu), "SCAFFOLD": replace(work, control=True)}
        grid = [(rho, name) for rho in self.rhos for name in kinds]
        methods = [self.job(rho, kinds[name], warmups=(warm,) if name == "FedAvg" else ()) for rho, name in grid]
        outcomes = solve_all([*ladder, trade, *methods], jobs)
        points = []
        for steps, outcome in zip(self.steps, outcomes[: len(ladder)], strict=True):
            ratios = [ours / theirs for ours, theirs in zip(outcome.frozen[warm], outcome.loss, strict=True)]
            points += self.by_seed("loss ratio by E", "FedFrozen/FedAvg", steps, ratios)
        for fraction in self.warmups:
            losses = outcomes[len(ladder)].frozen[self.round_of(fraction)]
            points += self.by_seed("loss by warm-up", "FedFrozen", fraction, losses)
        for (rho, name), outcome in zip(grid, outcomes[len(ladder) + 1 :], strict=True):
            points += self.by_seed("loss by rho", name, rho, outcome.loss)
            if name == "FedAvg":
                points += self.by_seed("loss by rho", "FedFrozen", rho, outcome.frozen[warm])
        return points


@dataclass(frozen=True, kw_only=True)
class Figure3(KernelFigure):
    """Final loss by warm-up and ρ; final loss and drift by the ridge on the value block.

    Args:
        warmup: T_warm / T of panel b.
        warmups: T_warm / T of panel a.
        rho: ρ of panel b.
        ridges: λ of panel b.
    """

    warmup: float = 0.25
    warmups: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    rho: float = 1.0
    ridges: tuple[float, ...] = (0.0, 0.1, 1.0, 10.0, 100.0)

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        warm = self.round_of(self.warmup)
        warms = tuple(sorted({self.round_of(fraction) for fraction in self.warmups}))
        grid = [self.job(rho, warmups=warms, whole=False) for rho in self.rhos]
        works = [replace(self.work, ridge=ridge) for ridge in self.ridges]
        ridges = [self.job(self.rho, work, warmups=(warm,), whole=False) for work in works]
        outcomes = solve_all([*grid, *ridges], jobs)
        points = []
        for rho, outcome in zip(self.rhos, outcomes, strict=False):
            for fraction in self.warmups:
                losses = outcome.frozen[self.round_of(fraction)]
                points += self.by_seed("loss by warm-up and rho", f"rho {rho:g}", fraction, losses)
        for ridge, outcome in zip(self.ridges, outcomes[len(self.rhos) :], strict=True):
            points += self.by_seed("loss by ridge", "FedFrozen", ridge, outcome.frozen[warm])
            points += self.by_seed("drift by ridge", "FedFrozen", ridge, outcome.drift[warm])
        return points
