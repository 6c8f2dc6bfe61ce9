"""FedBABU.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1. The
server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from lit_fed.client import ClientContext, Phase
from lit_fed.errors import ConfigError
from lit_fed.frozen import FrozenClassifier
from lit_fed.networks import classifier, simplex_etf


class FedBABU(FrozenClassifier):
    """Body aggregation and body update: the body trains, the head stays as it was randomly initialised.

    Args:
        fine_tunes: What trains when a client's model is fine-tuned for a test (`lit_fed.protocols.PersonalTest`):
            ``body``, ``head`` or ``all`` of it. The paper compares the three.
        etf: Start the head at a simplex ETF and no bias instead of random weights: cross-entropy with an ETF, as in
            FedDr+'s Table 3. Features are not normalised.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For another part to fine-tune, and where there is no such ETF or no linear classifier to hold it.
    """

    def __init__(self, fine_tunes: Literal["body", "head", "all"] = "body", etf: bool = False, **kwargs: Any) -> None:
        if fine_tunes not in ("body", "head", "all"):
            raise ConfigError(f"model.fine_tunes is {fine_tunes!r}; it must be 'body', 'head' or 'all'")
        super().__init__(**kwargs)
        self.fine_tunes = fine_tunes
        if etf:
            head = classifier(self.network)
            if not isinstance(head, nn.Linear):
                raise ConfigError(
                    f"model.etf needs a linear classifier, and that of network {type(self.network).__name__} is a "
                    f"{type(head).__name__}; choose another network, or set it to false"
                )
            head.weight.data.copy_(simplex_etf(head.out_features, head.in_features))
            if head.bias is not None:
                head.bias.data.zero_()

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """One phase; a fine-tuning one trains the part it was told to."""
        phases = super().phases(ctx)
        if ctx.fine_tuning is not None and self.fine_tunes != "body":
            body = () if self.fine_tunes == "head" else self.layout.split.shared
            for phase in phases:
                phase.trains = (*body, *self.frozen)
            # The head is about to move, so a teacher needs it as it was downloaded.
            self.downloaded.update({name: tensor.clone() for name, tensor in self.tensors(self.frozen).items()})
        return phases
