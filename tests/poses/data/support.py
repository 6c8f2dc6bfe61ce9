"""What tests of pose data share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_fed.poses import PoseAugmentation

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


def image(folder: Path, name: str, size: tuple[int, int], seed: int) -> np.ndarray:
    """Noise, as a file without losses."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name)
    return pixels


POINTS = np.array([[20.0 + joint, 30.0 + 2 * joint] for joint in range(16)])


def mpii_row(**changes: Any) -> dict[str, Any]:
    """A person of scale .2, 40 pixels tall, whose right ankle cannot be seen."""
    joints = POINTS.tolist()
    joints[0] = [-1.0, -1.0]
    row = {"image": "a.png", "center": [31.0, 41.0], "scale": 0.2, "joints": joints, "joints_vis": [0] + [1] * 15}
    return row | changes


def mpii_files(root: Path, rows: list[dict[str, Any]]) -> None:
    """Files in the form that HRNet made common: these persons to train and to test on, all on one image."""
    image(root / "images", "a.png", (80, 60), 0)
    (root / "annot").mkdir(exist_ok=True)
    for name in ("train", "valid"):
        (root / "annot" / f"{name}.json").write_text(json.dumps(rows))
