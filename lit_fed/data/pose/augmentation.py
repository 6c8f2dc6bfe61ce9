"""Random boxes to train on: shifted, cut to half a body, scaled, rotated, mirrored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lit_fed.checks import check_range

_HALF_BODY_MARGIN = 1.5  # of the joints' box, as in the public code


@dataclass(frozen=True)
class PoseAugmentation:
    """Random changes of a person's box for training, equal at all resolutions of a sample.

    The defaults and the order follow ViTPose's and RAF's public code: shift, half body, scale, rotation, flip.

    Args:
        scale: Scale the box by 1 + scale·z, z standard normal, within 1 ± scale.
        rotation: Rotate the picture by rotation·z degrees, within ± 2·rotation.
        rotation_probability: Probability of a rotation.
        flip: Probability of mirroring, which swaps left and right joints.
        shift: Move the box by up to this share of its size, uniformly, along x and along y.
        shift_probability: Probability of a shift.
        half_body: Probability of showing the joints of the upper or the lower half of the body only, of persons with
            more than `half_body_joints` visible.
        half_body_joints: See `half_body`.

    Raises:
        ConfigError: A value is out of range.
    """

    scale: float = 0.25
    rotation: float = 30.0
    rotation_probability: float = 0.6
    flip: float = 0.5
    shift: float = 0.12
    shift_probability: float = 0.3
    half_body: float = 0.3
    half_body_joints: int = 8

    def __post_init__(self) -> None:
        for entry in fields(self):
            most = {"rotation": None, "half_body_joints": None, "scale": 0.99}.get(entry.name, 1)
            check_range(f"data.augmentation.{entry.name}", getattr(self, entry.name), least=0, most=most)

    def draw(
        self,
        people: Mapping[str, Tensor],
        upper: Sequence[bool],
        aspect: float,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Draw a box for each of n persons.

        Args:
            people: ``keypoints`` (n, K, 2), ``visible`` (n, K), ``centre`` (n, 2) and ``extent`` (n,), in pixels of the
                image, on the CPU.
            upper: Whether each joint belongs to the upper half, K.
            aspect: Width of a picture divided by its height.
            generator: A CPU generator, which is advanced; None for torch's own.

        Returns:
            ``centre`` (n, 2), ``extent`` (n,), ``rotation`` (n,) in radians and ``flip`` (n,), 0 or 1.
        """
        count = len(people["extent"])
        normal = torch.randn(2, count, generator=generator)
        uniform = torch.rand(7, count, generator=generator)
        centre, extent = people["centre"], people["extent"]
        moved = (uniform[0] < self.shift_probability).float() * self.shift * extent
        box = torch.stack([moved * aspect, moved], dim=1)
        centre = centre + (2 * uniform[1:3].T - 1) * box
        if self.half_body:
            wanted = uniform[3] < self.half_body
            centre, extent = self._half_body(people, upper, aspect, wanted, uniform[4] < 0.5, centre, extent)
        extent = extent * (1 + self.scale * normal[0]).clamp(1 - self.scale, 1 + self.scale)
        degrees = (self.rotation * normal[1]).clamp(-2 * self.rotation, 2 * self.rotation)
        turned = uniform[5] < self.rotation_probability
        return {
            "centre": centre,
            "extent": extent,
            "rotation": torch.where(turned, degrees * (math.pi / 180), 0.0),
            "flip": (uniform[6] < self.flip).float(),
        }

    def _half_body(
        self,
        people: Mapping[str, Tensor],
        upper: Sequence[bool],
        aspect: float,
        wanted: Tensor,
        prefers_upper: Tensor,
        centre: Tensor,
        extent: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Boxes around half of the body if wanted and joints suffice, else the given boxes."""
        points, visible = people["keypoints"], people["visible"] > 0
        halves = torch.tensor(upper)
        above, below = visible & halves, visible & ~halves
        # The drawn half if it has three joints or more, else the lower, else the upper.
        use_above = (prefers_upper & (above.sum(1) > 2)) | (below.sum(1) <= 2)
        chosen = torch.where(use_above[:, None], above, below).unsqueeze(2)
        number = chosen.sum(1)  # (n, 1)
        middle = (points * chosen).sum(1) / number.clamp_min(1)
        low = torch.where(chosen, points, torch.inf).amin(1)
        high = torch.where(chosen, points, -torch.inf).amax(1)
        width, height = (high - low).unbind(1)
        size = torch.maximum(height, width / aspect) * _HALF_BODY_MARGIN
        taken = wanted & (visible.sum(1) > self.half_body_joints) & (number[:, 0] >= 2) & (size > 1)
        return torch.where(taken[:, None], middle, centre), torch.where(taken, size, extent)


FLIP_ONLY = PoseAugmentation(scale=0.0, rotation=0.0, shift=0.0, half_body=0.0)
"""Mirrors every second picture on average, and nothing else."""
