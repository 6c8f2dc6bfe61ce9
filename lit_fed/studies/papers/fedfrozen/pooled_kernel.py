"""Why the ratio of Figure 2a rises with E (ours): the effect of local steps on FedAvg and on the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from typing_extensions import override

from lit_fed.studies.papers.fedfrozen.panels import KernelFigure, RoundsJob, solve_all
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Point


@dataclass(frozen=True, kw_only=True)
class PooledKernel(KernelFigure):
    """FedAvg's final loss by E, and the lowest loss that FedFrozen can reach: h of the kernel at the freezing round.

    For comparison, h of a kernel after equally many steps of gradient descent on the pooled data, without drift.

    Args:
        warmup: T_warm / T.
        steps: Local steps E.
        rho: ρ.
    """

    warmup: float = 0.75
    steps: tuple[int, ...] = (10, 20, 40)
    rho: float = 1.0

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        return list(self._points(jobs))

    def _points(self, jobs: Jobs) -> Iterator[Point]:
        warm = self.round_of(self.warmup)
        local = [replace(self.work, local_steps=steps) for steps in self.steps]
        federated = [self.job(self.rho, work, profiles=(warm,)) for work in local]
        alone = replace(self.work, local_steps=1)  # the mean of single steps is a step on all data
        in_all = [warm * steps for steps in self.steps]
        pooled = [RoundsJob(self.task, self.rho, self.every_seed, alone, n, profiles=(n,), whole=False) for n in in_all]
        outcomes = solve_all([*federated, *pooled], jobs)
        for idx, steps in enumerate(self.steps):
            ours, best = outcomes[idx], outcomes[len(self.steps) + idx]
            yield from self.by_seed("loss by E", "FedAvg", steps, ours.loss)
            yield from self.by_seed("loss by E", "kernel", steps, ours.profiles[warm])
            yield from self.by_seed("loss by E", "pooled", steps, best.profiles[in_all[idx]])
