"""From an image with a person in a box to the picture a client sees, at any resolution.

The box's top and bottom edges become the picture's, whatever its size: levels show the same field, and a point that is
at a third of one picture's height is at a third of every other's. A picture wider or narrower than the box shows more
or less to the sides, undistorted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fed.errors import ConfigError

Size = tuple[int, int]
"""(height, width) in pixels."""
Interpolation = Literal["bilinear", "area", "bicubic"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "area", "bicubic")


class Means(NamedTuple):
    """How many of an image's pixels make one of a picture.

    First the image is made smaller by `whole`, by means of squares; of that the mean of `points` bilinear values each
    way makes a pixel. A picture's pixel is the mean of those it covers where both together are as much as the image is
    larger than the picture.
    """

    whole: int = 1
    points: int = 1


_MIDDLE = Means()


@dataclass(frozen=True)
class Boxes:
    """Where each picture of a batch is taken from.

    Args:
        centre: Pixel (x, y) of the image in the picture's middle, shape (B, 2).
        extent: Height of the picture in the image's pixels, shape (B,).
        rotation: By how much the picture is turned, in radians, shape (B,); None turns nothing.
        flip: 1 where the picture is mirrored, else 0, shape (B,); None mirrors nothing.
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
        # Turned first, then mirrored.
        return torch.stack([side * cosine, -side * sine, sine, cosine], dim=1).view(-1, 2, 2)

    def pictures(self, images: Tensor, size: Size, means: Means = _MIDDLE) -> Tensor:
        """Cut the pictures out of the images; black where a picture leaves its image.

        Args:
            images: (B, C, h, w) floating point.
            size: (H, W) of the pictures.
            means: What makes a pixel; none given takes the bilinear value in its middle.

        Returns:
            (B, C, H, W).
        """
        height, width = size
        if means.whole > 1:
            beyond = (-images.shape[3] % means.whole, -images.shape[2] % means.whole)
            images = _block_means(F.pad(images, (0, beyond[0], 0, beyond[1]), mode="replicate"), means.whole)
        # Over the picture from −1 to 1, to the image from −1 to 1, edge to edge. Sizes stay numbers: tensors of them
        # would have to be moved to the device in every step.
        whole = (images.shape[3] * means.whole, images.shape[2] * means.whole)
        reach = torch.stack([self.extent * (width / height), self.extent], dim=1)
        turned, middle = self.matrix() * reach[:, None, :], 2 * self.centre + 1
        turn = torch.stack([turned[:, axis] / whole[axis] for axis in (0, 1)], dim=1)
        shift = torch.stack([middle[:, axis] / whole[axis] - 1 for axis in (0, 1)], dim=1)
        across, down = (_middles(side * means.points, images.device) for side in (width, height))
        # As torch's affine_grid, in a quarter of its time: sums of what depends on the column and on the row alone.
        columns = across[:, None] * turn[:, None, None, :, 0]  # (B, 1, W, 2)
        rows = down[:, None, None] * turn[:, None, None, :, 1] + shift[:, None, None]  # (B, H, 1, 2)
        fine = F.grid_sample(images, rows + columns, mode="bilinear", padding_mode="zeros", align_corners=False)
        return fine if means.points == 1 else _block_means(fine, means.points)

    def points(self, points: Tensor, size: Size) -> Tensor:
        """Points of the image as points of the picture.

        Args:
            points: (B, K, 2), (x, y) in pixels of the images.
            size: (H, W) of the pictures.

        Returns:
            (B, K, 2) in pixels of the pictures; left and right are as they were.
        """
        height, width = size
        # The matrix is orthogonal: its transpose leads back.
        upright = (points - self.centre.unsqueeze(1)) @ self.matrix() * self.zoom(size)[:, None, None]
        return torch.stack([upright[..., 0] + (width / 2 - 0.5), upright[..., 1] + (height / 2 - 0.5)], dim=-1)

    def zoom(self, size: Size) -> Tensor:
        """Pixels of the picture per pixel of the image, shape (B,)."""
        return size[0] / self.extent


class PoseView:
    """Shows a batch of persons at one resolution, and when training at lower ones too.

    Batches are pairs: of each person ``canvas`` (B, 3, h, w) uint8, ``origin`` (B, 2) of it in the image, ``centre``
    and ``extent`` of the box in it, and when training ``rotation`` and ``flip``; and the truth, ``keypoints``,
    ``visible``, ``head_size``, ``area`` and ``image_id``, or the positions in the public set.

    Args:
        sizes: (H, W) of each level, the highest first.
        means: What makes a pixel of each level.
        normalize: From values of 0 … 255 to what a model sees.
        flip_order: Which joint takes each one's place in a mirror.
        shown_as: Scale the pictures to this (H, W) after all, as somebody would who has nothing better.
        interpolation: How they are scaled.
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
        """The batch as a task sees it; see `PoseDataModule`."""
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
        """Left joints in the place of right ones where a picture is mirrored."""
        if self._flip_order.device != flip.device:
            self._flip_order = self._flip_order.to(flip.device)
        mirrored = dict(truth)
        for name in ("keypoints", "visible"):
            values = truth[name]
            shape = (-1,) + (1,) * (values.dim() - 1)
            mirrored[name] = torch.where(flip.view(shape) > 0, values.index_select(1, self._flip_order), values)
        return mirrored


def checked_size(size: Sequence[int], setting: str) -> Size:
    """A resolution of a setting as (height, width).

    Raises:
        ConfigError: It is no pair of positive numbers.
    """
    if len(size) != 2 or not all(side >= 1 for side in size):
        raise ConfigError(f"data.{setting} has {list(size)}: a resolution is [height, width], both at least 1 pixel")
    return int(size[0]), int(size[1])


def _middles(count: int, device: torch.device) -> Tensor:
    """The middles of so many equal parts of −1 … 1."""
    return (2 * torch.arange(count, device=device) + 1) / count - 1


def _block_means(images: Tensor, side: int) -> Tensor:
    """Means of squares, in a fifth of the time of `avg_pool2d`; sides are multiples."""
    rows = sum((images[:, :, start::side] for start in range(1, side)), start=images[:, :, ::side])
    return sum((rows[..., start::side] for start in range(1, side)), start=rows[..., ::side]) / side**2
