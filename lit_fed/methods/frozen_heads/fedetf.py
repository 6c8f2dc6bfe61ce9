"""FedETF.

Li, Shang, He, Lin, Wu: "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.engine.algorithm import Terms
from lit_fed.engine.client import Client, Tensors
from lit_fed.errors import ConfigError
from lit_fed.losses import balanced_softmax
from lit_fed.methods.frozen_heads.frozen import NewHead
from lit_fed.methods.regularizers import logits
from lit_fed.networks import ProjectedETFHead


class FedETF(NewHead):
    r"""Balanced softmax over cosines between projected features and a frozen simplex ETF, at a learnt temperature.

    The loss is `lit_fed.losses.balanced_softmax` with the client's own class counts; the logits are those of
    `lit_fed.networks.ProjectedETFHead`. Tests use the logits without the counts.

    Args:
        gamma: γ of the class weights :math:`n_c^\gamma`; 0 is plain cross-entropy.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative γ.

    Note:
        A regularizer on features sees those before the projection, which is trained with the loss alone. Under a plain
        ``lightning.Trainer``, where there is no client, all classes count the same. The paper's second stage of
        personalisation, which trains the frame and the projection in turn, is not here: fine-tuning goes on with this
        loss.
    """

    new_head = ProjectedETFHead

    def __init__(self, gamma: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not gamma >= 0:
            raise ConfigError(f"algorithm.gamma is {gamma}; the exponent of the class counts must not be negative")
        self.gamma = gamma

    def objective(self, client: Client, batch: Any) -> Terms:
        """The balanced softmax."""
        found = logits(client, batch)
        return {"balanced": balanced_softmax(found, client.targets(batch), self._counts(client, found), self.gamma)}

    def start(self, client: Client) -> Tensors:
        """Also looks up how many samples of every class the client has."""
        if client.data is not None:
            counts = torch.from_numpy(client.population.class_counts(client.id)).to(client.device)
            client.results["classes"] = {"counts": counts}
        return super().start(client)

    def _counts(self, client: Client, found: Tensor) -> Tensor:
        """The client's samples of every class that the head knows, (C,); as many of each under a plain trainer."""
        if "classes" not in client.results:
            return torch.ones(found.shape[1], dtype=torch.int64, device=found.device)
        counts = client.results["classes"]["counts"]
        return F.pad(counts, (0, found.shape[1] - len(counts)))
