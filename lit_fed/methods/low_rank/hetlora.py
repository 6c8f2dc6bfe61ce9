"""HetLoRA.

Cho, Liu, Xu, Fahrezi, Joshi: "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.low_rank.adapted import Products


class HetLoRA(Products):
    r"""Averages adapters of different rank: pads them with zeros to the largest rank, and truncates for each kind.

    The weight of a client is :math:`\|B_iA_i\|_F / \sum_j\|B_jA_j\|_F` in each layer.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`; ``weighting`` is that of the head.

    Raises:
        ConfigError: If the model has no adapters, or kinds differ in more than their rank, or in α/r.

    Note:
        Clients keep the rank of their kind; the paper's pruning of ranks during training is not part of it. The largest
        rank is the cohort's: further rows of A and columns of B stay. Where all products are zero, clients weigh the
        same.
    """

    @override
    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start every kind from the first rows of A of the largest rank."""
        server = super().setup(models, population)
        scales = {one.scale for adapters in self.adapters.values() for one in adapters}
        if len(scales) > 1:
            raise ConfigError(
                f"trainer.kinds has adapters with alpha/rank of {' and '.join(f'{s:g}' for s in sorted(scales))}, and "
                "algorithm HetLoRA averages them; leave adapter.alpha out, for twice the rank"
            )
        largest = max(models, key=lambda kind: len(server["models"][kind][self.adapters[kind][0].lora_a]))
        self.step(server, server["models"][largest], fed.Cohort(0, (), population.num_clients))
        return server

    @override
    def combined(self, updates: list[fed.ClientUpdate], shares: list[float]) -> fed.Tensors:
        means: fed.Tensors = {}
        for place, one in enumerate(self.adapters[updates[0].kind]):
            names = [self.adapters[update.kind][place] for update in updates]
            pairs = [
                (update.payload[own.lora_a].double(), update.payload[own.lora_b].double())
                for update, own in zip(updates, names, strict=True)
            ]
            norms = torch.stack([torch.linalg.matrix_norm(b @ a) for a, b in pairs])
            weights = norms / norms.sum() if float(norms.sum()) > 0 else torch.full_like(norms, 1 / len(norms))
            rank = max(len(a) for a, _ in pairs)
            shapes = (rank, pairs[0][0].shape[1]), (len(pairs[0][1]), rank)
            mean_a, mean_b = (weights.new_zeros(shape) for shape in shapes)
            for weight, (a, b) in zip(weights, pairs, strict=True):
                mean_a[: len(a)] += weight * a
                mean_b[:, : b.shape[1]] += weight * b
            dtype = updates[0].payload[names[0].lora_a].dtype
            means |= {one.lora_a: mean_a.to(dtype), one.lora_b: mean_b.to(dtype)}
        return means
