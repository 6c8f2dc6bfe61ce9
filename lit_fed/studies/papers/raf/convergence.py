r"""RAF's Propositions 1 to 3 and Theorem 1: the rate of its last layer over frozen features, beside the bound.

Lim, Lee, Lee, Cho: "Mitigating Resolution-Drift in Federated Learning: Case of Keypoint Detection", 2025, section IV-C.
Client k has features :math:`\psi^{(i)}` (d, :math:`h_i`) of each sample at resolution i, and trains w (d,) on

.. math::
    \mathcal{L}_k(w) = \frac1{n_k} \sum_j \lVert \psi^{(0)\top} w - T \rVert^2
    + \alpha \sum_{i \ge 1} \frac1{n_k} \sum_j \lVert \psi^{(i-1)\top} w_t - U \psi^{(i)\top} w \rVert^2
    + \frac\gamma2 \lVert w \rVert^2 .

With :math:`B = \psi^{(i-1)\top}` and :math:`A = U \psi^{(i)\top}`, its stochastic gradient at :math:`w = w_t` is linear
in w, with the matrix :math:`2 \psi^{(0)} \psi^{(0)\top} + 2\alpha \sum A^\top (A - B) + \gamma I`. Where the teacher
has a gradient, too, it is :math:`2 \psi^{(0)} \psi^{(0)\top} + 2\alpha \sum (A - B)^\top (A - B) + \gamma I`, the
Hessian of a convex objective F. To F the theorem applies that the paper cites (Li et al., "On the Convergence of FedAvg
on Non-IID Data", ICLR 2020, Theorem 3, K of N clients drawn without replacement): with :math:`\eta_t = 2/(\mu(g + t))`
and :math:`g = \max(8L/\mu, E)`,

.. math::
    E[F(w_T)] - F^\star \le \frac{L}{\mu (g + T - 1)} \Big(\frac{2 (B + C)}{\mu} + \frac{\mu g}{2}
    \lVert w_1 - w^\star \rVert^2 \Big), \quad B = \frac{\bar\sigma^2}{N} + 6 L \Gamma + 8 (E - 1)^2 G^2, \quad
    C = \frac{N - K}{N - 1} \frac{4 E^2 G^2}{K} .

Rows for the grammar of `lit_fed.studies.file.claims`, with columns ``rate=1``, ``rate=0.5``, …:

==============================  =================================================================================
panel                           rows
==============================  =================================================================================
gap by step                     gap, gap_bound (curves); gap_slack: the least bound over gap
distance by step                distance (a curve): of RAF's own w, squared, to where its mean gradient is zero
propositions by rate            smooth: Proposition 1's L over the largest eigenvalue; convex: the least eigenvalue of
                                Eq. 12's Hessian over γ; bounded: Proposition 3's C over the run's largest gradient
equations by rate               eq_13, eq_14: by how much :math:`\bar{\mathcal{L}}` (Eqs. 10 to 12) and its gradient
                                differ from those of :math:`\mathcal{L}`, as parts of these; biased: by how much F at
                                RAF's own point is above its least value, as a part of it
power by rate                   power: the slope of the gap's logarithm over T's, after ten rounds
==============================  =================================================================================

Values are natural logarithms, but for the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.studies.simulations.jobs import ALONE, Jobs
from lit_fed.studies.simulations.simulation import Curves, Point, Simulation, Values, readings_of

_CURVES = {"gap by step": "gap", "distance by step": "distance"}
_LEAST = 1e-12  # stands for a ratio that is not positive, whose logarithm would not exist
_UP = 2**0.5  # the spectral norm of U, which repeats every pixel of a line


class Heads(NamedTuple):
    """Every sample's least squares: the gradient of F is ``full @ w - pull``, RAF's ``own @ w - pull``.

    Args:
        full: (N, n, d, d).
        own: (N, n, d, d).
        pull: (N, n, d).
        squares: ‖T‖² (N, n).
        printed: Hessian of the paper's alternative loss, Eq. 12 (N, n, d, d).
        widest: Largest spectral norm of a sample's features.
    """

    full: Tensor
    own: Tensor
    pull: Tensor
    squares: Tensor
    printed: Tensor
    widest: float


class LayerJob(NamedTuple):
    """A seed of the figure."""

    figure: LastLayer
    seed: int


@dataclass(frozen=True, kw_only=True)
class LastLayer(Simulation):
    """The gap of the last layer over frozen features, its bound, and the paper's propositions.

    Args:
        seeds: The number of seeds.
        first_seed: The first seed.
        num_clients: N.
        samples: n_k.
        dim: d.
        pixels: Of a line of the heatmap at the highest resolution; each lower one has half of them.
        levels: r, the number of resolutions.
        apart: How far clients' best heads lie apart, beside one that they share.
        alpha: α.
        gamma: γ.
        rates: Parts of the clients in a round, a column each.
        local_steps: E, steps of one sample.
        rounds: Communication rounds.
        claims: The paper's claims, in the rows and columns above.

    Note:
        The paper measures nothing here. Features of a lower resolution are means of neighbouring pixels of the higher
        one, with noise. L and μ of the bound are the largest and the least eigenvalue of the clients' own Hessians, G²
        and σ² the largest mean square and variance of the gradients on the way, and Γ is exact; the paper's L and C are
        compared with what they bound.
    """

    network = "linear head"
    data = "drawn features"
    seeds: int = 10
    first_seed: int = 0
    num_clients: int = 20
    samples: int = 20
    dim: int = 6
    pixels: int = 16
    levels: int = 3
    apart: float = 0.5
    alpha: float = 1.0
    gamma: float = 0.1
    rates: tuple[float, ...] = (1.0, 0.5, 0.1)
    local_steps: int = 5
    rounds: int = 200
    claims: list[str | dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the settings."""
        for key in ("seeds", "samples", "dim", "levels", "local_steps", "rounds"):
            check_range(f"simulate.{key}", getattr(self, key), least=20 if key == "rounds" else 1)
        check_range("simulate.num_clients", self.num_clients, least=2)
        check_range("simulate.gamma", self.gamma, above=0)
        check_range("simulate.pixels", self.pixels, least=2 ** (self.levels - 1))
        for rate in self.rates:
            check_range("simulate.rates", rate, above=0, most=1)

    @override
    def points(self, jobs: Jobs = ALONE) -> list[Point]:
        asked = [LayerJob(self, seed) for seed in self.every_seed]
        return [point for points in jobs.run(solve, asked, (Point,)) for point in points]

    @override
    def readings(self, points: Sequence[Point]) -> tuple[Values, Curves]:
        return readings_of(points, _CURVES, "rate", plain=["power"])

    @override
    def dress(self, axes: Any, panel: str) -> None:
        super().dress(axes, panel)
        if panel in _CURVES:
            axes.set_xscale("log")
        if panel != "power by rate":
            axes.set_yscale("log")


def draw(figure: LastLayer, draws: torch.Generator) -> Heads:
    """Draw all clients' features and targets, and return their least squares."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    count, size = figure.num_clients, (figure.num_clients, figure.samples)
    best = normal(figure.dim) + figure.apart * normal(count, 1, figure.dim)
    higher = normal(*size, figure.pixels, figure.dim) / figure.dim**0.5  # ψ⊤ of the highest resolution
    target = torch.einsum("kjpd,kjd->kjp", higher, best.expand(*size, -1)) + 0.1 * normal(*size, figure.pixels)
    task = 2 * higher.mT @ higher + figure.gamma * torch.eye(figure.dim, dtype=torch.float64)
    full, own, printed = task.clone(), task.clone(), task.clone()
    widest = [higher]
    for _ in range(1, figure.levels):
        pairs = higher.unflatten(2, (-1, 2)).mean(3)
        lower = pairs + 0.3 * normal(*pairs.shape) / figure.dim**0.5
        repeated = lower.repeat_interleave(2, 2)  # A = Uψ⊤
        full += 2 * figure.alpha * (repeated - higher).mT @ (repeated - higher)
        own += 2 * figure.alpha * repeated.mT @ (repeated - higher)
        cross = figure.alpha * repeated.mT @ (higher - repeated)
        printed += cross + cross.mT
        widest.append(higher := lower)
    norm = max(float(torch.linalg.matrix_norm(one, 2).max()) for one in widest)
    pull = 2 * torch.einsum("kjpd,kjp->kjd", widest[0], target)
    return Heads(full, own, pull, target.square().sum(-1), printed, norm)


def solve(job: LayerJob) -> list[Point]:
    """Return all numbers of a seed."""
    torch.set_num_threads(1)  # jobs run in parallel, with small matrices
    figure, seed = job
    draws = torch.Generator().manual_seed(seed)
    heads = draw(figure, draws)
    return [point for rate in figure.rates for point in _rounds(figure, heads, rate, seed, draws)]


def _rounds(figure: LastLayer, heads: Heads, rate: float, seed: int, draws: torch.Generator) -> list[Point]:
    """Both trainings at a rate: of F, ``ws[0]``, and RAF's, ``ws[1]``."""
    count, steps = figure.num_clients, figure.local_steps
    chosen = max(1, round(rate * count))
    hessians, pulls = heads.full.mean(1), heads.pull.mean(1)
    eigenvalues = torch.linalg.eigvalsh(hessians)
    smooth, convex = float(eigenvalues.max()), float(eigenvalues.min())
    begin = max(8 * smooth / convex, steps)
    best = torch.linalg.solve(hessians.mean(0), pulls.mean(0))
    target = torch.linalg.solve(heads.own.mean((0, 1)), pulls.mean(0))  # where RAF's mean gradient is zero

    def loss(w: Tensor, hessian: Tensor = heads.full) -> Tensor:
        """Of every client at its own w (N, d), or at one (d,)."""
        each = w.expand(count, -1)
        quadratic = torch.einsum("kd,kde,ke->k", each, hessian.mean(1), each) / 2
        return quadratic - (pulls * each).sum(1) + heads.squares.mean(1)

    least = float(loss(best).mean())
    spread = least - float(loss(torch.linalg.solve(hessians, pulls)).mean())  # Γ
    ws = torch.zeros(2, figure.dim, dtype=torch.float64)
    matrices = torch.stack([heads.full, heads.own])
    squares, variances, radius, printed = 0.0, 0.0, 0.0, 0.0
    measured: list[tuple[int, float, float]] = []
    seen = torch.logspace(0, torch.tensor(figure.rounds).log10().item(), 40).round().unique().int().tolist()
    for done in range(1, figure.rounds + 1):
        ids = torch.randperm(count, generator=draws)[:chosen]
        local = ws[:, None].repeat(1, chosen, 1)
        for step in range(steps):
            gradients = torch.einsum("wkjde,wke->wkjd", matrices[:, ids], local) - heads.pull[ids]
            squares = max(squares, float(gradients[0].square().sum(-1).mean(-1).max()))
            off = gradients[0] - gradients[0].mean(1, keepdim=True)
            variances = max(variances, float(off.square().sum(-1).mean(-1).max()))
            radius = max(radius, float(local[1].norm(dim=-1).max()))
            alternative = torch.einsum("kde,ke->kd", heads.printed[ids].mean(1), local[1]) - pulls[ids]
            printed = max(printed, float(alternative.norm(dim=-1).max()))
            sample = torch.randint(figure.samples, (chosen,), generator=draws)
            lr = 2 / (convex * (begin + (done - 1) * steps + step))
            local = local - lr * gradients[:, torch.arange(chosen), sample]
        ws = local.mean(1)
        if done in seen:
            far = float((ws[1] - target).square().sum())
            measured.append((done * steps, float(loss(ws[0]).mean()) - least, far))
    drift = variances / count + 6 * smooth * spread + 8 * (steps - 1) ** 2 * squares
    drawn = (count - chosen) / (count - 1) * 4 * steps**2 * squares / chosen
    over = 2 * (drift + drawn) / convex + convex * begin / 2 * float(best.square().sum())
    line = f"rate={rate:g}"
    points = [Point("distance by step", line, step, seed, far) for step, _, far in measured]
    points += [Point("gap by step", line, step, seed, gap) for step, gap, _ in measured]
    for step, *_ in measured:
        bound = smooth / convex / (begin + step - 1) * over
        points.append(Point("gap by step", f"{line}, bound", step, seed, bound))
    pairs = figure.alpha * (figure.levels - 1) * (_UP + 1) ** 2 * heads.widest**2
    lipschitz = 2 * heads.widest**2 + 2 * pairs + figure.gamma
    targets = float(heads.squares.max()) ** 0.5
    bounded = 2 * heads.widest * (heads.widest * radius + targets) + 2 * pairs * radius + figure.gamma * radius
    alternatives = torch.linalg.eigvalsh(heads.printed.mean(1))
    late = torch.tensor([(step, gap) for step, gap, _ in measured if step > 10 * steps], dtype=torch.float64).log()
    off, fell = (late - late.mean(0)).unbind(1)
    true, other = loss(ws[1]), loss(ws[1], heads.printed)
    gradient, turned = (torch.einsum("kde,e->kd", one.mean(1), ws[1]) - pulls for one in (heads.own, heads.printed))
    numbers = {
        ("power by rate", "power"): float((off @ fell) / (off @ off)),
        ("propositions by rate", "smooth"): lipschitz / float(alternatives.abs().max()),
        ("propositions by rate", "convex"): max(float(alternatives.min()) / figure.gamma, _LEAST),
        ("propositions by rate", "bounded"): bounded / printed,
        ("equations by rate", "eq_13"): float(((true - other).abs() / true).max()),
        ("equations by rate", "eq_14"): float(((gradient - turned).norm(dim=1) / gradient.norm(dim=1)).max()),
        ("equations by rate", "biased"): float(loss(target).mean()) / least - 1,
    }
    return points + [Point(panel, name, rate, seed, value) for (panel, name), value in numbers.items()]
