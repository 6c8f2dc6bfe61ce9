"""Joints as outputs and their metrics: the share of joints found, COCO's average precision and recall."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_fed.checks import check_choice, check_range
from lit_fed.errors import ConfigError
from lit_fed.poses import HeatmapCodec


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
        self.threshold = check_range(f"{type(self).__name__}.threshold", threshold, above=0)
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
    joints_by_kind: dict[str, list[int]] = {}
    for joint, name in enumerate(names):
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("left", "right", "l", "r", "")]
        joints_by_kind.setdefault("_".join(words) or name.lower(), []).append(joint)
    return joints_by_kind


COCO_SIGMAS = (
    *(0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072),
    *(0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089, 0.089),
)
"""Annotators' deviation on each of COCO's 17 joints, as a share of the root of the person's area."""

Statistic = Literal["ap", "ap50", "ap75", "ar"]
STATISTICS: tuple[Statistic, ...] = ("ap", "ap50", "ap75", "ar")
_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_OF = {"ap50": _THRESHOLDS[:1], "ap75": _THRESHOLDS[5:6]}
_RECALLS = np.linspace(0.0, 1.0, 101)
_MOST_PER_IMAGE = 20  # surest persons of an image; COCO leaves out the others

_STATES = ("predicted", "scores", "keypoints", "visible", "area", "image_id", "box")


class KeypointAP(Metric):
    r"""Average precision or recall over object key point similarities of 0.5 to 0.95, in percent, for any joints.

    The similarity of two poses is the mean over visible joints of :math:`\exp(-d^2 / 2 A (2\sigma)^2)`, A the person's
    area; persons are ranked by the mean of their joints' scores. See https://cocodataset.org/#keypoints-eval. Persons
    of unknown area (NaN) are left out. A person without a visible joint is not to be found: a pose in its box, which is
    needed for this and is enlarged threefold around its middle, is neither right nor wrong; without a box the person is
    left out. `pycocotools` gives the same numbers.

    Args:
        num_joints: K.
        sigmas: σ of each joint; null for COCO's own 17.
        statistic: ``ap``; ``ap50`` and ``ap75`` for a similarity of .5 and .75 alone; ``ar`` for the recall.

    Raises:
        ConfigError: The number of σ differs from that of joints.
    """

    higher_is_better = True
    full_state_update = False
    area: list[Tensor]

    def __init__(
        self, num_joints: int = 17, sigmas: Sequence[float] | None = None, statistic: Statistic = "ap"
    ) -> None:
        super().__init__()
        check_choice("KeypointAP.statistic", statistic, STATISTICS)
        self.sigmas, self.statistic = list(COCO_SIGMAS if sigmas is None else sigmas), statistic
        if len(self.sigmas) != num_joints or not all(sigma > 0 for sigma in self.sigmas):
            raise ConfigError(
                f"KeypointAP has {len(self.sigmas)} oks_sigmas for {num_joints} joints; give one above 0 for each"
            )
        for name in _STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(
        self,
        predicted: Tensor,
        scores: Tensor,
        keypoints: Tensor,
        visible: Tensor,
        area: Tensor,
        image_id: Tensor,
        box: Tensor | None = None,
    ) -> None:
        """Add persons, in pixels of their images.

        Args:
            predicted: Predicted joints, (B, K, 2).
            scores: Their confidence, (B, K).
            keypoints: True joints, (B, K, 2).
            visible: Above 0 for joints that count, (B, K).
            area: The person's area in square pixels, (B,).
            image_id: Number of the image, (B,).
            box: [x, y, width, height] of each person, (B, 4), used where no joint is visible; None for none.
        """
        box = area.new_full((len(area), 4), torch.nan) if box is None else box
        known = area.isfinite() & ((visible > 0).any(dim=1) | box.isfinite().all(dim=1))
        for name, values in zip(_STATES, (predicted, scores, keypoints, visible, area, image_id, box), strict=True):
            getattr(self, name).append(values[known].detach().cpu())

    @property
    def count(self) -> int:
        """Number of persons added."""
        return sum(len(part) for part in self.area)

    @override
    def compute(self) -> Tensor:
        """The statistic in percent, 0-d; NaN if no person has a visible joint."""
        arrays = {name: dim_zero_cat(getattr(self, name)).cpu().double().numpy() for name in _STATES}
        if not (arrays["visible"] > 0).any():
            return torch.tensor(torch.nan)
        thresholds = _OF.get(self.statistic, _THRESHOLDS)
        matched = [
            _matches(_similarity(arrays, rows, np.asarray(self.sigmas)), arrays["visible"][rows], scores, thresholds)
            for rows, scores in _by_image(arrays["image_id"], arrays["scores"].mean(axis=1))
        ]
        precision, recall = _curves(matched, int((arrays["visible"] > 0).any(axis=1).sum()))
        return torch.tensor(100 * float((recall if self.statistic == "ar" else precision).mean()))


def _similarity(found: dict[str, NDArray[Any]], of_image: NDArray[np.int64], sigmas: NDArray[Any]) -> NDArray[Any]:
    """Object key point similarity of each predicted person to each true person of an image, shape (n, n).

    A person without visible joints is compared by the distances to its box, as wide and high again on every side.
    """
    predicted, true = found["predicted"][of_image][:, None], found["keypoints"][of_image][None]
    seen, area = np.asarray(found["visible"][of_image] > 0), found["area"][of_image]
    bare = ~np.asarray(seen.any(axis=1))
    corner, sides = np.split(found["box"][of_image][None, :, None], 2, axis=-1)
    beyond = np.maximum(corner - sides - predicted, 0) + np.maximum(predicted - (corner + 2 * sides), 0)
    distance = np.where(bare[None, :, None], (beyond**2).sum(-1), ((predicted - true) ** 2).sum(-1))
    error = distance / (2 * sigmas) ** 2 / (area[:, None] + np.spacing(1)) / 2
    counts = seen | bare[:, None]
    total: NDArray[Any] = (np.exp(-error) * counts).sum(-1) / counts.sum(-1)
    return total


class _Matched(NamedTuple):
    """The persons found on an image, the surest first.

    Args:
        right: Whether each has a partner at each threshold, shape (thresholds, n).
        counts: Whether it counts, shape (thresholds, n): not if its partner has no visible joint.
        scores: Their scores, shape (n,).
    """

    right: NDArray[np.bool_]
    counts: NDArray[np.bool_]
    scores: NDArray[Any]


def _by_image(image_id: NDArray[Any], scores: NDArray[Any]) -> list[tuple[NDArray[np.int64], NDArray[Any]]]:
    """The persons of each image, and their scores."""
    order = np.argsort(image_id, kind="stable")
    starts = np.flatnonzero(np.diff(image_id[order])) + 1
    return [(rows, scores[rows]) for rows in np.split(order, starts)]


def _matches(
    similarity: NDArray[Any], visible: NDArray[Any], scores: NDArray[Any], thresholds: NDArray[Any]
) -> _Matched:
    """Give each person found, the surest first, the most similar true person that is free."""
    surest = np.argsort(-scores, kind="stable")[:_MOST_PER_IMAGE]
    bare = ~np.asarray((visible > 0).any(axis=1))
    true = np.argsort(bare, kind="stable")  # persons that count come first
    right = np.zeros((len(thresholds), len(surest)), dtype=np.bool_)
    counts = np.ones_like(right)
    for place, threshold in enumerate(thresholds):
        free = np.ones(len(bare), dtype=np.bool_)
        for rank, person in enumerate(surest):
            best, partner = min(float(threshold), 1 - 1e-10), -1
            for candidate in true:
                if partner >= 0 and not bare[partner] and bare[candidate]:
                    break
                if free[candidate] and similarity[person, candidate] >= best:
                    best, partner = similarity[person, candidate], candidate
            if partner >= 0:
                free[partner], right[place, rank], counts[place, rank] = False, True, not bare[partner]
    return _Matched(right, counts, scores[surest])


def _curves(matched: Sequence[_Matched], total: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Precision at each of 101 recalls, shape (thresholds, 101), and the recall, (thresholds,), of all images."""
    order = np.argsort(-np.concatenate([image.scores for image in matched]), kind="stable")
    right, counts = (
        np.concatenate(parts, axis=1)[:, order] for parts in zip(*(image[:2] for image in matched), strict=True)
    )
    precision, recall = np.zeros((len(right), len(_RECALLS))), np.zeros(len(right))
    for place, (good, does) in enumerate(zip(right, counts, strict=True)):
        hits, misses = np.cumsum(good & does), np.cumsum(~good & does)
        of_all = hits / total
        share = np.maximum.accumulate((hits / (hits + misses + np.spacing(1)))[::-1])[::-1]
        reached = np.searchsorted(of_all, _RECALLS, side="left")
        precision[place, reached < len(share)] = share[reached[reached < len(share)]]
        recall[place] = of_all[-1]
    return precision, recall
