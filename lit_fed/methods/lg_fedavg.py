"""LG-FedAvg.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", NeurIPS 2019 workshop, arXiv:2001.01523, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedper import chosen_layers


class LGFedAvg(FedAvg):
    """The reverse of `lit_fed.methods.fedper.FedPer`: representations stay with the client, the head is averaged.

    All layers train together. A new client starts from the initial representation. There is no global model to test on
    the shared test set; `ClientTest` tests each client's model.

    Args:
        shared: Parameters that travel: names, modules (``network.head``) or patterns (``classifier.*``); null for the
            task's head (``algorithm.head``).
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a name or pattern that chooses no parameter, when the task is known.

    Note:
        Buffers stay with the parameters of their module, such as the representation's batch norm. The authors' code
        starts from a model that FedAvg trained; here clients start from the first model.
    """

    def __init__(self, shared: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared = shared
        if shared is None:
            self.needs = self.needs | {"head", "body"}

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """The named layers travel, all others stay."""
        shared = chosen_layers(self, model, "shared")
        modules = {name.rpartition(".")[0] for name in shared}
        buffers = tuple(name for name in model.buffers if name.rpartition(".")[0] not in modules)
        return fed.Split(shared, tuple(name for name in model.parameters if name not in shared), buffers=buffers)
