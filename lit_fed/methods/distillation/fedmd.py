"""FedMD.

Li and Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop, arXiv:1910.03581,
Algorithm 1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.methods.distillation.federated_distillation import FederatedDistillation


class FedMD(FederatedDistillation):
    r"""Clients digest the consensus on the public set, then revisit their own data.

    Digest (`public_epochs`), revisit (``trainer.local_epochs``), send class scores; tests use the model after the
    revisit. The consensus is the mean of the scores, :math:`\tilde f(x) = \frac{1}{|S|} \sum_i f_i(x)`, as logits.

    Args:
        digest: Loss of the digest: mean absolute difference to the consensus's logits (``l1``), or cross-entropy with
            its softmax (``ce``).
        kwargs: The settings of `lit_fed.methods.distillation.federated_distillation.FederatedDistillation`, but for
            ``aggregate``.

    Raises:
        ConfigError: For another digest.

    Note:
        The paper trains on labels of the public set before the first round and digests a random part of it in each
        round; here the public set has no labels, so this step is left out, and clients digest the whole set. The paper
        leaves the digest's loss open; ``l1`` on logits follows what we know of the authors' code.
    """

    def __init__(self, digest: Literal["l1", "ce"] = "l1", **kwargs: Any) -> None:
        super().__init__(aggregate="logits", **kwargs)
        self.digest = digest

    def refinement(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The digest in training only: a round ends with the revisit."""
        return super().refinement(client) if client.stage == "train" else []

    def distillation(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The distance of logits (B, C) to the consensus's (B, C)."""
        if self.digest == "l1":
            return F.l1_loss(logits, targets.to(logits.dtype))
        return F.cross_entropy(logits, targets.to(logits.dtype).softmax(1))

    def teach(self, mean: Tensor) -> Tensor:
        """The mean logits (P, C) as they are."""
        return mean
