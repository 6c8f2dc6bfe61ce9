"""FedSpeed.

Sun, Shen, Huang, Ding, Tao: "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy", ICLR 2023, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.feddyn import DUAL, FedDyn
from lit_fed.methods.fedsam import FedSAM
from lit_fed.methods.server import positive


class FedSpeed(FedSAM, FedDyn):
    r"""A proximal term, a correction of its bias, and a gradient at perturbed weights.

    Clients step along :math:`(1-\alpha) g_1 + \alpha g_2 - \hat g_i + \lambda (w - w_g)`, :math:`g_1 = \nabla f(w)` and
    :math:`g_2 = \nabla f(w + \rho\, g_1 / \|g_1\|)` as in `lit_fed.methods.FedSAM`. After local work
    :math:`\hat g_i \leftarrow \hat g_i - \lambda (w_i - w_g)`, as in FedDyn, and the client sends
    :math:`w_i - \hat g_i / \lambda`. The server averages what arrives.

    Args:
        rho: ρ, see `lit_fed.methods.FedSAM`; 0 takes the gradient at w.
        lam: λ, the weight of the proximal term; the paper's is 1/λ.
        alpha: α in [0, 1], the weight of the gradient at the perturbed weights.
        weighting: ``uniform`` as in the paper, or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative ρ, λ that is not above 0, or α outside of [0, 1].

    Note:
        The authors' simulator adds the mean of :math:`-\hat g_i / \lambda` over all clients, and not over the cohort as
        the paper does. With full participation both are FedDyn's server.
    """

    def __init__(
        self,
        rho: float = 0.1,
        lam: float = 0.1,
        alpha: float = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(rho=rho, weighting=weighting, **kwargs)
        self.share = check_range("algorithm.alpha", alpha, least=0, most=1)
        self.alpha = positive("lam", lam)  # FedDyn's α

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start as FedAvg: the server has no state of its own."""
        return super(FedDyn, self).setup(models, population)

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the corrected model; keep the updated correction."""
        made = super().finish(client)
        dual = fed.split_prefix(DUAL, made.state)[0]
        corrected = {name: made.payload[name] - tensor / self.alpha for name, tensor in dual.items()}
        return replace(made, payload={**made.payload, **corrected})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Average."""
        return super(FedDyn, self).step(server, aggregate, cohort)
