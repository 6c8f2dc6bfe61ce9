"""FFA-LoRA.

Sun, Li, Li, Ding: "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024. The server is FedAvg's.
"""

from __future__ import annotations

from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.low_rank.adapted import OnAdapters
from lit_fed.networks.adapters import adapters_of


class FFALoRA(OnAdapters):
    r"""A stays at its first values, and B is averaged, so that the mean is exact: :math:`\sum_ip_iB_iA = \bar BA`.

    Half the adapters' traffic, and noise of privacy enters the product once.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the model has no adapters.
    """

    @override
    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        frozen = tuple(one.lora_a for one in adapters_of(model.task))
        return fed.Split(tuple(name for name in model.parameters if name not in frozen), frozen=frozen)
