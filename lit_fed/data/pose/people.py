"""The persons of a data set: joints and boxes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fed.errors import ConfigError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class People:
    """Persons with their joints, in pixels (x, y) of their image; 0 is the centre of the first pixel.

    Args:
        keypoints: Joints, shape (n, K, 2); any finite value if not visible.
        visible: 1 for labelled joints, else 0, shape (n, K).
        head_size: PCKh's length in pixels, NaN if unknown, shape (n,).
        centre: Middle of the box, shape (n, 2).
        extent: Height of the box in pixels, shape (n,); its width follows from the resolution.
        area: Area in square pixels, for object key point similarity, NaN if unknown, shape (n,).
        image_id: Number of the image, shape (n,) int64.
        source: The persons' origin, for errors.
    """

    keypoints: Floats
    visible: Floats
    head_size: Floats
    centre: Floats
    extent: Floats
    area: Floats
    image_id: NDArray[np.int64]
    source: str = "the data set"

    def __len__(self) -> int:
        return len(self.keypoints)

    def checked(self, num_joints: int) -> People:
        """These persons, checked.

        Raises:
            ConfigError: There are no persons, an array has a wrong shape, or a person is unusable.
        """
        n = len(self.keypoints)
        if n == 0:
            raise ConfigError(f"{self.source} has no person with a visible joint; give at least one")
        shapes = {"keypoints": (n, num_joints, 2), "visible": (n, num_joints), "centre": (n, 2)}
        for name, array in self.arrays().items():
            wanted = shapes.get(name, (n,))
            if array.shape != wanted:
                raise ConfigError(f"{self.source}: {name} has shape {array.shape}; it must be {wanted}")
        for bad, what in (
            (~np.isfinite(self.keypoints).all((1, 2)), "a joint that is not finite"),
            (~np.isfinite(self.centre).all(1) | ~(self.extent > 0) | ~np.isfinite(self.extent), "a box without size"),
            (~(self.visible > 0).any(1), "no visible joint"),
        ):
            if bad.any():
                raise ConfigError(f"{self.source}: person {int(bad.argmax())} has {what}; correct or remove the person")
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}

    def tensors(self) -> dict[str, Tensor]:
        """All arrays as tensors, by name; they share memory."""
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.arrays().items()}
