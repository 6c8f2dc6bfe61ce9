"""Losses as pure functions of tensors."""

from lit_fed.losses.terms import (
    balanced_softmax,
    calibrated_cross_entropy,
    decorrelation,
    disagreement,
    diversity,
    dot_regression,
    ensemble_cross_entropy,
    feature_distillation,
    gated_cross_entropy,
    knowledge_distillation,
    model_contrast,
    not_true_distillation,
    proximal,
    resolution_distillation,
    restricted_softmax,
)

__all__ = [
    "balanced_softmax",
    "calibrated_cross_entropy",
    "decorrelation",
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
    "resolution_distillation",
    "restricted_softmax",
]
