"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithm 1. The
server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """Base layers are shared, personalisation layers stay with the client.

    All layers train together. A new client starts from the initial personal layers. There is no global model to test on
    the shared test set; `ClientTest` tests each client's model.

    Args:
        personal: Parameters that stay: names, modules (``network.head``) or patterns (``*lora_B*``, ``classifier.*``);
            null for the task's head (``algorithm.head``), an empty list for FedAvg.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a name or pattern that chooses no parameter, when the task is known.
    """

    def __init__(self, personal: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.personal = personal
        if personal is None:
            self.needs = self.needs | {"head", "body"}

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """The personal layers stay, all others travel."""
        personal = chosen_layers(self, model, "personal")
        return fed.Split(tuple(name for name in model.parameters if name not in personal), personal)


def chosen_layers(method: FedAvg, model: fed.Model, setting: str) -> tuple[str, ...]:
    """The parameters that a method's setting chooses by names and patterns; the task's head if it is null."""
    patterns: list[str] | None = getattr(method, setting)
    if patterns is None:
        return fed.head_names(model, method.head)
    trained = [name for name in model.parameters if name not in model.fixed]
    where, missing = f"algorithm.{setting}", "parameter that trains is called or begins so"
    return fed.chosen_names(patterns, trained, where, missing)
