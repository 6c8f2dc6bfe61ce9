"""FedBABU.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning import LightningModule
from torch import nn

from lit_fed.algorithm import Client, Pass, Phase, Tensors
from lit_fed.checks import check_choice
from lit_fed.methods.frozen_heads.frozen import FrozenHead, linear_head
from lit_fed.networks import simplex_etf


class FedBABU(FrozenHead):
    """Body aggregation and body update: the body trains, the head stays as it was randomly initialised.

    The loss is the task's own, so any LightningModule with a head works, also one that optimises by hand.

    Args:
        fine_tunes: What trains when a client's model is fine-tuned for a test
            (`lit_fed.protocols.PersonalTest`): ``body``, ``head`` or ``all`` of it. The paper
            compares the three.
        etf: Start the head at a simplex ETF and no bias instead of random weights: cross-entropy with an ETF, as in
            FedDr+'s Table 3. Features are not normalised.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For another part to fine-tune, and before training where there is no such ETF or no linear head to
            hold it.
    """

    def __init__(self, fine_tunes: Literal["body", "head", "all"] = "body", etf: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_choice("algorithm.fine_tunes", fine_tunes, ("body", "head", "all"))
        self.fine_tunes = fine_tunes
        self.etf = etf

    def place_head(self, task: LightningModule, head: nn.Module) -> None:
        """Start the head at an ETF, where it is told to."""
        if self.etf:
            linear = linear_head(task, head, "algorithm.etf changes the head")
            linear.weight.data.copy_(simplex_etf(linear.out_features, linear.in_features))
            if linear.bias is not None:
                linear.bias.data.zero_()

    def start(self, client: Client) -> Tensors:
        """The global model; also its head, as it arrived, where the head is about to move: a teacher needs it."""
        begun = super().start(client)
        return {**begun, **client.model.copy(self._moving_head(client))}

    def phases(self, client: Client) -> list[Phase | Pass]:
        """One phase; a fine-tuning one trains the part it was told to."""
        phases = super().phases(client)
        if moving := self._moving_head(client):
            body = () if self.fine_tunes == "head" else client.model.split.shared
            for phase in phases:
                if isinstance(phase, Phase):
                    phase.trains = (*body, *moving)
        return phases

    def _moving_head(self, client: Client) -> tuple[str, ...]:
        """Names of the head's parameters where this work trains them."""
        if client.fine_tuning is None or self.fine_tunes == "body":
            return ()
        return self.frozen(client.model.task)
