"""Losses as pure functions of tensors."""

from lit_fed.losses.contrast import model_contrast
from lit_fed.losses.distillation import knowledge_distillation, not_true_distillation
from lit_fed.losses.proximal import proximal

__all__ = ["knowledge_distillation", "model_contrast", "not_true_distillation", "proximal"]
