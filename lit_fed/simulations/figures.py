"""Figures 1 to 3 of FedFrozen from simulations, as rows of numbers and as pictures.

A figure is a list of jobs, each a federation's rounds for all seeds together. A run with everything trained serves
every length of warm-up at once: its kernels are kept, and phase 2 starts from each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from lit_fed.errors import ConfigError
from lit_fed.simulations.attention import Task, draw
from lit_fed.simulations.rounds import Work, profile, train, train_values

LAST = 50  # rounds at the end over which the drift is averaged, as in Figure 3


@dataclass(frozen=True)
class Settings:
    """What a figure's file says.

    Args:
        figure: ``figure1``, ``figure2`` or ``figure3``.
        task: The task's settings, see `Task`.
        seeds: How many seeds, from 0 on.
        rounds: T.
        local_steps: E.
        lr: η.
        ridge: λ.
        rhos: Heterogeneities ρ: the panels of Figure 1, the lines of numbers of Figures 2c and 3a.
        warmup: T_warm / T of FedFrozen in Figures 2a, 2c and 3b.
        every: Rounds between two points of Figure 1.
        steps: Local steps E of Figure 2a.
        rho: ρ of Figures 2a, 2b and 3b.
        warmups: T_warm / T of Figures 2b and 3a.
        mu: FedProx's μ in Figure 2c.
        ridges: λ of Figure 3b.
        claims: What the paper says about the figure, see `lit_fed.simulations.claims`.
    """

    figure: str
    task: dict[str, Any] = field(default_factory=dict)
    seeds: int = 10
    rounds: int = 200
    local_steps: int = 20
    lr: float = 1e-3
    ridge: float = 1e-3
    rhos: Sequence[float] = (0.0, 1.0, 2.0)
    warmup: float = 0.25
    every: int = 5
    steps: Sequence[int] = (1, 5, 10, 20, 40)
    rho: float = 1.0
    warmups: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    mu: float = 200.0
    ridges: Sequence[float] = (0.0, 0.1, 1.0, 10.0, 100.0)
    claims: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Check what would fail late."""
        if self.figure not in FIGURES:
            raise ConfigError(f"simulate.figure is {self.figure!r}; choose one of {', '.join(FIGURES)}")
        for key in ("seeds", "rounds", "local_steps", "every"):
            if getattr(self, key) < 1:
                raise ConfigError(f"simulate.{key} is {getattr(self, key)}; it must be at least 1")
        for fraction in (self.warmup, *self.warmups):
            if not 0 <= fraction <= 1:
                raise ConfigError(f"simulate.warmups: {fraction} is no fraction of the rounds; give 0 to 1")
        Task(**self.task)

    @property
    def work(self) -> Work:
        """How clients work unless a panel changes it."""
        return Work(lr=self.lr, local_steps=self.local_steps, ridge=self.ridge)

    def round_of(self, fraction: float) -> int:
        """A fraction of the rounds as a round."""
        return round(fraction * self.rounds)


@dataclass(frozen=True)
class Job:
    """One federation's rounds, for all seeds.

    Args:
        task: The task.
        rho: ρ.
        seeds: How many.
        work: How clients work.
        rounds: T.
        profiles: Rounds at which h is computed.
        warmups: Rounds from which phase 2 is run to the end.
        whole: Whether rounds after the last of those matter.
    """

    task: Task
    rho: float
    seeds: int
    work: Work
    rounds: int
    profiles: tuple[int, ...] = ()
    warmups: tuple[int, ...] = ()
    whole: bool = True


class Outcome(NamedTuple):
    """What a job gave, by seed.

    Args:
        profiles: h by round.
        loss: The final global loss with everything trained to the end; empty where that was not asked for.
        frozen: The final global loss by warm-up.
        drift: The clients' mean distance over the last rounds of phase 2, by warm-up.
    """

    profiles: dict[int, list[float]]
    loss: list[float]
    frozen: dict[int, list[float]]
    drift: dict[int, list[float]]


def solve(job: Job) -> Outcome:
    """Run a job."""
    torch.set_num_threads(1)  # jobs run side by side, and their matrices are small
    federation = draw(job.task, job.rho, list(range(job.seeds)))
    keep = sorted({*job.profiles, *job.warmups})
    rounds = job.rounds if job.whole else max(keep)
    path = train(federation, job.work, rounds, keep)
    profiles = {at: profile(federation, path.weights[at], job.work.ridge).tolist() for at in job.profiles}
    frozen, drift = {}, {}
    plain = replace(job.work, mu=0.0, control=False)
    for at in job.warmups:
        if at < job.rounds:
            second = train_values(federation, plain, path.weights[at], job.rounds - at)
            drifts = path.drifts[:at] + second.drifts
            frozen[at] = second.loss.tolist()
        else:
            drifts, frozen[at] = path.drifts, path.loss.tolist()
        drift[at] = torch.stack([one.double() for one in drifts[-LAST:]]).mean(0).tolist()
    return Outcome(profiles, path.loss.tolist() if job.whole else [], frozen, drift)


def solve_all(jobs: Sequence[Job], processes: int) -> list[Outcome]:
    """Run jobs side by side; those that differ only in what they are asked for run once."""
    asked: dict[Job, list[Job]] = {}
    for job in jobs:
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
    if processes < 2 or len(together) < 2:
        outcomes = [solve(job) for job in together]
    else:
        with ProcessPoolExecutor(min(processes, len(together)), mp_context=get_context("spawn")) as pool:
            outcomes = list(pool.map(solve, together))
    found = dict(zip(asked, outcomes, strict=True))
    return [found[replace(job, profiles=(), warmups=(), whole=True)] for job in jobs]


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


def _points(panel: str, line: str, x: float, values: Sequence[float]) -> list[Point]:
    return [Point(panel, line, x, seed, value) for seed, value in enumerate(values)]


def figure1(settings: Settings, processes: int = 1) -> list[Point]:
    """The profile objective h_λ(Φ_t) during the warm-up, a panel for each ρ."""
    at = tuple(range(0, settings.rounds + 1, settings.every))
    task = Task(**settings.task)
    jobs = [Job(task, rho, settings.seeds, settings.work, settings.rounds, profiles=at) for rho in settings.rhos]
    points = []
    for rho, outcome in zip(settings.rhos, solve_all(jobs, processes), strict=True):
        for round_idx, values in outcome.profiles.items():
            points += _points(f"profile, rho {rho:g}", "h", round_idx, values)
    return points


def figure2(settings: Settings, processes: int = 1) -> list[Point]:
    """FedFrozen's final loss over FedAvg's by E; final loss by warm-up; final loss of four methods by ρ."""
    task, work, warm = Task(**settings.task), settings.work, settings.round_of(settings.warmup)
    warms = tuple(sorted({settings.round_of(fraction) for fraction in settings.warmups}))

    def job(rho: float, work: Work, warmups: tuple[int, ...]) -> Job:
        return Job(task, rho, settings.seeds, work, settings.rounds, warmups=warmups)

    ladder = [job(settings.rho, replace(work, local_steps=steps), (warm,)) for steps in settings.steps]
    trade = [job(settings.rho, work, warms)]
    kinds = {"FedAvg": work, "FedProx": replace(work, mu=settings.mu), "SCAFFOLD": replace(work, control=True)}
    grid = [(rho, name) for rho in settings.rhos for name in kinds]
    methods = [job(rho, kinds[name], (warm,) if name == "FedAvg" else ()) for rho, name in grid]
    outcomes = solve_all([*ladder, *trade, *methods], processes)
    points = []
    for steps, outcome in zip(settings.steps, outcomes[: len(ladder)], strict=True):
        ratios = [ours / theirs for ours, theirs in zip(outcome.frozen[warm], outcome.loss, strict=True)]
        points += _points("loss ratio by E", "FedFrozen/FedAvg", steps, ratios)
    for fraction in settings.warmups:
        losses = outcomes[len(ladder)].frozen[settings.round_of(fraction)]
        points += _points("loss by warm-up", "FedFrozen", fraction, losses)
    for (rho, name), outcome in zip(grid, outcomes[len(ladder) + 1 :], strict=True):
        points += _points("loss by rho", name, rho, outcome.loss)
        if name == "FedAvg":
            points += _points("loss by rho", "FedFrozen", rho, outcome.frozen[warm])
    return points


def figure3(settings: Settings, processes: int = 1) -> list[Point]:
    """Final loss by warm-up and ρ; final loss and drift by the ridge on the value block."""
    task, work, warm = Task(**settings.task), settings.work, settings.round_of(settings.warmup)
    warms = tuple(sorted({settings.round_of(fraction) for fraction in settings.warmups}))
    jobs = [Job(task, rho, settings.seeds, work, settings.rounds, warmups=warms, whole=False) for rho in settings.rhos]
    for ridge in settings.ridges:
        work = replace(work, ridge=ridge)
        jobs.append(Job(task, settings.rho, settings.seeds, work, settings.rounds, warmups=(warm,), whole=False))
    outcomes = solve_all(jobs, processes)
    points = []
    for rho, outcome in zip(settings.rhos, outcomes, strict=False):
        for fraction in settings.warmups:
            losses = outcome.frozen[settings.round_of(fraction)]
            points += _points("loss by warm-up and rho", f"rho {rho:g}", fraction, losses)
    for ridge, outcome in zip(settings.ridges, outcomes[len(settings.rhos) :], strict=True):
        points += _points("loss by ridge", "FedFrozen", ridge, outcome.frozen[warm])
        points += _points("drift by ridge", "FedFrozen", ridge, outcome.drift[warm])
    return points


FIGURES: dict[str, Callable[[Settings, int], list[Point]]] = {
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
}
"""Figures by the names that files call them."""
