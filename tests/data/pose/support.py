"""What tests of pose data share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_fed.data import PoseAugmentation

STILL = PoseAugmentation(scale=0.0, rotation=0.0, flip=0.0, shift=0.0, half_body=0.0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(batch: Any) -> list[Tensor]:
    """Every tensor of a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for value in (batch.values() if isinstance(batch, dict) else batch) for tensor in flat(value)]


def same(first: Any, second: Any) -> bool:
    ones, others = flat(list(first)), flat(list(second))
    return len(ones) == len(others) and all(
        torch.equal(a, b) or torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(ones, others, strict=True)
    )
