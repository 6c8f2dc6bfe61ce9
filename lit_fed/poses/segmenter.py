"""Segmentation of persons' parts, a second dense task on the data of key points, as a plain LightningModule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.poses.metrics import joint_kinds
from lit_fed.poses.on_maps import Batch, OnMaps
from lit_fed.tasks.on_network import OnNetwork


class Segmenter(OnMaps, OnNetwork):
    r"""Cross-entropy of every pixel's class, :math:`\ell = \frac{1}{B h w} \sum_p \mathrm{CE}(f_p(x), y_p)`.

    A batch is that of `lit_fed.poses.KeypointEstimator`. Class 0 is the background; every kind of edge of the skeleton,
    such as ankle to knee, left and right alike, is a class, in the order of the edges. A pixel belongs to the nearest
    edge between visible joints, if that is within `width` of the person's ``head_size``.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss`` and
    ``miou``, the mean over classes of intersection over union, by torchmetrics from the pixels of all batches.

    Args:
        network: Name of a network (of `POSE_NETWORKS`), or a module from images to (B, classes, H/s, W/s); its
            attribute ``stride`` is s.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        skeleton_edges: Pairs of joints; null to take them from the data.
        joint_names: Names of the joints; null for the data's names.
        in_channels: Channels of an image; null to take it from the data.
        input_shape: Shape of the largest images, channels first; null to take it from the data.
        width: Half of a limb's width, in lengths of the head.
        kwargs: The network's settings, see `OnNetwork`.

    Raises:
        ConfigError: There are no edges or names, or a setting is out of range.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"miou": "max", "loss": "min"}
    """Metrics logged in evaluation, the most important first, with the better direction."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"miou": (0.0, 1.0), "loss": (0.0, math.inf)}
    """Least and largest value of each metric, beyond which a server rejects a node's answer."""

    def __init__(
        self,
        network: str | nn.Module = "pose_cnn",
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        skeleton_edges: Sequence[Sequence[int]] | None = None,
        joint_names: Sequence[str] | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        width: float = 0.35,
        **kwargs: Any,
    ) -> None:
        if not skeleton_edges or not joint_names:
            raise ConfigError("Segmenter needs model.skeleton_edges and model.joint_names; give both")
        kind_of = {joint: kind for kind, joints in joint_kinds(joint_names).items() for joint in joints}
        kinds = [tuple(sorted(kind_of[joint] for joint in edge)) for edge in skeleton_edges]
        self.parts = ["background", *(" to ".join(kind) for kind in dict.fromkeys(kinds))]
        """The classes."""
        super().__init__(network, optimizer, lr_scheduler, len(self.parts), in_channels or 3, input_shape, **kwargs)
        self.width = check_range("model.width", width, above=0)
        places = list(dict.fromkeys(kinds))
        self.register_buffer("edges", torch.tensor([list(edge) for edge in skeleton_edges]), persistent=False)
        self.register_buffer("classes", torch.tensor([1 + places.index(kind) for kind in kinds]), persistent=False)
        self.miou = MulticlassJaccardIndex(len(self.parts))

    edges: Tensor
    classes: Tensor

    def masks(self, batch: Batch) -> Tensor:
        """Classes (B, h, w) of the pixels of a batch's outputs."""
        stride = getattr(self.network, "stride", 1)
        height, width = (side // stride for side in batch["image"].shape[2:])
        points, visible = batch["keypoints"], batch["visible"] > 0
        x = (torch.arange(width, device=points.device) + 0.5) * stride - 0.5
        y = (torch.arange(height, device=points.device) + 0.5) * stride - 0.5
        pixels = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).to(points.dtype)  # (h, w, 2)
        begin, end = points[:, self.edges[:, 0]], points[:, self.edges[:, 1]]  # (B, E, 2)
        along = (end - begin)[:, :, None, None]
        off = pixels - begin[:, :, None, None]  # (B, E, h, w, 2)
        share = ((off * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)).clamp(0, 1)
        distance = (off - share[..., None] * along).norm(dim=-1)
        shown = visible[:, self.edges[:, 0]] & visible[:, self.edges[:, 1]]
        least, nearest = torch.where(shown[:, :, None, None], distance, torch.inf).min(dim=1)
        inside = least <= self.width * batch["head_size"][:, None, None]
        return torch.where(inside, self.classes[nearest], 0)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss, and as ``logits`` the outputs (B, classes, h, w)."""
        logits = self(batch["image"])
        loss = F.cross_entropy(logits, self.masks(batch))
        self.log("train/loss", loss, prog_bar=True, batch_size=len(logits))
        return {"loss": loss, "logits": logits}

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Every pixel's class (B, h, w)."""
        images = batch["image"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[0]
        return {"prediction": self(images).argmax(dim=1)}

    @override
    def _evaluate(self, batch: Batch, stage: str) -> None:
        logits, masks = self(batch["image"]), self.masks(batch)
        self.log(f"{stage}/loss", F.cross_entropy(logits, masks), batch_size=len(logits))
        self.miou.update(logits.argmax(dim=1), masks)
        self.log(f"{stage}/miou", self.miou, prog_bar=True)
