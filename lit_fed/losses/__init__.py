"""Losses as pure functions of tensors."""

from lit_fed.losses.contrast import model_contrast
from lit_fed.losses.distillation import knowledge_distillation, not_true_distillation
from lit_fed.losses.frozen import balanced_softmax, dot_regression, feature_distillation
from lit_fed.losses.generation import disagreement, diversity, ensemble_cross_entropy, gated_cross_entropy
from lit_fed.losses.proximal import proximal

__all__ = [
    "balanced_softmax",
    "disagreement",
    "diversity",
    "dot_regression",
    "ensemble_cross_entropy",
    "feature_distillation",
    "gated_cross_entropy",
    "knowledge_distillation",
    "model_contrast",
    "not_true_distillation",
    "proximal",
]
