"""The persons of a data set: where each one's joints are, and the box around each."""

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
    """Persons with their joints, in pixels (x, y) of the image that each is in; 0 is the centre of the first pixel.

    Args:
        keypoints: Shape (n, K, 2); any finite value where not visible.
        visible: 1 where a joint is labelled, else 0, shape (n, K).
        head_size: What distances are divided by for PCKh, in pixels, NaN where it is not known, shape (n,).
        centre: The middle of the box, shape (n, 2).
        extent: Height of the box in pixels, shape (n,); its width follows from the resolution it is shown at.
        area: The person's area in square pixels, for object key point similarity, NaN where it is not known,
            shape (n,).
        image_id: Which image, shape (n,) int64.
        source: Where the persons are from, for error messages.
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
        """The same, after checking that everything fits together.

        Raises:
            ConfigError: There is nobody, an array has another shape, or a person cannot be used.
        """
        n = len(self.keypoints)
        if n == 0:
            raise ConfigError(f"{self.source}: there is no person with a visible joint: give at least one")
        shapes = {"keypoints": (n, num_joints, 2), "visible": (n, num_joints), "centre": (n, 2)}
        for name, array in self.arrays().items():
            wanted = shapes.get(name, (n,))
            if array.shape != wanted:
                raise ConfigError(f"{self.source}: {name} has shape {array.shape}: it must be {wanted}")
        for bad, what in (
            (~np.isfinite(self.keypoints).all((1, 2)), "a joint that is not finite"),
            (~np.isfinite(self.centre).all(1) | ~(self.extent > 0) | ~np.isfinite(self.extent), "a box without size"),
            (~(self.visible > 0).any(1), "no visible joint"),
        ):
            if bad.any():
                raise ConfigError(f"{self.source}: person {int(bad.argmax())} has {what}: correct or remove the person")
        return self

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}

    def tensors(self) -> dict[str, Tensor]:
        """All arrays as tensors, by name; they share memory."""
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.arrays().items()}
