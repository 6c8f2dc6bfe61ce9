r"""Why a ridge does not lower the drift in Figure 3b: what it does where clients reach their own optimum.

Under a fixed kernel the clients' losses are quadratics (`Quadratic`), so the rounds of phase 2 come to rest at a server
model that can be written down. With :math:`\theta_k = (G_k + \lambda I)^{-1} B_k` a client's own optimum and
:math:`P_k = I - \eta (G_k + \lambda I)`,

.. math:: \theta = \tfrac1K \sum_k P_k^E\,\theta + (I - P_k^E)\,\theta_k,

and where E grows without end :math:`\theta = \tfrac1K \sum_k \theta_k`. Ours, not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_fed.papers.fedfrozen.descent import Quadratic, fix_kernel, ridge_solution, train
from lit_fed.papers.fedfrozen.linear_attention import draw
from lit_fed.papers.fedfrozen.panels import KernelFigure, RoundsJob
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Point


class Rest(NamedTuple):
    """Phase 2 at rest, by seed (S,).

    Args:
        drift: The clients' mean distance from the server's values, which they began with.
        loss: The global loss f of those values, without the ridge.
    """

    drift: Tensor
    loss: Tensor


def at_rest(problem: Quadratic, lr: float, local_steps: int | None, ridge: float) -> Rest:
    """Where phase 2 ends.

    Args:
        problem: The clients' losses.
        lr: η.
        local_steps: E; None for as many as it takes to reach the clients' own optima.
        ridge: λ.
    """
    one = torch.eye(problem.gram.shape[-1], dtype=problem.gram.dtype)
    optima = ridge_solution(problem.gram, problem.cross, ridge)
    if local_steps is None:
        server, local = optima.mean(1), optima
    else:
        kept = torch.linalg.matrix_power(one - lr * (problem.gram + ridge * one), local_steps)
        moved = (one - kept) @ optima
        server = torch.linalg.solve(one - kept.mean(1), moved.mean(1))
        local = kept @ server.unsqueeze(1) + moved
    drift = (local - server.unsqueeze(1)).flatten(2).norm(dim=2).mean(1)
    return Rest(drift, problem.loss(server))


class MeasuredAtRest(NamedTuple):
    """Phase 2 at rest by ridge.

    Args:
        few: After the simulation's local steps.
        solved: At the clients' own optima.
    """

    few: list[Rest]
    solved: list[Rest]


@dataclass(frozen=True)
class RestJob:
    """A warm-up, and what to do with the kernel that it leaves.

    Args:
        warmup: Whose last ``warmups`` is the freezing round.
        ridges: λ in phase 2.
    """

    warmup: RoundsJob
    ridges: tuple[float, ...]


def measure(job: RestJob) -> MeasuredAtRest:
    """Train up to the freezing round, and see where phase 2 ends under each ridge."""
    torch.set_num_threads(1)  # as for the figures
    warmup, work, freezing = job.warmup, job.warmup.work, job.warmup.warmups[-1]
    clients = draw(warmup.task, warmup.rho, list(warmup.seeds))
    problem = fix_kernel(clients, train(clients, work, freezing).weights[freezing])
    few = [at_rest(problem, work.lr, work.local_steps, ridge) for ridge in job.ridges]
    return MeasuredAtRest(few, [at_rest(problem, work.lr, None, ridge) for ridge in job.ridges])


@dataclass(frozen=True, kw_only=True)
class LocalOptima(KernelFigure):
    """Drift and loss of phase 2 at rest by the ridge, after E local steps and at the clients' own optima.

    Args:
        warmup: T_warm / T.
        rho: ρ.
        ridges: λ in phase 2; the warm-up has ``ridge``.
    """

    warmup: float = 0.75
    rho: float = 1.0
    ridges: tuple[float, ...] = (0.0, 0.1, 1.0, 10.0, 100.0)

    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        """Drifts and losses, a line for each length of local work."""
        asked = RestJob(self.job(self.rho, warmups=(self.round_of(self.warmup),)), self.ridges)
        (measured,) = jobs.run(measure, [asked], (MeasuredAtRest, Rest))
        points: list[Point] = []
        for line, rests in measured._asdict().items():
            for ridge, rest in zip(self.ridges, rests, strict=True):
                points += self.by_seed("drift at rest by ridge", line, ridge, rest.drift.tolist())
                points += self.by_seed("loss at rest by ridge", f"loss {line}", ridge, rest.loss.tolist())
        return points
