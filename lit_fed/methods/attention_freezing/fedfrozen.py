"""FedFrozen.

Du, Li, Feng, Feng: "FedFrozen: Two-Stage Federated Optimization via Attention Kernel Freezing", 2026, Algorithm 1. The
server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_fed.classifier import Classifier
from lit_fed.client import Split
from lit_fed.errors import ConfigError
from lit_fed.networks import Outputs
from lit_fed.networks.attention import merged, separate_attention


class FedFrozen(Classifier):
    r"""A classifier that trains whole for some rounds, then with its attention kernel frozen.

    From round :math:`T_\text{warm}` on, counted from 0, the query and key projections
    :math:`\Phi = (W^Q, W^K)`, weights and biases, stay at :math:`\bar\Phi = \Phi^{T_\text{warm}}`: they neither train
    nor travel. Values, output projections and all else train on. The local objective is
    :math:`F_k(\Phi, \theta) + \tfrac\lambda2\|\theta\|^2`, with θ the value projections (Eq. 5).

    Args:
        warmup_rounds: :math:`T_\text{warm}`, rounds in which everything trains; 0 freezes from the start, as many as
            there are rounds is FedAvg.
        value_ridge: λ; 0 for none, as in the paper's experiments on real data.
        kwargs: Passed on to `lit_fed.classifier.Classifier`. Any network with attention that
            `lit_fed.networks.attention.separate_attention` understands.

    Raises:
        ConfigError: If the network has no attention, or a setting is negative.

    Note:
        θ is here the weights of the value projections and their biases, in both phases. Frozen parameters are part
        of the server's model and are not counted as sent from round :math:`T_\text{warm}` on, as in the paper's cost
        table. A deployment sends :math:`\bar\Phi` once more, to each client that works in phase 2;
        ``python cli.py cost`` says how much that is.
    """

    def __init__(self, warmup_rounds: int = 5, value_ridge: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in (("warmup_rounds", warmup_rounds), ("value_ridge", value_ridge)):
            if value < 0:
                raise ConfigError(f"model.{key} is {value}; it must not be negative")
        self.warmup_rounds = warmup_rounds
        self.value_ridge = value_ridge
        separate_attention(self.network)
        self.attention = separate_attention(self)

    def split(self, round_idx: int) -> Split:
        """All parameters travel during the warm-up, all but queries and keys after it."""
        frozen = self.attention.kernel if round_idx >= self.warmup_rounds else ()
        names = (name for name, _ in self.named_parameters())
        return Split(shared=tuple(name for name in names if name not in frozen), frozen=frozen)

    def regularized(self, x: Tensor, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """The objective and the ridge on the value block."""
        terms = super().regularized(x, outputs, y)
        if self.value_ridge:
            values = [self.get_parameter(name).square().sum() for name in self.attention.value]
            terms["value_ridge"] = 0.5 * self.value_ridge * torch.stack(values).sum()
        return terms

    def deployable(self) -> nn.Module:
        """The network with its projections in one piece, as it was built."""
        return merged(self.network)
