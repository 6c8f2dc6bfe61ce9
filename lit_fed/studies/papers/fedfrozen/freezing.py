r"""The cost of freezing at a round, and the gain of phase 2: the two sides of FedFrozen's Proposition 1.

Du, Li, Feng, Feng: "FedFrozen: Two-Stage Federated Optimization via Attention Kernel Freezing", 2026, Theorems 1 and 2,
Proposition 1 and Eq. 16 to 18. For a candidate freezing round τ, with :math:`h_\lambda(\Phi) = \min_\theta
f_\lambda(\Phi, \theta)` solved exactly:

.. math::
    B_\tau = h_\lambda(\Phi^\tau) - f_\lambda^\star, \qquad
    R_\tau = f_\lambda(\Phi^\tau, \theta^\tau) - h_\lambda(\Phi^\tau), \qquad
    \lVert e_\tau \rVert = \lVert \theta^\tau - \theta^\star_\lambda(\Phi^\tau) \rVert_F

    f_\lambda(w_{\tau,T}) - f_\lambda^\star \le B_\tau + \rho_\lambda^{T-\tau} R_\tau + \text{const}, \qquad
    \rho_\lambda = 1 - \tfrac34 \lambda\eta E, \qquad
    T^{or}_{warm} = \arg\min_\tau B_\tau + \rho_\lambda^{T-\tau} R_\tau .
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.studies.papers.fedfrozen.descent import Work, fix_kernel, profile, train, train_values
from lit_fed.studies.papers.fedfrozen.linear_attention import Clients, draw
from lit_fed.studies.papers.fedfrozen.panels import KernelFigure, RoundsJob
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Point


class Freezing(NamedTuple):
    """The effect of freezing the kernel at a round, by seed (S,); infinite for weights that are not finite.

    Args:
        profile: h_λ(Φ^τ), the lowest loss that the kernel allows.
        residual: R_τ, the excess loss of the value block.
        distance: ‖e_τ‖, the distance of the value block from the kernel's optimum.
        left: The residual after phase 2, f_λ(w_{τ,T}) − h_λ(Φ^τ).
    """

    profile: Tensor
    residual: Tensor
    distance: Tensor
    left: Tensor


def freeze(clients: Clients, work: Work, weights: Tensor, rounds: int) -> Freezing:
    """Freeze the kernel, and run phase 2 to the end.

    Args:
        clients: The data.
        work: The local work.
        weights: (Φ^τ, θ^τ) as (S, d, 2·d_k + d_v).
        rounds: Remaining rounds, T − τ.
    """
    finite = torch.isfinite(weights).all((1, 2))
    weights = torch.where(finite[:, None, None], weights, 0.0)
    problem, split = fix_kernel(clients, weights), 2 * clients.task.key_dim
    best, begin = problem.best(work.ridge), weights[..., split:].double()
    end = train_values(clients, work, weights, rounds).weights[rounds][..., split:].double()
    lowest = problem.loss(best, work.ridge)
    values = Freezing(
        lowest,
        problem.loss(begin, work.ridge) - lowest,
        (begin - best).flatten(1).norm(dim=1),
        problem.loss(end, work.ridge) - lowest,
    )
    return Freezing(*(torch.where(finite & value.isfinite(), value, torch.inf) for value in values))


class MeasuredRounds(NamedTuple):
    """The measurements of a federation, by seed (S,).

    Args:
        best: The estimate of f*.
        at: Freezing, by round.
    """

    best: Tensor
    at: dict[int, Freezing]


def measure(job: RoundsJob) -> MeasuredRounds:
    """Freeze at every round that a job names."""
    torch.set_num_threads(1)  # as in the figures
    clients = draw(job.task, job.rho, list(job.seeds))
    path = train(clients, job.work, max(job.warmups), job.warmups)
    freezings = {at: freeze(clients, job.work, path.weights[at], job.rounds - at) for at in job.warmups}
    return MeasuredRounds(least_loss(clients, job.work.ridge, freezings), freezings)


def least_loss(clients: Clients, ridge: float, found: dict[int, Freezing]) -> Tensor:
    r"""Return an upper estimate of :math:`f^\star_\lambda = \min_{\Phi,\theta} f_\lambda(\Phi, \theta)` (S,).

    The estimate is the minimum of h_λ over the teacher's kernel and the kernels of the run. The exact minimum is
    unknown, because the problem is not convex in Φ.
    """
    return torch.stack(
        [profile(clients, clients.teacher, ridge), *(freezing.profile for freezing in found.values())]
    ).amin(0)


@dataclass(frozen=True, kw_only=True)
class Proposition1(KernelFigure):
    """Both sides of Proposition 1 by the freezing round τ, a line per ρ.

    Panels: the freezing bias B_τ, the residual R_τ and the residual after phase 2, the distance ‖e_τ‖, the right side
    B_τ + ρ_λ^(T−τ)·R_τ (``bound``) and the left side f_λ(w_{τ,T}) − f* (``excess``); by ρ, the τ/T that minimises each
    side (the oracle's warm-up, Eq. 18, and the best one), and the ratio of the losses at these two.

    Args:
        every: Rounds between two candidates τ, from 0 to below T.

    Note:
        λ is the simulation's, not the theory's λ₀ = 6C/(7B_θ), whose constants are not given; Eq. 79 and 86 have the
        same inequality for any λ. The bound omits the additive constant. f* is estimated from above (`least_loss`), and
        therefore B_τ from below.
    """

    every: int = 10

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        at = tuple(range(0, self.rounds, self.every))
        asked = [self.job(rho, warmups=at) for rho in self.rhos]
        points: list[Point] = []
        for rho, measured in zip(self.rhos, jobs.run(measure, asked, (MeasuredRounds, Freezing)), strict=True):
            bounds, excesses = [], []
            for tau, freezing in measured.at.items():
                bias = freezing.profile - measured.best
                bounds.append(bias + self.contraction ** (self.rounds - tau) * freezing.residual)
                excesses.append(bias + freezing.left)
                add = partial(self._add, points, f"rho {rho:g}", tau)
                add("freezing bias by round", bias)
                add("residual by round", freezing.residual)
                add("residual after phase 2 by round", freezing.left)
                add("distance of the values by round", freezing.distance)
                add("bound by round", bounds[-1])
                add("excess by round", excesses[-1])
            bound, excess = torch.stack(bounds), torch.stack(excesses)
            fractions = torch.tensor(at, dtype=torch.float64) / self.rounds
            oracle, best = bound.argmin(0), excess.argmin(0)
            lost = excess.gather(0, oracle[None])[0] / excess.gather(0, best[None])[0]
            self._add(points, "bound", rho, "best warm-up by rho", fractions[oracle])
            self._add(points, "run", rho, "best warm-up by rho", fractions[best])
            self._add(points, "bound", rho, "loss over the best by rho", lost)
        return points

    def _add(self, points: list[Point], line: str, x: float, panel: str, values: Tensor) -> None:
        points += self.by_seed(panel, line, x, values.tolist())

    @property
    def contraction(self) -> float:
        """Corollary 2's factor of the residual per round of phase 2, ρ_λ = 1 − ¾·λ·η·E."""
        return 1 - 0.75 * self.ridge * self.lr * self.local_steps

    @override
    def dress(self, axes: Any, panel: str) -> None:
        super().dress(axes, panel)
        if panel != "best warm-up by rho":
            axes.set_yscale("log")
