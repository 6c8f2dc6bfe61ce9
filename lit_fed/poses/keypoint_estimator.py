"""Key point estimation by heatmaps, as a plain LightningModule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter
from lit_fed.poses import UDP, HeatmapCodec
from lit_fed.poses.metrics import PCK, STATISTICS, JointOutputs, KeypointAP, joint_kinds
from lit_fed.poses.on_maps import Batch, OnMaps
from lit_fed.poses.pictures import Shown, joints_figure, poses_figure
from lit_fed.tasks.on_network import OnNetwork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PEOPLE_DRAWN = 2
_FINE = 0.1  # of the length, for ``pck_fine``


class KeypointEstimator(OnMaps, OnNetwork):
    r"""Regression of one heatmap per joint, :math:`\ell = \frac1K \sum_k \mathrm{mean}\,(v_k \odot (f_k(x) - H_k))^2`.

    The mean runs over the batch and the map's pixels; v is 1 for visible joints, else 0. A batch is a mapping with
    ``image`` (B, C, H, W), ``keypoints`` (B, K, 2) as (x, y) in its pixels, ``visible`` (B, K) and ``head_size`` (B,),
    the length in `lit_fed.poses.metrics.PCK`; optionally ``levels``, a list of such mappings at lower resolutions
    in descending order.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss``,
    ``pck`` (joints found within `threshold` of the length, in percent) and ``pck_strict`` (within `strict_threshold`).

    Args:
        network: Name of a network (of `POSE_NETWORKS`), or a module from images to (B, K, H/s, W/s); its
            attribute ``stride`` is s.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_joints: K; null to take it from the data.
        in_channels: Channels of an image; null to take it from the data.
        input_shape: Shape of the largest images, channels first; null to take it from the data.
        network_args: Further arguments for a network given by name.
        codec: Conversion between points and heatmaps; null for UDP with DARK and the network's stride.
        flip_pairs: Joints that swap in a mirror; null to take it from the data.
        skeleton_edges: Joints to connect in pictures; null to take it from the data.
        unscored_joints: Joints that do not count, such as MPII's pelvis and thorax; null to take them from the data.
        flip_test: Evaluate and predict by the mean of the heatmaps of an image and its mirror image.
        threshold: Threshold of ``pck``.
        strict_threshold: Threshold of ``pck_strict``.
        joint_names: Names of the joints, for metrics per joint and exported networks; null for the data's names.
        per_joint: Also log ``pck_fine`` (within 0.1 of the length), and both for each kind of joint by its name without
            the side, such as ``pck_ankle`` and ``pck_fine_ankle``.
        coco_ap: Also log ``ap``, ``ap50``, ``ap75`` and ``ar``, see `lit_fed.poses.metrics.KeypointAP`; batches
            then have the person's ``area`` (B,) in square pixels, ``image_id`` (B,), and ``center`` (B, 2) and
            ``scale`` (B,), which lead back to the image: a point p of a picture of W×H is its ``center + scale·(p −
            ((W − 1)/2, (H − 1)/2))``. Null to take it from the data, which may know the areas.
        oks_sigmas: σ of each joint for ``ap``; null to take it from the data, else COCO's 17.
        layer_decay: Each layer's learning rate as a share of the next layer's, without weight decay of vectors and
            position embeddings (ViTPose: 0.75); null for one rate.
        adapter: Low-rank adapters, and the parts of the network that train beside them; null to train all of it.
        weights: A file or folder of pretrained weights, see `lit_fed.networks.load_weights`; null for random weights.
        weights_of: The part that the file must hold: ``all``, or the ``backbone``; the head is then random.

    Raises:
        ConfigError: The settings do not fit each other.

    Note:
        ``pck`` is not logged if no joint counts.
    """

    metrics: dict[str, Literal["max", "min"]] = {"pck": "max", "pck_strict": "max", "loss": "min"}  # noqa: RUF012
    """Metrics logged in evaluation, the most important first, with the better direction."""
    ranges: dict[str, tuple[float, float]] = {"pck": (0.0, 100.0), "pck_strict": (0.0, 100.0)}  # noqa: RUF012
    """Least and largest value of each metric, beyond which a server rejects a node's answer."""

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
        joint_names: Sequence[str] | None = None,
        per_joint: bool = False,
        coco_ap: bool | None = None,
        oks_sigmas: Sequence[float] | None = None,
        layer_decay: float | None = None,
        adapter: Adapter | None = None,
        weights: str | None = None,
        weights_of: Literal["all", "backbone"] = "all",
    ) -> None:
        num_joints = num_joints or 16
        super().__init__(
            network, optimizer, lr_scheduler, num_joints, in_channels or 3, input_shape, network_args, adapter, weights,
            weights_of,
        )  # fmt: skip
        self.num_joints = num_joints
        stride = getattr(self.network, "stride", None)
        self.codec = codec or UDP(stride=stride or 4)
        if stride is not None and self.codec.stride != stride:
            raise ConfigError(
                f"model.codec has stride {self.codec.stride}, and network {type(self.network).__name__} has stride "
                f"{stride}; set the codec's stride, or leave the codec out"
            )
        self.flip_test, self.layer_decay = flip_test, layer_decay
        if flip_pairs is None and flip_test:
            raise ConfigError(
                "model.flip_test needs model.flip_pairs, the joints that swap in a mirror; give them, or set "
                "model.flip_test to false"
            )
        self.flip_pairs = self._checked("flip_pairs", flip_pairs)
        self.skeleton_edges = self._checked("skeleton_edges", skeleton_edges)
        if layer_decay is not None and not (0 < layer_decay <= 1 and hasattr(self.network, "group_matcher")):
            raise ConfigError(
                f"model.layer_decay is {layer_decay}; it must be above 0 and at most 1, and the network must have a "
                "group_matcher, such as pose_vit_small"
            )
        self.pck = PCK(threshold, unscored_joints or ())
        self.pck_strict = PCK(strict_threshold, unscored_joints or ())
        self.joint_names = None if joint_names is None else tuple(map(str, joint_names))
        if self.joint_names is not None and len(self.joint_names) != num_joints:
            raise ConfigError(
                f"model.joint_names has {len(self.joint_names)} names for {num_joints} joints; give each one"
            )
        if per_joint and self.joint_names is None:
            raise ConfigError("model.per_joint needs model.joint_names; give them, or set model.per_joint to false")
        self.of_joints = nn.ModuleDict(self._joint_metrics(threshold) if per_joint else {})
        statistics = STATISTICS if coco_ap else ()
        self.coco = nn.ModuleDict({name: KeypointAP(num_joints, oks_sigmas, name) for name in statistics})
        percentages = ["pck", "pck_strict", *self.coco, *self.of_joints]
        self.metrics = {**dict.fromkeys(percentages, "max"), "loss": "min"}
        self.ranges = dict.fromkeys(percentages, (0.0, 100.0))

    def _joint_metrics(self, threshold: float) -> dict[str, PCK]:
        """PCK within 0.1, and of each kind of joint."""
        excluded = set(self.pck.excluded)
        metrics = {"pck_fine": PCK(_FINE, sorted(excluded))}
        for start, limit in (("pck", threshold), ("pck_fine", _FINE)):
            for kind, joints in joint_kinds(self.joint_names or ()).items():
                others = set(range(self.num_joints)) - set(joints) | excluded
                if len(others) < self.num_joints:
                    metrics[f"{start}_{kind}"] = PCK(limit, sorted(others))
        return metrics

    def _checked(self, setting: str, pairs: Sequence[Sequence[int]] | None) -> list[tuple[int, int]]:
        for pair in pairs or ():
            if len(pair) != 2 or not all(0 <= joint < self.num_joints for joint in pair):
                raise ConfigError(
                    f"model.{setting} has {list(pair)}; it must have pairs of the joints 0 … {self.num_joints - 1}"
                )
        return [(first, second) for first, second in pairs or ()]

    @override
    def make_optimizer(self) -> Optimizer:
        """With a learning rate per layer if `layer_decay` is set."""
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

    def map_weights(self, batch: Batch) -> Tensor:
        """Weights (B, K) of the heatmaps: 1 for labelled joints whose Gaussian reaches into the picture, else 0."""
        return self.codec.weights(batch["keypoints"], batch["visible"], batch["image"].shape[2:])

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check the shape (channels, height, width) of images before training.

        Raises:
            ConfigError: The network or the codec does not take the shape.
        """
        check: Any = getattr(self.network, "check_shape", None)
        if check is not None:
            check(shape)
        self.codec.heatmap_size(shape[1:])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss, and as ``logits`` the heatmaps (B, K, h, w), 0 for invisible joints."""
        heatmaps = self(batch["image"])
        loss = self._loss(heatmaps, batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(heatmaps))
        return {"loss": loss, "logits": heatmaps * (batch["visible"] > 0)[..., None, None]}

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def on_validation_epoch_start(self) -> None:
        self._reset()

    @override
    def on_test_epoch_start(self) -> None:
        self._reset()

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_found("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_found("test")

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Joints (B, K, 2) as (x, y), and the peak of each joint's heatmap (B, K).

        Joints are in pixels of the original images if the batch leads back to these images, with ``center`` and
        ``scale`` as for ``ap``, and come with their ``image_id`` (B,); else in pixels of the pictures.
        """
        images = batch["image"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[0]
        keypoints, score = self.codec.decode(self.heatmaps(images), images.shape[2:])
        if not isinstance(batch, Mapping) or "scale" not in batch:
            return {"keypoints": keypoints, "score": score}
        return {"keypoints": _in_image(keypoints, batch), "score": score, "image_id": batch["image_id"]}

    @override
    def test_figures(self, batches: Mapping[str, Batch]) -> dict[str, Figure]:
        """Pictures of a test batch in several views, such as resolutions, by the view's name.

        Returns:
            ``poses``: some persons' joints beside the truth, and heatmaps on the pictures, a row per view. ``joints``:
            the share of joints found by the distance, and of each kind of joint. ``features``: the feature map's means
            over all places, by t-SNE, if the network has a ``forward_features`` with such a map.
        """
        shown = [self._shown(name, batch) for name, batch in batches.items()]
        figures = {"poses": poses_figure(shown, self.skeleton_edges, self.flip_pairs)}
        kinds = joint_kinds(self.joint_names or ())
        limits = self.pck.threshold, _FINE
        if (drawn := joints_figure({person.name: person.distances for person in shown}, kinds, limits)) is not None:
            figures["joints"] = drawn
        return figures | super().test_figures(batches)

    def _shown(self, name: str, batch: Batch) -> Shown:
        size = batch["image"].shape[2:]
        heatmaps = self.heatmaps(batch["image"])
        decoded, _ = self.codec.decode(heatmaps, size)
        # Only the first process draws, so the metric must not synchronise.
        pck = PCK(self.pck.threshold, self.pck.excluded, sync_on_compute=False).to(heatmaps.device)
        pck.update(decoded, batch["keypoints"], batch["visible"], batch["head_size"])
        distances = pck.distances(decoded, batch["keypoints"], batch["visible"], batch["head_size"])
        first = slice(_PEOPLE_DRAWN)
        return Shown(
            name=name,
            images=_numbers(batch["image"][first]),
            keypoints=_numbers(batch["keypoints"][first]),
            visible=_numbers(batch["visible"][first]),
            found=_numbers(decoded[first]),
            heatmaps=_numbers(heatmaps[first]),
            distances=_numbers(distances),
            score=float(pck.compute()) if pck.total > 0 else math.nan,
            looked_at=len(decoded),
        )

    def heatmaps(self, images: Tensor) -> Tensor:
        """Heatmaps (B, K, h, w), with the flip test if it is on."""
        return self.deployed_outputs().heatmaps(self, images)

    def deployed_outputs(self) -> JointOutputs:
        """The conversion of the network's heatmaps to joints, for use without lit_fed."""
        cell = getattr(self.network, "cell", getattr(self.network, "patch_size", self.codec.stride))
        return JointOutputs(
            self.codec, self.flip_pairs, self.flip_test, self.joint_names, self.skeleton_edges, int(cell)
        )

    def _loss(self, heatmaps: Tensor, batch: Batch) -> Tensor:
        targets = self.codec.encode(batch["keypoints"], batch["visible"], batch["image"].shape[2:])
        if targets.shape != heatmaps.shape:
            raise ConfigError(
                f"network {type(self.network).__name__} gives heatmaps {tuple(heatmaps.shape)}, and the batch needs "
                f"{tuple(targets.shape)}, (B, joints, h, w); set model.num_joints or the stride of model.codec"
            )
        weights = self.map_weights(batch)[..., None, None]
        return F.mse_loss(heatmaps * weights, targets * weights)

    def _evaluate(self, batch: Batch, stage: str) -> None:
        heatmaps = self.heatmaps(batch["image"])
        self.log(f"{stage}/loss", self._loss(heatmaps, batch), batch_size=len(heatmaps))
        decoded, scores = self.codec.decode(heatmaps, batch["image"].shape[2:])
        for metric in self._pcks().values():
            metric.update(decoded, batch["keypoints"], batch["visible"], batch["head_size"])
        if self.coco:
            area = batch["area"] * batch["scale"] ** 2
            inside, truth = (_in_image(points, batch) for points in (decoded, batch["keypoints"]))
            for precision in self._precisions().values():
                precision.update(inside, scores, truth, batch["visible"], area, batch["image_id"])

    def _reset(self) -> None:
        for metric in (*self._pcks().values(), *self._precisions().values()):
            metric.reset()

    def _pcks(self) -> dict[str, PCK]:
        """The metrics of joints, by name."""
        metrics: Any = {"pck": self.pck, "pck_strict": self.pck_strict, **self.of_joints}
        return cast("dict[str, PCK]", metrics)

    def _precisions(self) -> dict[str, KeypointAP]:
        """COCO's metrics, by name."""
        return cast("dict[str, KeypointAP]", dict(self.coco))

    def _log_found(self, stage: str) -> None:
        for name, metric in self._pcks().items():
            if metric.total > 0:
                self.log(f"{stage}/{name}", metric, prog_bar=name == "pck")
        for name, precision in self._precisions().items():
            if precision.count:
                self.log(f"{stage}/{name}", precision)


def _numbers(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()


def _in_image(points: Tensor, batch: Batch) -> Tensor:
    """Points (B, K, 2) of the pictures in pixels of their images."""
    height, width = batch["image"].shape[2:]
    middle = points.new_tensor([(width - 1) / 2, (height - 1) / 2])
    points_there: Tensor = batch["center"][:, None] + batch["scale"][:, None, None] * (points - middle)
    return points_there
