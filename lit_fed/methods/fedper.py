"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithm 1. The
server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.client import Split
from lit_fed.errors import ConfigError


class FedPer(Classifier):
    """A classifier whose base layers are shared and whose personalisation layers stay with the client.

    All of them train together. A client that takes part for the first time starts from the initial personal layers.
    There is no global model to test on the shared test set; `ClientTest` tests each client's own.

    Args:
        personal: Parameters that stay, by name or by the beginning of it (``network.head``); null for the network's
            last layer, an empty list for FedAvg.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a name that no parameter begins with.
    """

    def __init__(self, personal: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        names = [name for name, _ in self.named_parameters()]
        for prefix in personal or ():
            if not any(_begins(name, prefix) for name in names):
                raise ConfigError(f"model.personal names {prefix!r}, but the parameters are {', '.join(names)}")
        self.personal = personal

    def split(self, round_idx: int) -> Split:
        """The personal layers stay, all others travel."""
        names = [name for name, _ in self.named_parameters()]
        if self.personal is None:
            personal = self.head_names()
        else:
            personal = tuple(name for name in names if any(_begins(name, prefix) for prefix in self.personal))
        return Split(shared=tuple(name for name in names if name not in personal), personal=personal)


def _begins(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")
