r"""Terms that keep a client near the global model it downloaded, on top of any classification objective.

The five columns of Table 1 of Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global
Feature Distillation for Federated Learning", 2024: the objective becomes
:math:`\beta\,\mathcal{L} + (1-\beta)\,\mathcal{R}` there (its Eq. 4), which is ``objective_weight=β, weight=1-β``
here. The teacher is the downloaded model, in eval mode and without gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.losses import feature_distillation, knowledge_distillation, not_true_distillation, proximal
from lit_fed.networks import Outputs

if TYPE_CHECKING:
    from lit_fed.classifier import Classifier


class Regularizer(ABC):
    """A term added to a client's objective while it works for a federation.

    Args:
        weight: The term's weight.
        objective_weight: The weight of everything else.

    Raises:
        ConfigError: If a weight is negative.
    """

    name: str
    """What the term is logged as: ``train/<name>``, with its weight."""

    uses_features = False
    """Whether it looks at the network's features."""

    def __init__(self, weight: float = 1.0, objective_weight: float = 1.0) -> None:
        for key, value in (("weight", weight), ("objective_weight", objective_weight)):
            if value < 0:
                raise ConfigError(f"regularizer {type(self).__name__}: {key} is {value}; it must not be negative")
        self.weight = weight
        self.objective_weight = objective_weight

    @abstractmethod
    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """The term of a batch, without its weight.

        Args:
            module: The client; `Classifier.teach` gives the downloaded model's outputs.
            x: Inputs (B, …).
            outputs: What the client's network gives for them.
            y: Labels (B,).
        """


class Prox(Regularizer):
    r"""Distance between the weights, :math:`\tfrac12\|w - w_g\|^2` over the parameters the server sent.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2;
    its μ is the weight.
    """

    name = "prox"

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """Half the squared distance."""
        names = [name for name in module.layout.split.shared if name in module.received]
        return proximal((module.layout.parameters[n] for n in names), (module.received[n] for n in names))


class KD(Regularizer):
    """Distillation of the softened class probabilities; see `lit_fed.losses.knowledge_distillation`.

    Args:
        weight: The term's weight.
        temperature: τ.
        objective_weight: The weight of everything else.

    Raises:
        ConfigError: If the temperature is not positive or a weight is negative.
    """

    name = "kd"

    def __init__(self, weight: float = 1.0, temperature: float = 3.0, objective_weight: float = 1.0) -> None:
        super().__init__(weight, objective_weight)
        if temperature <= 0:
            raise ConfigError(f"regularizer {type(self).__name__}: temperature is {temperature}; it must be positive")
        self.temperature = temperature

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """τ² times the divergence from the teacher."""
        return knowledge_distillation(outputs.logits, module.teach(x).logits, self.temperature)


class NTD(KD):
    """Distillation of the probabilities of the not-true classes; see `lit_fed.losses.not_true_distillation`."""

    name = "ntd"

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """τ² times the divergence over the C − 1 not-true classes."""
        return not_true_distillation(outputs.logits, module.teach(x).logits, y, self.temperature)


class LD(Regularizer):
    """Mean squared error between the logits, over batch and classes.

    Kim, Oh, Kim, Cho, Yun: "Comparing Kullback-Leibler Divergence and Mean Squared Error Loss in Knowledge
    Distillation", IJCAI 2021.
    """

    name = "ld"

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """The mean over B × C."""
        return F.mse_loss(outputs.logits, module.teach(x).logits)


class FD(Regularizer):
    """Distance between the raw features; see `lit_fed.losses.feature_distillation`."""

    name = "fd"
    uses_features = True

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        """The mean over B × d."""
        taught = module.teach(x)
        assert outputs.features is not None
        assert taught.features is not None
        return feature_distillation(outputs.features, taught.features)


REGULARIZERS: dict[str, type[Regularizer]] = {kind.name: kind for kind in (Prox, KD, NTD, LD, FD)}
"""Regularizers by the names they are logged and configured as."""
