"""FedSA-LoRA.

Guo, Zeng, Wang, Fan, Wang, Qu: "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025. The
server is FedAvg's.
"""

from __future__ import annotations

from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.low_rank.adapted import OnAdapters
from lit_fed.networks.adapters import adapters_of


class FedSALoRA(OnAdapters):
    """A is averaged, and B stays with the client: A learns what clients have in common, B what they do not.

    A new client starts from the first B, which is zero. There is no global model to test on the shared test set;
    `ClientTest` tests each client's model.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the model has no adapters.
    """

    @override
    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        personal = tuple(one.lora_b for one in adapters_of(model.task))
        return fed.Split(tuple(name for name in model.parameters if name not in personal), personal)
