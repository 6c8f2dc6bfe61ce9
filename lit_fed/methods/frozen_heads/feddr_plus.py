"""Dot-regression and FedDr+.

Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for Federated
Learning", 2024. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_fed.errors import ConfigError
from lit_fed.frozen import FrozenClassifier
from lit_fed.losses import dot_regression
from lit_fed.networks import CosineHead, Outputs, replace_classifier, simplex_etf
from lit_fed.regularizers import FD


class DotRegression(FrozenClassifier):
    r"""Features are pulled towards their class in a frozen simplex ETF: :math:`\tfrac12 (\cos(f, v_y) - 1)^2` (Eq. 2).

    Logits are the cosines, so the prediction is the class with the largest one.

    Args:
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Note:
        ``test/loss`` is the cross-entropy of the softmax over cosines, as for every classifier here; cosines lie in
        [−1, 1], so it stays well above 0. Where features are the output of a ReLU, no cosine with a class of a random
        frame of 10 or more gets far above 0.71, and the objective not below about 0.043.
    """

    def make_head(self) -> None:
        """A frozen simplex ETF over the features."""
        replace_classifier(
            self.network, lambda num_features, num_classes: CosineHead(simplex_etf(num_classes, num_features))
        )

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """Dot-regression."""
        return {"dr": dot_regression(outputs.logits, y)}


class FedDrPlus(DotRegression):
    r"""Dot-regression and distillation of the downloaded model's features (Eq. 4).

    :math:`\beta \tfrac12 (\cos(f, v_y) - 1)^2 + (1 - \beta) \tfrac1d \|f - f^g\|^2`, the second term as in
    `lit_fed.losses.feature_distillation`. Under a plain ``lightning.Trainer`` it is `DotRegression`.

    Args:
        beta: β; 1 is `DotRegression`.
        fine_tuning_beta: β where a model is fine-tuned for a test (`lit_fed.protocols.PersonalTest`), by default the
            same. Table 8 has both stages with and without distillation: 1 is its "FT (DR)", and ``beta=1,
            fine_tuning_beta=0.9`` is dot-regression fine-tuned with FedDr+.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a β outside [0, 1].

    Note:
        The paper does not say what fine-tuning freezes and distils; here it is the same as in training: the head is
        frozen and the teacher is the downloaded global model.
    """

    def __init__(self, beta: float = 0.9, fine_tuning_beta: float | None = None, **kwargs: Any) -> None:
        if fine_tuning_beta is None:
            fine_tuning_beta = beta
        for key, value in (("beta", beta), ("fine_tuning_beta", fine_tuning_beta)):
            if not 0 <= value <= 1:
                raise ConfigError(f"model.{key} is {value}; it must be between 0 and 1")
        super().__init__(**kwargs)
        self.beta, self.fine_tuning_beta = beta, fine_tuning_beta
        self.distillation = FD()
        self.regularizers.insert(0, self.distillation)
        self.on_train_start()

    def on_train_start(self) -> None:
        """Weigh the two terms by the stage's β."""
        fine_tuning = self.ctx is not None and self.ctx.fine_tuning is not None
        beta = self.fine_tuning_beta if fine_tuning else self.beta
        self.distillation.weight, self.distillation.objective_weight = 1 - beta, beta
