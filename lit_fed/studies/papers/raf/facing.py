"""Classification by the network of a `KeypointEstimator`, to compare both by what features know of the resolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lit_fed.errors import ConfigError
from lit_fed.poses.keypoint_estimator import KeypointEstimator
from lit_fed.poses.on_maps import Batch, OnMaps


class Facing(KeypointEstimator):
    r"""Whether a person is seen from the front: the right shoulder is on the picture's left.

    The logit is the mean of the network's first map over all places, so that everything but the loss is as in pose
    estimation; of a network without maps, such as timm's ``resnet50``, it is the first output. :math:`\ell` is its
    binary cross-entropy. Logs ``loss`` and, in evaluation, ``acc``.

    Args:
        kwargs: The settings of `KeypointEstimator`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        names = self.joint_names or ()
        if missing := {"right_shoulder", "left_shoulder"}.difference(names):
            raise ConfigError(f"model.joint_names lacks {min(missing)}, which tells front from back; give other data")
        self._right, self._left = names.index("right_shoulder"), names.index("left_shoulder")
        self.metrics, self.ranges = {"acc": "max", "loss": "min"}, {"acc": (0.0, 1.0)}

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        logits, _, loss = self._found(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(logits))
        return {"loss": loss, "logits": logits}

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge(batch, "test")

    @override
    def test_figures(self, batches: Mapping[str, Batch]) -> dict[str, Figure]:
        return OnMaps.test_figures(self, batches)  # without joints

    def _judge(self, batch: Batch, stage: str) -> None:
        logits, front, loss = self._found(batch)
        self.log(f"{stage}/loss", loss, batch_size=len(logits))
        self.log(f"{stage}/acc", ((logits > 0) == front.bool()).float().mean(), batch_size=len(logits))

    def _found(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B,), truth (B,), and the loss."""
        logits = self(batch["image"])[:, :1].flatten(1).mean(dim=1)
        across = batch["keypoints"][..., 0]
        front = (across[:, self._right] < across[:, self._left]).to(logits.dtype)
        return logits, front, F.binary_cross_entropy_with_logits(logits, front)
