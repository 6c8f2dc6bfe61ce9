"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithm 1. The
server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

from lit_fed.algorithm import Model, Split, head_names
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg


class FedPer(FedAvg):
    """Base layers are shared, personalisation layers stay with the client.

    All layers train together. A new client starts from the initial personal layers. There is no global model to test on
    the shared test set; `ClientTest` tests each client's model.

    Args:
        personal: Parameters that stay, by name or by the beginning of it (``network.head``); null for the task's head
            (``algorithm.head``), an empty list for FedAvg.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a name that no parameter begins with, when the task is known.
    """

    def __init__(self, personal: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.personal = personal
        if personal is None:
            self.needs = self.needs | {"head"}

    def split(self, model: Model, round_idx: int) -> Split:
        """The personal layers stay, all others travel."""
        if self.personal is None:
            personal = head_names(model, self.head)
        else:
            personal = tuple(name for name in model.parameters if any(_begins(name, one) for one in self.personal))
            for one in self.personal:
                if not any(_begins(name, one) for name in personal):
                    raise ConfigError(
                        f"algorithm.personal names {one!r}, but the parameters are {', '.join(model.parameters)}"
                    )
        return Split(tuple(name for name in model.parameters if name not in personal), personal)


def _begins(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")
