"""The two-way contrast of HFedCKD: encoders to the global one, classifiers to the client's own history."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_fed.algorithm import Client, Outputs, Payload, Tensors, Terms, add_prefix, split_prefix
from lit_fed.losses import model_contrast
from lit_fed.methods.regularizers import declared

PREVIOUS = "previous."  # in a client's state: its network after its last round


class TwoWayContrast:
    r"""Two terms of MOON's form, see `lit_fed.losses.model_contrast`.

    - ``encoder``: the features z of a batch are drawn to the global network's, away from the client's previous one's;
    - ``decoder``: its outputs f are drawn to the previous network's, away from the global one's.

    Both networks see the batch in evaluation mode. Each term is ln 2 if all three networks agree.

    Args:
        encoder_weight: Weight of the first; 0 leaves it out.
        decoder_weight: Weight of the second; 0 leaves it out.
        temperature: τ.
    """

    def __init__(self, encoder_weight: float, decoder_weight: float, temperature: float) -> None:
        self.encoder_weight = encoder_weight
        self.decoder_weight = decoder_weight
        self.temperature = temperature

    def terms(self, client: Client, batch: Any) -> Terms:
        """Both terms with their weights; empty if the client has no history or received nothing."""
        previous = split_prefix(PREVIOUS, client.state)[0]
        if not previous or not client.begun:
            return {}
        (z, f), (z_global, f_global) = _halves(client.run(batch)), _halves(client.teach(batch))
        z_before, f_before = _halves(client.teach(batch, previous))
        terms = {}
        if self.encoder_weight:
            terms["encoder"] = self.encoder_weight * model_contrast(z, z_global, z_before, self.temperature)
        if self.decoder_weight:
            terms["decoder"] = self.decoder_weight * model_contrast(f, f_before, f_global, self.temperature)
        return terms


def _halves(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """The encoder's output (B, d) and the classifier's (B, C)."""
    return declared(outputs.features), declared(outputs.logits)


def history(network: Payload) -> Tensors:
    """A network as a client's state."""
    return add_prefix(PREVIOUS, network)
