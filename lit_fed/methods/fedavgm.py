"""FedAvgM.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.
The client's half is FedAvg's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_fed.methods.server import ServerOptimizer, decay, scaled
from lit_fed.engine.payload import Payload


class FedAvgM(ServerOptimizer):
    r"""Momentum on the server: :math:`v \leftarrow \beta v + \Delta_t`, then :math:`w \leftarrow w + \eta v`.

    Args:
        beta: Momentum β; with 0, and a learning rate of 1, this is FedAvg.
        server_lr: Learning rate η of the server.
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform`` all alike.

    Raises:
        ConfigError: If β is not in [0, 1) or the learning rate is not positive.

    Note:
        Δ is the clients' movement, the paper's with the opposite sign, which is why it is added. A parameter that does
        not travel in a round keeps its momentum until it does.
    """

    def __init__(
        self, beta: float = 0.9, server_lr: float = 1.0, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        super().__init__(server_lr, weighting)
        self.beta = decay("beta", beta)

    def movement(self, delta: dict[str, Tensor], extra: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The momentum times the learning rate."""
        momentum = self.slot("momentum", delta)
        if momentum:
            torch._foreach_mul_(momentum, self.beta)
            torch._foreach_add_(momentum, list(delta.values()))
        return scaled(dict(zip(delta, momentum, strict=True)), self.server_lr), {}
