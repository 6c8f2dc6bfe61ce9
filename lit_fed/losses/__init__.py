"""Losses as pure functions of tensors."""

from lit_fed.losses.proximal import proximal

__all__ = ["proximal"]
