r"""Proposition 4.2 and Corollaries 4.3 and 4.4 of UWA, from measurements along a run.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Section 4.3 and Appendices C.2, C.6 to C.8. Stage 2 descends on :math:`J_{agg}`, whose gradient is the gradient of the
true objective F plus a bias :math:`\beta`:

.. math::
    E\lVert\beta(\theta_t)\rVert^2 \le m\,E\lVert\nabla F(\theta_t)\rVert^2 + \zeta^2, \qquad
    m = \Big(1 + \frac1\alpha\Big) c, \qquad
    \zeta^2 = (1 + \alpha)\,G^2 \varepsilon_{teach} + \Big(1 + \frac1\alpha\Big) b^2 .

Pure functions of numbers.
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

import torch
from torch import Tensor


class Trace(NamedTuple):
    r"""Measurements of stage 2, means over runs at each measured step (N,).

    Args:
        steps: The steps t.
        excess: :math:`F(\theta_t) - F^\star`.
        gradient: :math:`\lVert\nabla F\rVert^2`.
        bias: :math:`\lVert\beta\rVert^2`, of :math:`\beta = \nabla J_{agg} - \nabla F`.
        mismatch: :math:`\lVert\nabla F - \nabla J_\star\rVert^2`, the left side of Assumption C.4.
        energy: :math:`E_x \lVert S(x, \theta_t)\rVert_F^2` of Assumption C.6.
        noise: :math:`E\lVert g_t - \nabla J_{agg}\rVert^2` of Assumption C.2.
    """

    steps: Tensor
    excess: Tensor
    gradient: Tensor
    bias: Tensor
    mismatch: Tensor
    energy: Tensor
    noise: Tensor


class Oracle(NamedTuple):
    """The constants of Proposition 4.2.

    Args:
        m: m, below 1.
        zeta: ζ².
        noise: ν².
    """

    m: float
    zeta: float
    noise: float


class Descent(NamedTuple):
    """Constants of the objective, and the step size.

    Args:
        smoothness: L_F.
        convexity: μ_F.
        lr: γ, at most 1/L_F.
    """

    smoothness: float
    convexity: float
    lr: float


def offset(trace: Trace, c: float) -> float:
    r"""Return the least b² with which Assumption C.4 holds along the run, :math:`\max_t` of mismatch − c·gradient."""
    return max(0.0, float((trace.mismatch - c * trace.gradient).max()))


def oracle(c: float, b: float, alpha: float, scored: float, noise: float) -> Oracle:
    """Eq. 3.

    Args:
        c: c.
        b: b².
        alpha: α above c/(1 − c), so that m is below 1.
        scored: G²·ε_teach.
        noise: ν².
    """
    rest = 1 + 1 / alpha
    return Oracle(rest * c, (1 + alpha) * scored + rest * b, noise)


def best_oracle(trace: Trace, error: float) -> Oracle:
    r"""Return the constants with the least floor :math:`\zeta^2/(1 - m)` that the assumptions allow along the run.

    G² and ν² are the largest measured energy and noise. The theory leaves c and α open, and b² follows from c
    (`offset`). The search covers 80 values of c from 10⁻⁴ to 0.99, and for each, 99 values of 1 + 1/α between 1 and
    1/c, where m is below 1.

    Args:
        trace: The run.
        error: ε_teach.
    """
    scored, noise = float(trace.energy.max()) * error, float(trace.noise.max())
    oracles = []
    for c in torch.logspace(-4, log(0.99, 10), 80, dtype=torch.float64).tolist():
        b = offset(trace, c)
        rests = (1 + share / 100 * (1 / c - 1) for share in range(1, 100))
        oracles += [oracle(c, b, 1 / (rest - 1), scored, noise) for rest in rests]
    return min(oracles, key=lambda candidate: candidate.zeta / (1 - candidate.m))


def bias_bound(trace: Trace, known: Oracle) -> Tensor:
    """Return the right side of Eq. 4, (N,)."""
    return known.m * trace.gradient + known.zeta


def stationarity_floor(known: Oracle, how: Descent) -> float:
    """Return the bound on the mean squared gradient after infinitely many steps, (ζ² + L·γ·ν²)/(1 − m)."""
    return (known.zeta + how.smoothness * how.lr * known.noise) / (1 - known.m)


def stationarity_bound(steps: Tensor, excess: float, known: Oracle, how: Descent) -> Tensor:
    r"""Return the bound on the mean of :math:`\lVert\nabla F\rVert^2` over T steps, Eq. 20; Corollary 4.3 inverts it.

    Args:
        steps: T (N,), from 1 on.
        excess: F(θ_0) − F*.
        known: The constants.
        how: The descent.
    """
    return 2 * excess / (steps * how.lr * (1 - known.m)) + stationarity_floor(known, how)


def stationarity_steps(excess: float, known: Oracle, how: Descent) -> int:
    """Return the T of Corollary 4.3 with its constant, at which Eq. 20 reaches twice its floor."""
    return max(1, ceil(2 * excess / (how.lr * (1 - known.m) * stationarity_floor(known, how))))


def linear_floor(known: Oracle, how: Descent) -> float:
    """Return ε_floor of Corollary 4.4, (ζ² + L·γ·ν²)/(2·μ·(1 − m))."""
    return stationarity_floor(known, how) / (2 * how.convexity)


def linear_bound(steps: Tensor, excess: float, known: Oracle, how: Descent) -> Tensor:
    r"""Return the bound on :math:`F(\theta_T) - F^\star` under the Polyak-Łojasiewicz condition, Eq. 21."""
    rate = 1 - how.lr * how.convexity * (1 - known.m)
    return excess * rate**steps + linear_floor(known, how)


def linear_steps(excess: float, known: Oracle, how: Descent) -> int:
    """Return the T of Corollary 4.4 with its constant, which suffices for twice its floor; 1 if the start is below."""
    over = excess / linear_floor(known, how)
    return max(1, ceil(log(over) / (how.lr * how.convexity * (1 - known.m)))) if over > 0 else 1
