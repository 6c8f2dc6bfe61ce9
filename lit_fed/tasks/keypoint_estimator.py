"""Finding the joints of a person by heatmaps, as a plain LightningModule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.errors import ConfigError
from lit_fed.losses import UDP, HeatmapCodec
from lit_fed.tasks.coco_metrics import KeypointAP
from lit_fed.tasks.on_network import OnNetwork
from lit_fed.tasks.pose_metrics import PCK
from lit_fed.tasks.pose_pictures import Shown, features_figure, poses_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = Mapping[str, Any]
_PEOPLE_DRAWN = 3


class KeypointEstimator(OnNetwork):
    r"""Regression of one heatmap a joint, :math:`\ell = \frac1K \sum_k \mathrm{mean}\,(v_k \odot (f_k(x) - H_k))^2`.

    The mean runs over the batch and the map's pixels; v is 1 for joints that are visible, else 0. A batch is a mapping
    with ``image`` (B, C, H, W), ``keypoints`` (B, K, 2) as (x, y) in its pixels, ``visible`` (B, K) and ``head_size``
    (B,), the length that `lit_fed.tasks.pose_metrics.PCK` measures by; at lower resolutions it may hold itself once
    more, as ``levels``, a list in descending order.

    Nothing in it is federated. Logs ``train/loss``, and on validation and test data ``loss``, ``pck`` (joints found
    within `threshold` of the length, in percent) and ``pck_strict`` (within `strict_threshold`).

    Args:
        network: Name of a network (of `POSE_NETWORKS`), or a module that makes (B, K, H/s, W/s) of images; its
            attribute ``stride`` is s.
        optimizer: Made anew whenever it is asked for: in a federation for every client and round.
        lr_scheduler: Steps once an epoch; in a federation, once a round.
        num_joints: K; taken from the data where null.
        in_channels: Taken from the data where null.
        input_shape: Shape of the largest images, channels first; taken from the data where null.
        network_args: Further arguments for a network given by name.
        codec: Between points and heatmaps; null for UDP with DARK and the network's stride.
        flip_pairs: Joints that change places in a mirror; taken from the data where null.
        skeleton_edges: Joints to connect in pictures; taken from the data where null.
        unscored_joints: Joints that do not count, such as MPII's pelvis and thorax; taken from the data where null.
        flip_test: Evaluate and predict by the mean of the heatmaps of an image and of its mirror image.
        threshold: Of ``pck``.
        strict_threshold: Of ``pck_strict``.
        coco_ap: Also log ``ap``, see `lit_fed.tasks.coco_metrics.KeypointAP`; batches then have the person's ``area``
            (B,) in square pixels, ``image_id`` (B,), and ``center`` (B, 2) and ``scale`` (B,), which lead back to the
            image: a point p of a picture of W×H is its ``center + scale·(p − ((W − 1)/2, (H − 1)/2))``.
        oks_sigmas: Of ``ap``, one a joint; null for COCO's 17.
        layer_decay: Each layer learns at this share of the rate of the one after it, and vectors and position
            embeddings are not decayed (ViTPose: 0.75); null for one rate.

    Raises:
        ConfigError: If the settings do not fit each other.

    Note:
        Where no joint of the evaluated persons counts there is no ``pck``.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"pck": "max", "pck_strict": "max", "loss": "min"}
    """What it logs when it is evaluated, the most important first, and which way is better."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"pck": (0.0, 100.0), "pck_strict": (0.0, 100.0)}
    """The least and the largest value of each, beyond which a node of a federation is not believed."""

    def __init__(
        self,
        network: str | nn.Module = "pose_vit_tiny",
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=2.5e-4, weight_decay=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        num_joints: int | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
        codec: HeatmapCodec | None = None,
        flip_pairs: Sequence[Sequence[int]] | None = None,
        skeleton_edges: Sequence[Sequence[int]] | None = None,
        unscored_joints: Sequence[int] | None = None,
        flip_test: bool = True,
        threshold: float = 0.5,
        strict_threshold: float = 0.25,
        coco_ap: bool = False,
        oks_sigmas: Sequence[float] | None = None,
        layer_decay: float | None = None,
    ) -> None:
        num_joints = num_joints or 16
        super().__init__(network, optimizer, lr_scheduler, num_joints, in_channels or 3, input_shape, network_args)
        self.num_joints = num_joints
        stride = getattr(self.network, "stride", None)
        self.codec = codec or UDP(stride=stride or 4)
        if stride is not None and self.codec.stride != stride:
            raise ConfigError(
                f"model.codec makes heatmaps of stride {self.codec.stride}, and network {type(self.network).__name__} "
                f"of stride {stride}; set the codec's stride, or leave the codec out"
            )
        self.flip_test, self.layer_decay = flip_test, layer_decay
        if flip_pairs is None and flip_test:
            raise ConfigError(
                "model.flip_test mirrors images, and needs model.flip_pairs, the joints that change places then; give "
                "them, or set model.flip_test to false"
            )
        self.flip_pairs = self._checked("flip_pairs", flip_pairs)
        self.skeleton_edges = self._checked("skeleton_edges", skeleton_edges)
        if layer_decay is not None and not (0 < layer_decay <= 1 and hasattr(self.network, "group_matcher")):
            raise ConfigError(
                f"model.layer_decay is {layer_decay}; it must be above 0 and at most 1, and needs a network that tells "
                "its layers, such as pose_vit_small"
            )
        self.pck = PCK(threshold, unscored_joints or ())
        self.pck_strict = PCK(strict_threshold, unscored_joints or ())
        self.ap = KeypointAP(num_joints, oks_sigmas) if coco_ap else None

    def _checked(self, setting: str, pairs: Sequence[Sequence[int]] | None) -> list[tuple[int, int]]:
        for pair in pairs or ():
            if len(pair) != 2 or not all(0 <= joint < self.num_joints for joint in pair):
                raise ConfigError(
                    f"model.{setting} has {list(pair)}; give pairs of the joints 0 … {self.num_joints - 1}"
                )
        return [(first, second) for first, second in pairs or ()]

    def make_optimizer(self) -> Optimizer:
        """A fresh optimizer, where asked for with a learning rate for each layer."""
        if self.layer_decay is None:
            return super().make_optimizer()
        from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]  # it re-exports it

        network: Any = self.network
        groups = param_groups_layer_decay(network, 1.0, network.no_weight_decay(), layer_decay=self.layer_decay)
        for group in groups:
            if group["weight_decay"]:
                del group["weight_decay"]  # the optimizer's own
        optimizer = self.optimizer(groups)
        for group in optimizer.param_groups:
            group["lr"] *= group.pop("lr_scale")
        return optimizer

    # ------------------------------------------------------------------ steps

    def levels(self, batch: Batch) -> list[Batch]:
        """A batch at its lower resolutions, in descending order; empty at the lowest."""
        return list(batch.get("levels", ()))

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse images of a shape (channels, height, width), before any are made.

        Raises:
            ConfigError: If the network does not take them, or they have no heatmaps.
        """
        check: Any = getattr(self.network, "check_shape", None)
        if check is not None:
            check(shape)
        self.codec.heatmap_size(shape[1:])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss of a batch, and as ``logits`` the heatmaps (B, K, h, w), 0 for joints that are not visible."""
        heatmaps = self(batch["image"])
        loss = self._loss(heatmaps, batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(heatmaps))
        return {"loss": loss, "logits": heatmaps * (batch["visible"] > 0)[..., None, None]}

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it leaves nothing behind

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and joints found on validation data."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and joints found on test data."""
        self._evaluate(batch, "test")

    def on_validation_epoch_start(self) -> None:
        """Count anew."""
        self._reset()

    def on_test_epoch_start(self) -> None:
        """Count anew."""
        self._reset()

    def on_validation_epoch_end(self) -> None:
        """Joints found on validation data."""
        self._log_found("val")

    def on_test_epoch_end(self) -> None:
        """Joints found on test data."""
        self._log_found("test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Joints (B, K, 2) as (x, y) in pixels of the images, and the height of each one's heatmap (B, K)."""
        images = batch["image"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[0]
        keypoints, score = self.codec.decode(self.heatmaps(images), images.shape[2:])
        return {"keypoints": keypoints, "score": score}

    def test_figures(self, batches: Mapping[str, Batch]) -> dict[str, Figure]:
        """Pictures of a batch of test data that is shown in several ways, such as at several resolutions.

        Args:
            batches: By the name of the way.

        Returns:
            ``poses``: some persons' joints and heatmaps beside the truth, a row a way. ``features``: the means over
            all places of the feature map, by t-SNE, where the network has a ``forward_features`` that makes one.
        """
        figures = {"poses": poses_figure(
            [self._shown(name, batch) for name, batch in batches.items()], self.skeleton_edges, self.flip_pairs
        )}  # fmt: skip
        means = {name: self._features(batch["image"]) for name, batch in batches.items()}
        known = {name: _numbers(found) for name, found in means.items() if found is not None}
        if (drawn := features_figure(known)) is not None:
            figures["features"] = drawn
        return figures

    def test_features(self, batch: Batch) -> Tensor:
        """What the network makes of each picture (B, d): the means over all places of its feature map.

        Raises:
            ConfigError: The network has no ``forward_features`` that makes a map.
        """
        if (found := self._features(batch["image"])) is None:
            raise ConfigError(f"network {type(self.network).__name__} has no forward_features that makes a map")
        return found

    def _features(self, images: Tensor) -> Tensor | None:
        make: Any = getattr(self.network, "forward_features", None)
        found: Tensor | None = None if make is None else make(images)
        return None if found is None or found.ndim != 4 else found.mean(dim=(2, 3))

    def _shown(self, name: str, batch: Batch) -> Shown:
        size = batch["image"].shape[2:]
        heatmaps = self.heatmaps(batch["image"])
        found, _ = self.codec.decode(heatmaps, size)
        # Only the first process draws: what it counts is not to wait for the others.
        pck = PCK(self.pck.threshold, self.pck.excluded, sync_on_compute=False).to(heatmaps.device)
        pck.update(found, batch["keypoints"], batch["visible"], batch["head_size"])
        targets = self.codec.encode(batch["keypoints"], batch["visible"], size)
        first = slice(_PEOPLE_DRAWN)
        return Shown(
            name=name,
            images=_numbers(batch["image"][first]),
            keypoints=_numbers(batch["keypoints"][first]),
            visible=_numbers(batch["visible"][first]),
            found=_numbers(found[first]),
            heatmaps=_numbers(heatmaps[first]),
            targets=_numbers(targets[first]),
            score=float(pck.compute()) if pck.total > 0 else math.nan,
            looked_at=len(found),
        )

    def heatmaps(self, images: Tensor) -> Tensor:
        """The heatmaps (B, K, h, w) that joints are read from: with the flip test where that is on."""
        heatmaps: Tensor = self(images)
        if not self.flip_test:
            return heatmaps
        return (heatmaps + self.codec.unflip(self(images.flip(3)), self.flip_pairs)) / 2

    def _loss(self, heatmaps: Tensor, batch: Batch) -> Tensor:
        keypoints, visible, size = batch["keypoints"], batch["visible"], batch["image"].shape[2:]
        targets = self.codec.encode(keypoints, visible, size)
        if targets.shape != heatmaps.shape:
            raise ConfigError(
                f"network {type(self.network).__name__} gives heatmaps {tuple(heatmaps.shape)}, and the batch asks "
                f"for {tuple(targets.shape)}, (B, joints, h, w); set model.num_joints or the stride of model.codec"
            )
        weights = self.codec.weights(keypoints, visible, size)[..., None, None]
        return F.mse_loss(heatmaps * weights, targets * weights)

    def _evaluate(self, batch: Batch, stage: str) -> None:
        heatmaps = self.heatmaps(batch["image"])
        self.log(f"{stage}/loss", self._loss(heatmaps, batch), batch_size=len(heatmaps))
        found, scores = self.codec.decode(heatmaps, batch["image"].shape[2:])
        for metric in (self.pck, self.pck_strict):
            metric.update(found, batch["keypoints"], batch["visible"], batch["head_size"])
        if self.ap is not None:
            area = batch["area"] * batch["scale"] ** 2
            inside, truth = (_in_image(points, batch) for points in (found, batch["keypoints"]))
            self.ap.update(inside, scores, truth, batch["visible"], area, batch["image_id"])

    def _reset(self) -> None:
        for metric in (self.pck, self.pck_strict, self.ap):
            if metric is not None:
                metric.reset()

    def _log_found(self, stage: str) -> None:
        if self.pck.total > 0:
            self.log(f"{stage}/pck", self.pck, prog_bar=True)
            self.log(f"{stage}/pck_strict", self.pck_strict)
        if self.ap is not None and self.ap.count:
            self.log(f"{stage}/ap", self.ap)


def _numbers(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()


def _in_image(points: Tensor, batch: Batch) -> Tensor:
    """Points (B, K, 2) of the pictures in pixels of the images that they are from."""
    height, width = batch["image"].shape[2:]
    middle = points.new_tensor([(width - 1) / 2, (height - 1) / 2])
    found: Tensor = batch["center"][:, None] + batch["scale"][:, None, None] * (points - middle)
    return found
