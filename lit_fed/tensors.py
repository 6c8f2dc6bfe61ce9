"""Nested tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, without waiting for it."""
    found = torch.tensor(values)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nested value."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(entry, function) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(entry, function) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(entry, function) for entry in value)
    return value
