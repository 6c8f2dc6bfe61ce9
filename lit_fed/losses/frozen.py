"""Losses of methods whose classifier is frozen."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dot_regression(cosines: Tensor, labels: Tensor) -> Tensor:
    r"""Dot-regression, :math:`\tfrac12 (\cos(f, v_y) - 1)^2`, a mean over the batch.

    Yang, Chen, Li, Xie, Lin, Tao: "Inducing Neural Collapse in Imbalanced Learning: Do We Really Need a Learnable
    Classifier at the End of Deep Neural Network?", NeurIPS 2022; Kim et al.: "FedDr+", 2024, Eq. 2. It keeps the pull
    towards the own class in the cross-entropy's gradient and drops the push from the other classes (Proposition 1).

    Args:
        cosines: Of features and classes, (B, C), differentiated through.
        labels: Classes (B,).

    Returns:
        A 0-d tensor between 0 and 2.
    """
    own = cosines.gather(1, labels.unsqueeze(1)).squeeze(1)
    return 0.5 * (own - 1).square().mean()


def feature_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    r"""Distance between raw features, :math:`\tfrac1d \|f - f^g\|_2^2`, a mean over the batch.

    Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for Federated
    Learning", 2024, Section 3.2.

    Args:
        student: Features (B, d), differentiated through.
        teacher: Features (B, d), constants.

    Returns:
        A 0-d tensor: the mean over B × d.
    """
    return F.mse_loss(student, teacher.detach())


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor, gamma: float = 1.0) -> Tensor:
    r"""Balanced softmax, :math:`-\log \frac{n_y^\gamma e^{z_y}}{\sum_c n_c^\gamma e^{z_c}}`, a mean over the batch.

    Ren, Yu, Sheng, Ma, Zhao, Yi, Li: "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020;
    with the exponent in Li et al.: "No Fear of Classifier Biases", ICCV 2023 (FedETF).

    Args:
        logits: (B, C), differentiated through.
        labels: Classes (B,).
        counts: Training samples of each class, (C,); an absent class has weight 0 and gets no gradient.
        gamma: γ; 0 is the cross-entropy over all classes, including absent ones.

    Returns:
        A 0-d tensor; infinite for a label whose class has no samples.
    """
    return F.cross_entropy(logits + counts.to(logits.dtype).pow(gamma).log(), labels)
