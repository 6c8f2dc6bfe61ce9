"""FedETF.

Li, Shang, He, Lin, Wu: "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.frozen import FrozenClassifier
from lit_fed.losses import balanced_softmax
from lit_fed.networks import Outputs, ProjectedETFHead, replace_classifier


class FedETF(FrozenClassifier):
    r"""Balanced softmax over cosines between projected features and a frozen simplex ETF, at a learnt temperature.

    The loss is `lit_fed.losses.balanced_softmax` with the client's own class counts; the logits are those of
    `lit_fed.networks.ProjectedETFHead`. Tests use the logits without the counts.

    Args:
        gamma: γ of the class weights :math:`n_c^\gamma`; 0 is plain cross-entropy.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative γ.

    Note:
        A regularizer on features sees those before the projection, which is trained with the loss alone. Under a plain
        ``lightning.Trainer``, where there is no client, all classes count the same. The paper's second stage of
        personalisation, which trains the frame and the projection in turn, is not here: fine-tuning goes on with this
        loss.
    """

    def __init__(self, gamma: float = 1.0, **kwargs: Any) -> None:
        if gamma < 0:
            raise ConfigError(f"model.gamma is {gamma}; the exponent of the class counts must not be negative")
        super().__init__(**kwargs)
        self.gamma = gamma
        self.counts = torch.ones(())

    def make_head(self) -> None:
        """A projection from d to C, and a frozen ETF of C classes in C dimensions."""
        replace_classifier(self.network, ProjectedETFHead)

    def on_train_start(self) -> None:
        """Look up the client's class counts."""
        ctx = self.ctx
        counts = torch.ones(()) if ctx is None else torch.from_numpy(ctx.data.class_counts(ctx.client_id))
        self.counts = counts.to(self.device)

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """The balanced softmax."""
        return {"balanced": balanced_softmax(outputs.logits, y, self.counts, self.gamma)}
