"""FedIT.

Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen: "Towards Building the Federated GPT: Federated Instruction Tuning",
ICASSP 2024.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.low_rank.adapted import LEFT, RIGHT, Products


class FedIT(Products):
    r"""Averages A and B, as FedAvg over adapters does, and logs what their product lacks.

    ``lora/cross_term`` is the Frobenius norm of :math:`\sum_ip_isB_iA_i - s\bar B\bar A` over all layers together: the
    distance between the mean of the clients' weights and the global model's.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the model has no adapters, or clients have different networks.

    Note:
        The paper does not measure the difference. For the norm the server holds the adapters of all clients of a round;
        `FedAvg` has the same weights without it.
    """

    @override
    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        fed.sole(models, self)
        return super().setup(models, population)

    @override
    def averaged(self, update: fed.ClientUpdate) -> fed.ClientUpdate:
        return update

    def lacking(self, aggregate: fed.Payload) -> dict[str, tuple[Tensor, Tensor]]:
        """By base, the factors of what the product of means lacks: (m, k) and (k, n)."""
        (adapters,) = self.adapters.values()
        return {
            one.base: (
                torch.cat([aggregate[LEFT + one.base], -one.scale * aggregate[one.lora_b]], 1),
                torch.cat([aggregate[RIGHT + one.base], aggregate[one.lora_a]]),
            )
            for one in adapters
        }

    @override
    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        super().step(server, aggregate, cohort)
        square = 0.0
        for left, right in self.lacking(aggregate).values():
            wide, high = left.double(), right.double()
            square += float(((wide.T @ wide) * (high @ high.T)).sum())  # ‖LR‖² = tr(LᵀL·RRᵀ)
        return {"lora/cross_term": max(square, 0.0) ** 0.5}
