"""Warps from an image with a person in a box to a picture at any resolution, and random boxes to train on.

The box's top and bottom edges become the picture's at every size: all levels show the same field, and a point at a
third of one picture's height is at a third of every other's. A picture wider or narrower than the box shows more or
less to the sides, undistorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fed.arguments import checked_class
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError

Size = tuple[int, int]
"""(height, width) in pixels."""
Interpolation = Literal["bilinear", "area", "bicubic"]


class Means(NamedTuple):
    """The downsampling of an image to a picture.

    The image shrinks by a factor of `whole`, by means of squares; a pixel is then the mean of `points` bilinear values
    per axis. If the product of both is the ratio of image to picture, a pixel is the mean of the pixels it covers.
    """

    whole: int = 1
    points: int = 1


_MIDDLE = Means()


@dataclass(frozen=True)
class Boxes:
    """The box of each picture of a batch.

    Args:
        centre: Pixel (x, y) of the image in the picture's middle, shape (B, 2).
        extent: Height of the picture in the image's pixels, shape (B,).
        rotation: Rotation of the picture in radians, shape (B,); None for none.
        flip: 1 to mirror the picture, else 0, shape (B,); None mirrors none.
    """

    centre: Tensor
    extent: Tensor
    rotation: Tensor | None = None
    flip: Tensor | None = None

    def matrix(self) -> Tensor:
        """From offsets in an upright picture to offsets in the image, both in the image's pixels, shape (B, 2, 2)."""
        angle = torch.zeros_like(self.extent) if self.rotation is None else self.rotation
        cosine, sine = angle.cos(), angle.sin()
        side = torch.ones_like(cosine) if self.flip is None else 1 - 2 * self.flip
        # Rotated first, then mirrored.
        return torch.stack([side * cosine, -side * sine, sine, cosine], dim=1).view(-1, 2, 2)

    def pictures(self, images: Tensor, size: Size, means: Means = _MIDDLE) -> Tensor:
        """Cut pictures (B, C, H, W) out of images (B, C, h, w), floating point; black outside of an image.

        `means` is the downsampling; by default a pixel is the bilinear value in its middle.
        """
        height, width = size
        if means.whole > 1:
            beyond = (-images.shape[3] % means.whole, -images.shape[2] % means.whole)
            images = _block_means(F.pad(images, (0, beyond[0], 0, beyond[1]), mode="replicate"), means.whole)
        # From the picture's −1 … 1 to the image's −1 … 1, edge to edge. Sizes stay Python numbers, as tensors would
        # have to move to the device in every step.
        whole = (images.shape[3] * means.whole, images.shape[2] * means.whole)
        reach = torch.stack([self.extent * (width / height), self.extent], dim=1)
        turned, middle = self.matrix() * reach[:, None, :], 2 * self.centre + 1
        turn = torch.stack([turned[:, axis] / whole[axis] for axis in (0, 1)], dim=1)
        shift = torch.stack([middle[:, axis] / whole[axis] - 1 for axis in (0, 1)], dim=1)
        across, down = (_middles(side * means.points, images.device) for side in (width, height))
        # As torch's affine_grid, in a quarter of its time: a sum of a column's and a row's part.
        columns = across[:, None] * turn[:, None, None, :, 0]  # (B, 1, W, 2)
        rows = down[:, None, None] * turn[:, None, None, :, 1] + shift[:, None, None]  # (B, H, 1, 2)
        fine = F.grid_sample(images, rows + columns, mode="bilinear", padding_mode="zeros", align_corners=False)
        return fine if means.points == 1 else _block_means(fine, means.points)

    def points(self, points: Tensor, size: Size) -> Tensor:
        """Points of the images (B, K, 2) as points of pictures of a size (H, W), in pixels (x, y).

        Mirroring does not swap left and right joints.
        """
        height, width = size
        # The matrix is orthogonal: its transpose is its inverse.
        upright = (points - self.centre.unsqueeze(1)) @ self.matrix() * self.zoom(size)[:, None, None]
        return torch.stack([upright[..., 0] + (width / 2 - 0.5), upright[..., 1] + (height / 2 - 0.5)], dim=-1)

    def zoom(self, size: Size) -> Tensor:
        """Pixels of the picture per pixel of the image, shape (B,)."""
        return size[0] / self.extent


class PoseView:
    """Shows a batch of persons at one resolution, and in training at lower resolutions too.

    Batches are pairs: of each person ``canvas`` (B, 3, h, w) uint8, its ``origin`` (B, 2) in the image, ``centre`` and
    ``extent`` of the box in it, and in training ``rotation`` and ``flip``; and the truth, ``keypoints``, ``visible``,
    ``head_size``, ``area`` and ``image_id``, or the positions in the public set.

    Args:
        sizes: (H, W) of each level, the highest first.
        means: The downsampling of each level.
        normalize: From values of 0 … 255 to the model's inputs.
        flip_order: The joint in each joint's place in a mirror.
        shown_as: (H, W) to upscale the pictures to; None for none.
        interpolation: The upscaling's interpolation.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        means: Sequence[Means],
        normalize: Callable[[Tensor], Tensor],
        flip_order: Sequence[int],
        shown_as: Size | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self._sizes, self._means, self._normalize = tuple(sizes), tuple(means), normalize
        self._flip_order = torch.tensor(flip_order)
        self._shown_as, self._interpolation = shown_as, interpolation

    def __call__(self, batch: tuple[Mapping[str, Tensor], Any]) -> Any:
        """The task's batch; see `PoseDataModule`."""
        person, truth = batch
        training = "flip" in person
        boxes = Boxes(person["centre"], person["extent"], person.get("rotation"), person.get("flip"))
        images = person["canvas"].float()
        if isinstance(truth, Tensor):
            return self._picture(images, boxes, 0), truth
        if training:
            truth = self._mirrored(truth, person["flip"])
            top, *lower = (self._level(images, boxes, truth, level) for level in range(len(self._sizes)))
            return top | {"levels": lower}
        top = self._level(images, boxes, truth, 0)
        zoom = boxes.zoom(self._shown_as or self._sizes[0])
        return top | {
            "levels": [],
            "center": boxes.centre + person["origin"],
            "scale": 1 / zoom,
            "area": truth["area"] * zoom**2,
            "image_id": truth["image_id"],
        }

    def _level(self, images: Tensor, boxes: Boxes, truth: Mapping[str, Tensor], level: int) -> dict[str, Tensor]:
        size = self._shown_as or self._sizes[level]
        return {
            "image": self._picture(images, boxes, level),
            "keypoints": boxes.points(truth["keypoints"], size),
            "visible": truth["visible"],
            "head_size": truth["head_size"] * boxes.zoom(size),
        }

    def _picture(self, images: Tensor, boxes: Boxes, level: int) -> Tensor:
        pictures = self._normalize(boxes.pictures(images, self._sizes[level], self._means[level]))
        if self._shown_as is None:
            return pictures
        return F.interpolate(pictures, self._shown_as, mode=self._interpolation)

    def _mirrored(self, truth: Mapping[str, Tensor], flip: Tensor) -> dict[str, Tensor]:
        """The truth with left and right joints swapped in mirrored pictures."""
        if self._flip_order.device != flip.device:
            self._flip_order = self._flip_order.to(flip.device)
        mirrored = dict(truth)
        for name in ("keypoints", "visible"):
            values = truth[name]
            shape = (-1,) + (1,) * (values.dim() - 1)
            mirrored[name] = torch.where(flip.view(shape) > 0, values.index_select(1, self._flip_order), values)
        return mirrored


def checked_size(size: Sequence[int], setting: str) -> Size:
    """A resolution of a setting as (height, width)."""
    if len(size) != 2 or not all(side >= 1 for side in size):
        raise ConfigError(f"data.{setting} has {list(size)}; it must be [height, width], both at least 1 pixel")
    return int(size[0]), int(size[1])


def _middles(count: int, device: torch.device) -> Tensor:
    """The middles of `count` equal parts of −1 … 1."""
    return (2 * torch.arange(count, device=device) + 1) / count - 1


def _block_means(images: Tensor, side: int) -> Tensor:
    """Means of squares, in a fifth of the time of `avg_pool2d`; sides must be multiples."""
    rows = sum((images[:, :, start::side] for start in range(1, side)), start=images[:, :, ::side])
    return sum((rows[..., start::side] for start in range(1, side)), start=rows[..., ::side]) / side**2


_HALF_BODY_MARGIN = 1.5  # of the joints' box, as in the public code


@checked_class
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
