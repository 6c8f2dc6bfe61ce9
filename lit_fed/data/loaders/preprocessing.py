"""Preprocessing as modules that travel with the network.

A checkpoint holds the *steps*, mappings of primitives from `Normalize` and `Resize`; `rebuild` makes a module of them
that needs neither the data nor their files, and works with ``torch.export``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lit_fed.data.loaders.transforms import Normalize, Resize, Step, scale_and_shift

__all__ = ["Normalized", "Resized", "rebuild"]


class Normalized(nn.Module):
    """`Normalize` as a module."""

    scale: Tensor
    shift: Tensor

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.register_buffer("scale", normalize.scale)
        self.register_buffer("shift", normalize.shift)

    def forward(self, batch: Tensor) -> Tensor:
        """(B, C, …), uint8 or floating point, to float32 of the same shape."""
        shape = (-1,) + (1,) * (batch.dim() - 2)
        return scale_and_shift(batch, self.scale.reshape(shape), self.shift.reshape(shape))


class Resized(nn.Module):
    """`Resize` as a module."""

    def __init__(self, resize: Resize) -> None:
        super().__init__()
        self.resize = resize

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) floating point to (B, C, size, size)."""
        return self.resize(images)


def rebuild(steps: Sequence[Step]) -> nn.Sequential:
    """Steps as one module; no steps are the identity.

    Raises:
        TypeError: A step is unknown or malformed; also KeyError, ValueError and ConfigError.
    """
    modules: list[nn.Module] = []
    for step in steps:
        settings: dict[str, Any] = {key: value for key, value in step.items() if key != "step"}
        match step["step"]:
            case "normalize":
                modules.append(Normalized(Normalize(**settings)))
            case "resize":
                modules.append(Resized(Resize(**settings)))
            case other:
                raise ValueError(f"unknown step {other!r}")
    return nn.Sequential(*modules)
