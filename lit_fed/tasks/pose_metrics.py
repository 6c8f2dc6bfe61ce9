"""The share of joints found, as torchmetrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError


class PCK(Metric):
    r"""The share of visible joints found: :math:`\|\hat p - p\| \le t\,l`, in percent.

    Yang, Ramanan: "Articulated Human Detection with Flexible Mixtures of Parts", TPAMI 2013. The length l is a person's
    head or torso length, or a side of its box. Joints count equally, so joints visible more often weigh more, which is
    MPII's mean. Persons of unknown length (NaN) do not count.

    Args:
        threshold: t, above 0.
        excluded: Joints that do not count.
        kwargs: See torchmetrics' ``Metric``.

    Raises:
        ConfigError: The threshold is out of range.
    """

    higher_is_better = True
    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self, threshold: float = 0.5, excluded: Sequence[int] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range(f"{type(self).__name__}.threshold", threshold, above=0)
        self.threshold = threshold
        self.excluded = tuple(excluded)
        for name in ("correct", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, predicted: Tensor, keypoints: Tensor, visible: Tensor, length: Tensor) -> None:
        """Count predicted and true joints (B, K, 2) in pixels, `visible` (B, K) above 0, by l (B,) in pixels.

        Raises:
            ConfigError: An excluded joint does not exist.
        """
        counts = self._counts(visible, length)
        distance = (predicted - keypoints).norm(dim=-1)
        self.correct += ((distance <= self.threshold * length[:, None]) & counts).sum()
        self.total += counts.sum()

    def distances(self, predicted: Tensor, keypoints: Tensor, visible: Tensor, length: Tensor) -> Tensor:
        """Distances in units of l, (B, K); NaN for joints that do not count."""
        distance = (predicted - keypoints).norm(dim=-1) / length[:, None]
        return torch.where(self._counts(visible, length), distance, torch.nan)

    def _counts(self, visible: Tensor, length: Tensor) -> Tensor:
        """Whether each joint counts, (B, K)."""
        counts = (visible > 0) & length.isfinite()[:, None]
        if self.excluded:
            if not all(0 <= joint < counts.shape[1] for joint in self.excluded):
                name, last = type(self).__name__, counts.shape[1] - 1
                raise ConfigError(f"{name}.excluded is {list(self.excluded)}; joints are 0 … {last}")
            counts[:, list(self.excluded)] = False
        return counts

    @override
    def compute(self) -> Tensor:
        """The share in percent, 0-d; NaN without any joint."""
        return 100.0 * self.correct / self.total


class PCKh(PCK):
    """`PCK` by the length of the head, as on MPII: 0.6 of the diagonal of the head's box.

    Andriluka, Pishchulin, Gehler, Schiele: "2D Human Pose Estimation: New Benchmark and State of the Art Analysis",
    CVPR 2014. MPII does not count pelvis and thorax.

    Args:
        threshold: Share of the head's length, above 0.
        excluded: Joints that do not count.
    """

    def __init__(self, threshold: float = 0.5, excluded: Sequence[int] = (6, 7)) -> None:
        super().__init__(threshold, excluded)

    @override
    def update(self, predicted: Tensor, keypoints: Tensor, visible: Tensor, boxes: Tensor) -> None:
        """Count joints by two opposite corners of each head's box, (B, 2, 2); see `PCK.update`."""
        super().update(predicted, keypoints, visible, 0.6 * (boxes[:, 1] - boxes[:, 0]).norm(dim=-1))


def joint_kinds(names: Sequence[str]) -> dict[str, list[int]]:
    """The joints of each kind: names without left, right, l or r, in lower case, in the order of the joints."""
    found: dict[str, list[int]] = {}
    for joint, name in enumerate(names):
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("left", "right", "l", "r", "")]
        found.setdefault("_".join(words) or name.lower(), []).append(joint)
    return found
