"""FedEx-LoRA.

Singhal, Ponkshe, Vepakomma: "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models", ACL 2025.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from lit_fed.algorithm import (
    ClientUpdate,
    Cohort,
    Model,
    Payload,
    Population,
    Server,
    Tensors,
    add_prefix,
    sole,
    split_prefix,
)
from lit_fed.methods.low_rank.adapted import LEFT, RIGHT, Merging, stack


class FedExLoRA(Merging):
    r"""Averages A and B, and adds to the base what their product lacks.

    :math:`W_0 \leftarrow W_0 + s\left(\sum_ip_iB_iA_i - \bar B\bar A\right)`, so that
    :math:`W_0 + s\bar B\bar A` is the mean of the clients' weights.

    Logs ``lora/cross_term``, the Frobenius norm of the added matrices together: what FedAvg over adapters leaves out.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the model has no adapters, or clients have different networks.
    """

    also = 1  # the product of means

    @override
    def setup(self, models: Mapping[str, Model], population: Population) -> Server:
        sole(models, self)
        return super().setup(models, population)

    @override
    def combined(self, updates: list[ClientUpdate], shares: list[float]) -> Tensors:
        means: Tensors = {}
        for update, share in zip(updates, shares, strict=True):
            for name, tensor in update.payload.items():
                means[name] = means.get(name, 0.0) + share * tensor.double()
        means = {name: mean.to(updates[0].payload[name].dtype) for name, mean in means.items()}
        stacked, lefts, rights = stack(updates, shares, self.adapters), {}, {}
        for one in self.adapters[updates[0].kind]:
            left, right = stacked[one.base]
            lefts[one.base] = torch.cat([left, -one.scale * means[one.lora_b]], 1)
            rights[one.base] = torch.cat([right, means[one.lora_a]])
        return {**means, **add_prefix(LEFT, lefts), **add_prefix(RIGHT, rights)}

    @override
    def step(self, server: Server, aggregate: Payload, cohort: Cohort) -> dict[str, float]:
        """Average A, B and the head; merge what the mean product lacks."""
        (lefts, rest), (rights, _) = split_prefix(LEFT, aggregate), split_prefix(RIGHT, aggregate)
        super().step(server, rest, cohort)
        square = 0.0
        for base, left in lefts.items():
            wide, high = left.double(), rights[base].double()
            square += float(((wide.T @ wide) * (high @ high.T)).sum())  # ‖LR‖² = tr(LᵀL·RRᵀ)
            self.merge(server, base, left, rights[base])
        return {"lora/cross_term": max(square, 0.0) ** 0.5}
