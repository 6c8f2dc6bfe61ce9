"""Losses as pure functions of tensors."""

from lit_fed.losses.heatmaps import MSRA, UDP, HeatmapCodec, dark, gaussian_maps, peaks, quarter_offset
from lit_fed.losses.terms import (
    balanced_softmax,
    calibrated_cross_entropy,
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
    "MSRA",
    "UDP",
    "HeatmapCodec",
    "balanced_softmax",
    "calibrated_cross_entropy",
    "dark",
    "disagreement",
    "diversity",
    "dot_regression",
    "ensemble_cross_entropy",
    "feature_distillation",
    "gated_cross_entropy",
    "gaussian_maps",
    "knowledge_distillation",
    "model_contrast",
    "not_true_distillation",
    "peaks",
    "proximal",
    "quarter_offset",
    "resolution_distillation",
    "restricted_softmax",
]
