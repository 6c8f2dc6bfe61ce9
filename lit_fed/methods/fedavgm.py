"""FedAvgM.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.
The client's half is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.methods.server import ServerOptimizer, decay, scaled, slot


class FedAvgM(ServerOptimizer):
    r"""Momentum on the server: :math:`v \leftarrow \beta v + \Delta_t`, then :math:`w \leftarrow w + \eta v`.

    Args:
        beta: Momentum β; with 0, and a learning rate of 1, this is FedAvg.
        kwargs: The settings of `lit_fed.methods.server.ServerOptimizer`.

    Raises:
        ConfigError: If β is not in [0, 1) or the learning rate is not positive.

    Note:
        Δ is the clients' movement, of opposite sign to the paper's, hence the plus. A parameter keeps its momentum in
        rounds in which it does not travel.
    """

    slots = ("momentum",)

    def __init__(self, beta: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta = decay("beta", beta)

    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """The momentum times the learning rate."""
        momentum = slot(server, "momentum", delta)
        for own, moved in zip(momentum, delta.values(), strict=True):
            own.mul_(self.beta).add_(moved)
        return scaled(dict(zip(delta, momentum, strict=True)), self.server_lr), {}
