"""FedBABU.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning import LightningModule
from torch import nn
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.methods.frozen_heads.frozen import FrozenHead, linear_head
from lit_fed.networks import simplex_etf


class FedBABU(FrozenHead):
    """Body aggregation and body update: the body trains, the head keeps its random initial weights.

    The loss is the task's own, so any LightningModule with a head works, also one that optimises by hand.

    Args:
        fine_tunes: The part that fine-tuning for a test trains (`lit_fed.protocols.PersonalTest`): ``body``, ``head``
            or ``all``. The paper compares the three.
        etf: Start the head at a simplex ETF and no bias instead of random weights: cross-entropy with an ETF, as in
            FedDr+'s Table 3. Features are not normalised.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For another part to fine-tune; before training, for a head that is not linear or cannot hold the
            ETF.
    """

    def __init__(self, fine_tunes: Literal["body", "head", "all"] = "body", etf: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fine_tunes = fine_tunes
        self.etf = etf

    def place_head(self, task: LightningModule, head: nn.Module) -> None:
        """Start the head at an ETF if `etf` is set."""
        if self.etf:
            linear = linear_head(task, head, "algorithm.etf changes the head")
            linear.weight.data.copy_(simplex_etf(linear.out_features, linear.in_features))
            if linear.bias is not None:
                linear.bias.data.zero_()

    @override
    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        fed.head_names(model, self.head)  # refuses a head that does not train
        return super().split(model, round_idx)

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model; with the downloaded head if it is about to train, for a teacher."""
        begun = super().start(client)
        return {**begun, **client.model.copy(self._moving_head(client))}

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """One phase; in fine-tuning it trains the part `fine_tunes`."""
        phases = super().phases(client)
        if moving := self._moving_head(client):
            body = () if self.fine_tunes == "head" else client.model.split.shared
            for phase in phases:
                if isinstance(phase, fed.Phase):
                    phase.trains = (*body, *moving)
        return phases

    def _moving_head(self, client: fed.Client) -> tuple[str, ...]:
        """Names of the head's parameters if this work trains them."""
        if client.fine_tuning is None or self.fine_tunes == "body":
            return ()
        return self.frozen(client.model.task)
