"""FedAsync.

Xie, Koyejo, Gupta: "Asynchronous Federated Optimization", OPT workshop 2020 (arXiv 1903.03934), Algorithm 1.
The client's half is FedAvg's.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg


class FedAsync(FedAvg):
    r"""Mixes every arriving model into the server's: :math:`w \leftarrow (1-\alpha_\tau) w + \alpha_\tau w_i`.

    :math:`\alpha_\tau = \alpha\, s(\tau)` with τ the staleness, and s by `weight`:

    - ``constant``: 1;
    - ``polynomial``: :math:`(1+\tau)^{-a}`;
    - ``hinge``: 1 up to τ = b, then :math:`\frac{1}{a(\tau - b) + 1}`.

    It steps on every arrival where `lit_fed.participation.Asynchronous` has a buffer of 1. With a larger buffer, or in
    rounds, it is the mean of the mixed models.

    Args:
        alpha: α, above 0 and at most 1.
        weight: s.
        a: a; the paper has 0.5 for ``polynomial`` and 10 for ``hinge``.
        b: b; the paper has 4.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`; the paper's proximal term is the regularizer
            `lit_fed.methods.regularizers.Prox`.

    Raises:
        ConfigError: If α is not in (0, 1], a or b is negative, or s is unknown.

    Note:
        τ counts the steps between download and arrival, so that an update of the present model has τ = 0; in the
        paper's count, t − τ, it has 1. Floating-point buffers are mixed, too.
    """

    def __init__(
        self,
        alpha: float = 0.6,
        weight: Literal["constant", "polynomial", "hinge"] = "polynomial",
        a: float = 0.5,
        b: float = 4.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, above=0, most=1)
        self.weight = weight
        self.a = check_range("algorithm.a", a, least=0)
        self.b = check_range("algorithm.b", b, least=0)

    def mixing(self, staleness: int) -> float:
        """α_τ."""
        if self.weight == "polynomial":
            return self.alpha * math.pow(1 + staleness, -self.a)
        late = staleness - self.b if self.weight == "hinge" else 0.0
        return self.alpha / (self.a * max(late, 0.0) + 1)

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """The present model with the client's mixed in."""
        present, share = server["model"], self.mixing(update.staleness)
        mixed = {
            name: torch.lerp(present[name].to(tensor.dtype), tensor, share)
            for name, tensor in update.payload.items()
            if name in present and tensor.is_floating_point()
        }
        return update.with_payload({**update.payload, **mixed})
