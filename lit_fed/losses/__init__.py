"""Losses as pure functions of tensors."""

from lit_fed.losses.contrast import model_contrast
from lit_fed.losses.distillation import knowledge_distillation, not_true_distillation
from lit_fed.losses.frozen import balanced_softmax, dot_regression, feature_distillation
from lit_fed.losses.generation import disagreement, diversity, ensemble_cross_entropy, gated_cross_entropy
from lit_fed.losses.heatmaps import MSRA, UDP, HeatmapCodec, dark, gaussian_maps, peaks, quarter_offset
from lit_fed.losses.proximal import proximal
from lit_fed.losses.resolutions import resolution_distillation

__all__ = [
    "MSRA",
    "UDP",
    "HeatmapCodec",
    "balanced_softmax",
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
]
