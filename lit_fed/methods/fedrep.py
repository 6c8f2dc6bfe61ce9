"""FedRep.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedper import FedPer


class FedRep(FedPer):
    """`FedPer`, where a client first fits its head to the received representation, then trains the representation.

    The head trains for ``trainer.local_epochs`` (or ``local_steps``) with the representation fixed, then the
    representation for ``body_epochs`` with the head fixed, each with fresh optimizers. Fine-tuning for a test trains
    both together.

    Args:
        body_epochs: Passes over the client's data for the representation.
        kwargs: The settings of `lit_fed.methods.fedper.FedPer`.

    Raises:
        ConfigError: For `body_epochs` below 1.
    """

    needs = frozenset({"loss"})  # a module that optimises by hand may not support training a part

    def __init__(self, body_epochs: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body_epochs = check_range("algorithm.body_epochs", body_epochs, least=1)

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The head, then the body; skip a part without parameters."""
        if client.stage != "train":
            return super().phases(client)
        split, work = client.model.split, client.work
        head = fed.Phase("head", client.train_loader(), epochs=work.epochs, steps=work.steps, trains=split.personal)
        body = fed.Phase("body", client.train_loader(), epochs=self.body_epochs, trains=split.shared)
        return [phase for phase in (head, body) if phase.trains]
