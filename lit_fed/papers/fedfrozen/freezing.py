r"""What freezing at a round costs, and what phase 2 gives back: the two sides of FedFrozen's Proposition 1.

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

from lit_fed.papers.fedfrozen.descent import Work, fix_kernel, profile, train, train_values
from lit_fed.papers.fedfrozen.linear_attention import Clients, draw
from lit_fed.papers.fedfrozen.panels import KernelFigure, RoundsJob
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Point


class Freezing(NamedTuple):
    """What it means to freeze the kernel at a round, by seed (S,); infinite where the weights are not finite.

    Args:
        profile: h_λ(Φ^τ), the best loss that the kernel allows.
        residual: R_τ, what the value block is behind it.
        distance: ‖e_τ‖, how far the value block is from the kernel's best.
        left: What phase 2 leaves of the residual, f_λ(w_{τ,T}) − h_λ(Φ^τ).
    """

    profile: Tensor
    residual: Tensor
    distance: Tensor
    left: Tensor


def freeze(clients: Clients, work: Work, weights: Tensor, rounds: int) -> Freezing:
    """Freeze the kernel and let phase 2 run to the end.

    Args:
        clients: The data.
        work: How clients work.
        weights: (Φ^τ, θ^τ) as (S, d, 2·d_k + d_v).
        rounds: Rounds that are left, T − τ.
    """
    finite = torch.isfinite(weights).all((1, 2))
    weights = torch.where(finite[:, None, None], weights, 0.0)
    problem, split = fix_kernel(clients, weights), 2 * clients.task.key_dim
    best, begin = problem.best(work.ridge), weights[..., split:].double()
    end = train_values(clients, work, weights, rounds).weights[rounds][..., split:].double()
    lowest = problem.loss(best, work.ridge)
    found = Freezing(
        lowest,
        problem.loss(begin, work.ridge) - lowest,
        (begin - best).flatten(1).norm(dim=1),
        problem.loss(end, work.ridge) - lowest,
    )
    return Freezing(*(torch.where(finite & value.isfinite(), value, torch.inf) for value in found))


class MeasuredRounds(NamedTuple):
    """What a federation's rounds gave, by seed (S,).

    Args:
        best: The estimate of f*.
        at: Freezing, by round.
    """

    best: Tensor
    at: dict[int, Freezing]


def measure(job: RoundsJob) -> MeasuredRounds:
    """Freeze at every round that a job names."""
    torch.set_num_threads(1)  # as for the figures
    clients = draw(job.task, job.rho, list(job.seeds))
    path = train(clients, job.work, max(job.warmups), job.warmups)
    found = {at: freeze(clients, job.work, path.weights[at], job.rounds - at) for at in job.warmups}
    return MeasuredRounds(least_loss(clients, job.work.ridge, found), found)


def least_loss(clients: Clients, ridge: float, found: dict[int, Freezing]) -> Tensor:
    r"""An estimate of :math:`f^\star_\lambda = \min_{\Phi,\theta} f_\lambda(\Phi, \theta)` (S,), from above.

    The least of h_λ at the kernel that made the labels and at those that the rounds went through. The minimum itself is
    not known: the problem is not convex in Φ.
    """
    return torch.stack([profile(clients, clients.teacher, ridge), *(one.profile for one in found.values())]).amin(0)


@dataclass(frozen=True, kw_only=True)
class Proposition1(KernelFigure):
    """Both sides of Proposition 1 by the freezing round τ, a line for each ρ.

    Panels: the freezing bias B_τ, the residual R_τ and what phase 2 leaves of it, the distance ‖e_τ‖, the right side
    B_τ + ρ_λ^(T−τ)·R_τ (``bound``) and the left side f_λ(w_{τ,T}) − f* (``excess``); by ρ the τ/T at which each side is
    least (the oracle's warm-up, Eq. 18, and the best one), and the loss at the former over that at the latter.

    Args:
        every: Rounds between two candidates τ, from 0 to below T.

    Note:
        λ is the simulation's in the place of the theory's λ₀ = 6C/(7B_θ), whose constants are not given; Eq. 79 and 86
        have the same inequality for any λ. The additive constant is left out of the bound. f* is estimated from above
        (`least_loss`), and with it B_τ from below.
    """

    every: int = 10

    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        """The quantities by round, and where each side is least, by ρ."""
        at = tuple(range(0, self.rounds, self.every))
        asked = [self.job(rho, warmups=at) for rho in self.rhos]
        points: list[Point] = []
        for rho, measured in zip(self.rhos, jobs.run(measure, asked, (MeasuredRounds, Freezing)), strict=True):
            bounds, excesses = [], []
            for tau, one in measured.at.items():
                bias = one.profile - measured.best
                bounds.append(bias + self.contraction ** (self.rounds - tau) * one.residual)
                excesses.append(bias + one.left)
                add = partial(self._add, points, f"rho {rho:g}", tau)
                add("freezing bias by round", bias)
                add("residual by round", one.residual)
                add("residual after phase 2 by round", one.left)
                add("distance of the values by round", one.distance)
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
        """What Corollary 2 leaves of the residual after a round of phase 2, ρ_λ = 1 − ¾·λ·η·E."""
        return 1 - 0.75 * self.ridge * self.lr * self.local_steps

    def dress(self, axes: Any, panel: str) -> None:
        """Logarithmic axes but for the warm-up."""
        super().dress(axes, panel)
        if panel != "best warm-up by rho":
            axes.set_yscale("log")
