r"""Terms that keep a client near the global model it downloaded, on top of any objective.

The five columns of Table 1 of Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global
Feature Distillation for Federated Learning", 2024: the objective becomes
:math:`\beta\,\mathcal{L} + (1-\beta)\,\mathcal{R}` there (its Eq. 4), which is ``objective_weight=β, weight=1-β``
here. The teacher is the downloaded model, in evaluation mode and without gradient; if a method sends no
parameters, it is the client's own model from the start of the round.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import feature_distillation, knowledge_distillation, not_true_distillation, proximal


class Prox(fed.Regularizer):
    r"""Distance between the weights, :math:`\tfrac12\|w - w_g\|^2` over the parameters the server sent.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2;
    its μ is the weight.
    """

    name = "prox"

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """Half the squared distance."""
        anchor = client.anchor
        return proximal((client.parameters[name] for name in anchor), anchor.values())


class KD(fed.Regularizer):
    """Distillation of the softened class probabilities; see `lit_fed.losses.knowledge_distillation`.

    Args:
        weight: The term's weight.
        temperature: τ.
        objective_weight: The weight of everything else.

    Raises:
        ConfigError: If the temperature is not positive or a weight is negative.
    """

    name = "kd"
    needs = frozenset({"loss", "logits"})

    def __init__(self, weight: float = 1.0, temperature: float = 3.0, objective_weight: float = 1.0) -> None:
        super().__init__(weight, objective_weight)
        self.temperature = check_range(f"{type(self).__name__}.temperature", temperature, above=0)

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """τ² times the divergence from the teacher."""
        return knowledge_distillation(logits(client, batch), taught_logits(client, batch), self.temperature)


class NTD(KD):
    """Distillation of the probabilities of the not-true classes; see `lit_fed.losses.not_true_distillation`."""

    name = "ntd"
    needs = frozenset({"loss", "logits", "targets"})

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """τ² times the divergence over the C − 1 not-true classes."""
        y = client.targets(batch)
        return not_true_distillation(logits(client, batch), taught_logits(client, batch), y, self.temperature)


class LD(fed.Regularizer):
    """Mean squared error between the logits, over batch and classes; a regression's predictions serve as well.

    Kim, Oh, Kim, Cho, Yun: "Comparing Kullback-Leibler Divergence and Mean Squared Error Loss in Knowledge
    Distillation", IJCAI 2021.
    """

    name = "ld"
    needs = frozenset({"loss", "outputs"})

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """The mean over B × C."""
        return F.mse_loss(logits(client, batch), taught_logits(client, batch))


class FD(fed.Regularizer):
    """Distance between the raw features; see `lit_fed.losses.feature_distillation`."""

    name = "fd"
    needs = frozenset({"loss", "features", "body"})

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """The mean over B × d."""
        return feature_distillation(features(client, batch), taught_features(client, batch))


def declared(outputs: Tensor | None) -> Tensor:
    """A result of the task that the method declares in ``needs``, so that it is there."""
    assert outputs is not None
    return outputs


def logits(client: fed.Client, batch: Any) -> Tensor:
    """The client's logits (B, C)."""
    return declared(client.run(batch).logits)


def features(client: fed.Client, batch: Any) -> Tensor:
    """The client's features (B, d)."""
    return declared(client.run(batch).features)


def taught_logits(client: fed.Client, batch: Any) -> Tensor:
    """The downloaded model's logits (B, C)."""
    return declared(client.teach(batch).logits)


def taught_features(client: fed.Client, batch: Any, tensors: Any = None) -> Tensor:
    """Features (B, d) of the downloaded model, or of a model with other tensors."""
    return declared(client.teach(batch, tensors).features)


# ---------------------------------------------------------------------- class counts
# A client's training samples of each class: a method's `start` looks them up, its `objective` reads them.


_RESULT = "classes"  # in a client's results, so that groups stack them


def look_up_counts(client: fed.Client) -> None:
    """Keep the client's class counts for its work; a plain ``lightning.Trainer`` has none."""
    if client.data is not None:
        counts = torch.from_numpy(client.population.census.class_counts(client.id)).to(client.device)
        client.results[_RESULT] = {"counts": counts}


def own_counts(client: fed.Client, logits: Tensor) -> Tensor:
    """The client's samples of each class, (C,), for logits (B, C); equal under a plain ``lightning.Trainer``."""
    if _RESULT not in client.results:
        return torch.ones(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts = client.results[_RESULT]["counts"]
    return F.pad(counts, (0, logits.shape[1] - len(counts)))
