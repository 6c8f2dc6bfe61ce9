"""FedRep.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from lit_fed.client import ClientContext, Phase
from lit_fed.errors import ConfigError
from lit_fed.methods.fedper import FedPer


class FedRep(FedPer):
    """`FedPer`, where a client first fits its head to the representation it received, then moves the representation.

    The head trains for ``local_epochs`` (or ``local_steps``) with the representation fixed, then the representation
    for ``body_epochs`` with the head fixed, each with fresh optimizers.

    Args:
        body_epochs: Passes over the client's data for the representation.
        kwargs: Passed on to `FedPer`.

    Raises:
        ConfigError: If there are less than one.
    """

    def __init__(self, body_epochs: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if body_epochs < 1:
            raise ConfigError(f"model.body_epochs is {body_epochs}; it must be at least 1")
        self.body_epochs = body_epochs

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """The head, then the body; fine-tuning for evaluation trains both together."""
        phases = super().phases(ctx)
        if ctx.stage != "train":
            return phases
        split = self.layout.split
        for phase in phases:
            phase.name, phase.trains = "head", split.personal
        return [*phases, Phase("body", ctx.train_loader(), epochs=self.body_epochs, trains=split.shared)]
