"""Joints as the outputs of a network that leaves lit_fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lit_fed.losses import HeatmapCodec


class JointOutputs(nn.Module):
    """Joints of pictures by a network's heatmaps.

    Args:
        codec: Conversion between heatmaps and points.
        flip_pairs: Joints that swap in a mirror.
        flip_test: Take the mean of the heatmaps of a picture and its mirror image.
        names: Names of the joints; None if they have no names.
        edges: Joints to connect, by number.
        cell: Pixels of which height and width must be multiples; `DeployedNetwork` pads pictures.
    """

    def __init__(
        self,
        codec: HeatmapCodec,
        flip_pairs: Sequence[tuple[int, int]],
        flip_test: bool,
        names: Sequence[str] | None,
        edges: Sequence[tuple[int, int]],
        cell: int,
    ) -> None:
        super().__init__()
        self.codec, self.flip_pairs, self.flip_test, self.cell = codec, flip_pairs, flip_test, cell
        self.facts: dict[str, Any] = {
            "joints": None if names is None else list(names),
            "edges": [list(edge) for edge in edges],
        }

    def heatmaps(self, network: nn.Module, images: Tensor) -> Tensor:
        """Heatmaps (B, K, h, w) of normalised images (B, C, H, W)."""
        if self.flip_test:
            return self.codec.flip_tested(network, images, self.flip_pairs)
        heatmaps: Tensor = network(images)
        return heatmaps

    def forward(self, network: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """``keypoints`` (B, K, 2) as (x, y) in pixels of the images, and ``score`` (B, K), the heatmaps' peaks."""
        keypoints, score = self.codec.decode(self.heatmaps(network, images), images.shape[2:])
        return {"keypoints": keypoints, "score": score}
