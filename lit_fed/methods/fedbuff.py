"""FedBuff.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022, Algorithm 1 and Section 5. The client's half is FedAvg's.
"""

from __future__ import annotations

from typing import Any, Literal

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.server import ServerOptimizer, scaled


class FedBuff(ServerOptimizer):
    r"""Moves by the buffer's mean movement: :math:`w \leftarrow w + \eta_g \frac1K \sum_i (1+\tau_i)^{-a} \Delta_i`.

    :math:`\Delta_i = w_i - w_{v_i}` is a client's movement from the version that it started from, τ its staleness, K
    the number of updates of the step. With τ = 0 this is FedAvg with equal weights and a server's learning rate.
    K, the concurrency and the speeds are `lit_fed.participation.Asynchronous`'s.

    Args:
        server_lr: :math:`\eta_g`.
        exponent: a; 0 leaves stale updates their full weight.
        weighting: ``uniform`` as in the paper; ``samples`` weighs the mean of the K movements.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the learning rate is not positive, or the exponent is negative.

    Note:
        Buffers, such as batch-norm statistics, are the mean of what the clients send, whatever their staleness. If an
        update is lost to a failure, K is the number of those that arrived.
    """

    def __init__(
        self,
        server_lr: float = 1.0,
        exponent: float = 0.5,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(server_lr=server_lr, weighting=weighting, **kwargs)
        self.exponent = check_range("algorithm.exponent", exponent, least=0)

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """The present model plus the client's movement times its weight."""
        return self.moved(update, begun, server, (1 + update.staleness) ** -self.exponent)

    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """The mean movement times the learning rate."""
        return scaled(delta, self.server_lr), {}
