r"""Why a ridge does not lower the drift in Figure 3b: its effect when clients reach their local optima.

Under a fixed kernel the clients' losses are quadratic (`Quadratic`), so that phase 2 converges to a server model in
closed form. With a client's local optimum :math:`\theta_k = (G_k + \lambda I)^{-1} B_k` and
:math:`P_k = I - \eta (G_k + \lambda I)`,

.. math:: \theta = \tfrac1K \sum_k P_k^E\,\theta + (I - P_k^E)\,\theta_k,

and for :math:`E \to \infty`, :math:`\theta = \tfrac1K \sum_k \theta_k`. This analysis is ours, not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.studies.papers.fedfrozen.descent import Quadratic, fix_kernel, ridge_solution, train
from lit_fed.studies.papers.fedfrozen.linear_attention import draw
from lit_fed.studies.papers.fedfrozen.panels import KernelFigure, RoundsJob
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Point


class Rest(NamedTuple):
    """The limit of phase 2, by seed (S,).

    Args:
        drift: The clients' mean distance from the server's values, with which they begin.
        loss: The global loss f of the server's values, without the ridge.
    """

    drift: Tensor
    loss: Tensor


def at_rest(problem: Quadratic, lr: float, local_steps: int | None, ridge: float) -> Rest:
    """Return the limit of phase 2.

    Args:
        problem: The clients' losses.
        lr: η.
        local_steps: E; None for infinitely many, which reach the local optima.
        ridge: λ.
    """
    identity = torch.eye(problem.gram.shape[-1], dtype=problem.gram.dtype)
    optima = ridge_solution(problem.gram, problem.cross, ridge)
    if local_steps is None:
        server, local = optima.mean(1), optima
    else:
        kept = torch.linalg.matrix_power(identity - lr * (problem.gram + ridge * identity), local_steps)
        moved = (identity - kept) @ optima
        server = torch.linalg.solve(identity - kept.mean(1), moved.mean(1))
        local = kept @ server.unsqueeze(1) + moved
    drift = (local - server.unsqueeze(1)).flatten(2).norm(dim=2).mean(1)
    return Rest(drift, problem.loss(server))


class MeasuredAtRest(NamedTuple):
    """The limits of phase 2 by ridge.

    Args:
        few: With the simulation's local steps.
        solved: With infinitely many local steps.
    """

    few: list[Rest]
    solved: list[Rest]


@dataclass(frozen=True)
class RestJob:
    """A warm-up, and the ridges of phase 2.

    Args:
        warmup: The warm-up, whose last ``warmups`` is the freezing round.
        ridges: λ in phase 2.
    """

    warmup: RoundsJob
    ridges: tuple[float, ...]


def measure(job: RestJob) -> MeasuredAtRest:
    """Train up to the freezing round, and compute the limit of phase 2 for each ridge."""
    torch.set_num_threads(1)  # as in the figures
    warmup, work, freezing = job.warmup, job.warmup.work, job.warmup.warmups[-1]
    clients = draw(warmup.task, warmup.rho, list(warmup.seeds))
    problem = fix_kernel(clients, train(clients, work, freezing).weights[freezing])
    few = [at_rest(problem, work.lr, work.local_steps, ridge) for ridge in job.ridges]
    return MeasuredAtRest(few, [at_rest(problem, work.lr, None, ridge) for ridge in job.ridges])


@dataclass(frozen=True, kw_only=True)
class LocalOptima(KernelFigure):
    """Drift and loss in the limit of phase 2 by the ridge, with E and with infinitely many local steps.

    Args:
        warmup: T_warm / T.
        rho: ρ.
        ridges: λ in phase 2; the warm-up uses ``ridge``.
    """

    warmup: float = 0.75
    rho: float = 1.0
    ridges: tuple[float, ...] = (0.0, 0.1, 1.0, 10.0, 100.0)

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        asked = RestJob(self.job(self.rho, warmups=(self.round_of(self.warmup),)), self.ridges)
        (measured,) = jobs.run(measure, [asked], (MeasuredAtRest, Rest))
        points: list[Point] = []
        for line, rests in measured._asdict().items():
            for ridge, rest in zip(self.ridges, rests, strict=True):
                points += self.by_seed("drift at rest by ridge", line, ridge, rest.drift.tolist())
                points += self.by_seed("loss at rest by ridge", f"loss {line}", ridge, rest.loss.tolist())
        return points
