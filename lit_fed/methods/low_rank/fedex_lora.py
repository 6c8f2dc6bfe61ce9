"""FedEx-LoRA.

Singhal, Ponkshe, Vepakomma: "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models", ACL 2025.
"""

from __future__ import annotations

from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.low_rank.adapted import Merging
from lit_fed.methods.low_rank.fedit import FedIT


class FedExLoRA(FedIT, Merging):
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
    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Average A, B and the head; merge what the mean product lacks."""
        metrics = super().step(server, aggregate, cohort)
        for base, (left, right) in self.lacking(aggregate).items():
            self.merge(server, base, left, right)
        return metrics
