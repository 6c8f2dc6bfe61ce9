"""How many joints are found, as torchmetrics count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fed.errors import ConfigError


class PCK(Metric):
    r"""The share of visible joints that are found: those for which :math:`\|\hat p - p\| \le t\,l`, in percent.

    Yang, Ramanan: "Articulated Human Detection with Flexible Mixtures of Parts", TPAMI 2013. The length l is the
    person's: its head's, its torso's, or a side of its box. Joints count alike, so a joint that is seen more often
    weighs more, which is MPII's mean. A person whose length is not known (NaN) does not count.

    Args:
        threshold: t, above 0.
        excluded: Joints that do not count.
        kwargs: See torchmetrics' ``Metric``.

    Raises:
        ConfigError: If the threshold is not positive.
    """

    higher_is_better = True
    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self, threshold: float = 0.5, excluded: Sequence[int] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not threshold > 0:
            raise ConfigError(f"{type(self).__name__}: threshold is {threshold}; it must be above 0")
        self.threshold = threshold
        self.excluded = tuple(excluded)
        for name in ("correct", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, keypoints: Tensor, visible: Tensor, length: Tensor) -> None:
        """Count the joints of a batch.

        Args:
            predicted: Where joints are said to be, (B, K, 2) in pixels.
            keypoints: Where they are, (B, K, 2).
            visible: Above 0 for those that count, (B, K).
            length: l in pixels, (B,).

        Raises:
            ConfigError: If a joint is excluded that is not there.
        """
        counts = (visible > 0) & length.isfinite()[:, None]
        if self.excluded:
            if not all(0 <= joint < counts.shape[1] for joint in self.excluded):
                name, last = type(self).__name__, counts.shape[1] - 1
                raise ConfigError(f"{name}: excluded is {list(self.excluded)}, and the joints are 0 … {last}")
            counts[:, list(self.excluded)] = False
        distance = (predicted - keypoints).norm(dim=-1)
        self.correct += ((distance <= self.threshold * length[:, None]) & counts).sum()
        self.total += counts.sum()

    def compute(self) -> Tensor:
        """The share in percent, 0-d; NaN where no joint was counted."""
        return 100.0 * self.correct / self.total


class PCKh(PCK):
    """`PCK` of the length of the head, as on MPII: 0.6 of the diagonal of the head's box.

    Andriluka, Pishchulin, Gehler, Schiele: "2D Human Pose Estimation: New Benchmark and State of the Art Analysis",
    CVPR 2014. MPII does not count pelvis and thorax.

    Args:
        threshold: Share of the head's length, above 0.
        excluded: Joints that do not count.
    """

    def __init__(self, threshold: float = 0.5, excluded: Sequence[int] = (6, 7)) -> None:
        super().__init__(threshold, excluded)

    def update(self, predicted: Tensor, keypoints: Tensor, visible: Tensor, boxes: Tensor) -> None:
        """Count the joints of a batch.

        Args:
            predicted: Where joints are said to be, (B, K, 2) in pixels.
            keypoints: Where they are, (B, K, 2).
            visible: Above 0 for those that count, (B, K).
            boxes: Two opposite corners of each head's box, (B, 2, 2).
        """
        super().update(predicted, keypoints, visible, 0.6 * (boxes[:, 1] - boxes[:, 0]).norm(dim=-1))
