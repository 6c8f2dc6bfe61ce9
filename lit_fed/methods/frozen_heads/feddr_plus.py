"""Dot-regression and FedDr+.

Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for Federated
Learning", 2024.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import dot_regression
from lit_fed.methods.frozen_heads.frozen import NewHead
from lit_fed.methods.regularizers import FD, logits
from lit_fed.networks import CosineHead, simplex_etf


class SimplexHead(CosineHead):
    """Cosines to a frozen simplex ETF.

    Args:
        num_features: d.
        num_classes: C.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(simplex_etf(num_classes, num_features))


class DotRegression(NewHead):
    r"""Features are pulled towards their class in a frozen simplex ETF: :math:`\tfrac12 (\cos(f, v_y) - 1)^2` (Eq. 2).

    Logits are the cosines, so the prediction is the class with the largest one.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Note:
        A test logs the task's own loss: for a `lit_fed.Classifier`, ``test/loss`` is the cross-entropy of the softmax
        over cosines, which lie in [−1, 1], so it stays well above 0. For features after a ReLU, cosines with a class of
        a random frame of 10 or more classes stay below about 0.71, and the objective above about 0.043.
    """

    new_head = SimplexHead

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """Dot-regression."""
        return {"dr": dot_regression(logits(client, batch), client.targets(batch))}


class FedDrPlus(DotRegression):
    r"""Dot-regression and distillation of the downloaded model's features (Eq. 4).

    :math:`\beta \tfrac12 (\cos(f, v_y) - 1)^2 + (1 - \beta) \tfrac1d \|f - f^g\|^2`, the second term as in
    `lit_fed.losses.feature_distillation`. Under a plain ``lightning.Trainer`` it is `DotRegression`.

    Args:
        beta: β; 1 is `DotRegression`.
        fine_tuning_beta: β in fine-tuning for a test (`lit_fed.protocols.PersonalTest`), by default the same. Table 8
            has both stages with and without distillation: 1 is its "FT (DR)", and ``beta=1, fine_tuning_beta=0.9`` is
            dot-regression fine-tuned with FedDr+.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a β outside [0, 1].

    Note:
        The paper does not state which parts fine-tuning freezes and distils; here, as in training, the head is frozen
        and the teacher is the downloaded global model.
    """

    needs = DotRegression.needs | FD.needs

    def __init__(self, beta: float = 0.9, fine_tuning_beta: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        fine_tuning_beta = beta if fine_tuning_beta is None else fine_tuning_beta
        check_range("algorithm.beta", beta, least=0, most=1)
        check_range("algorithm.fine_tuning_beta", fine_tuning_beta, least=0, most=1)
        self.distillation, self.fine_tuning = (
            FD(weight=1 - value, objective_weight=value) for value in (beta, fine_tuning_beta)
        )

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """Dot-regression and, weighed by the stage's β, the distance from the downloaded features."""
        distillation = self.distillation if client.fine_tuning is None else self.fine_tuning
        return distillation.terms(client, batch, super().objective)
