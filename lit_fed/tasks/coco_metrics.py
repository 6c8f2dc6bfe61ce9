"""COCO's average precision of key points, by `faster-coco-eval`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.errors import ConfigError

COCO_SIGMAS = (
    *(0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072),
    *(0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089, 0.089),
)
"""Annotators' deviation on each of COCO's 17 joints, as a share of the root of the person's area."""

_STATES = ("predicted", "scores", "keypoints", "visible", "area", "image_id")


class KeypointAP(Metric):
    r"""Average precision over object key point similarities of 0.5 to 0.95, in percent, for any number of joints.

    The similarity of two poses is the mean over visible joints of :math:`\exp(-d^2 / 2 A (2\sigma)^2)`, A the person's
    area; persons are ranked by the mean of their joints' scores. See https://cocodataset.org/#keypoints-eval. Needs the
    extra ``pose``. Persons of unknown area (NaN) do not count.

    Args:
        num_joints: K.
        sigmas: σ of each joint; null for COCO's own 17.

    Raises:
        ConfigError: The number of σ differs from that of joints, or `faster-coco-eval` is not installed.
    """

    higher_is_better = True
    full_state_update = False
    area: list[Tensor]

    def __init__(self, num_joints: int = 17, sigmas: Sequence[float] | None = None) -> None:
        super().__init__()
        self.sigmas = list(COCO_SIGMAS if sigmas is None else sigmas)
        if len(self.sigmas) != num_joints or not all(sigma > 0 for sigma in self.sigmas):
            raise ConfigError(
                f"KeypointAP has {len(self.sigmas)} oks_sigmas for {num_joints} joints; give one above 0 for each"
            )
        if find_spec("faster_coco_eval") is None:
            raise ConfigError("KeypointAP needs faster-coco-eval; install it with pip install 'lit-fed[pose]'")
        for name in _STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(
        self, predicted: Tensor, scores: Tensor, keypoints: Tensor, visible: Tensor, area: Tensor, image_id: Tensor
    ) -> None:
        """Add persons, in pixels of their images.

        Args:
            predicted: Predicted joints, (B, K, 2).
            scores: Their confidence, (B, K).
            keypoints: True joints, (B, K, 2).
            visible: Above 0 for joints that count, (B, K).
            area: The person's area in square pixels, (B,).
            image_id: Number of the image, (B,).
        """
        known = area.isfinite()
        for name, values in zip(_STATES, (predicted, scores, keypoints, visible, area, image_id), strict=True):
            getattr(self, name).append(values[known].detach().cpu())

    @property
    def count(self) -> int:
        """Number of persons added."""
        return sum(len(part) for part in self.area)

    @override
    def compute(self) -> Tensor:
        """AP in percent, 0-d; NaN if no person has a visible joint."""
        from faster_coco_eval import COCO, COCOeval_faster

        found = {name: torch.cat(list(getattr(self, name))) for name in _STATES}
        persons = range(len(found["area"]))
        images = [{"id": number} for number in sorted(set(found["image_id"].tolist()))]
        truth = [self._truth(found, person) for person in persons]
        answers = [_answer(found, person) for person in persons]
        with redirect_stdout(io.StringIO()):  # it reports its progress
            annotations = {"images": images, "annotations": truth, "categories": [{"id": 1, "name": "person"}]}
            coco = COCO(annotations)
            evaluation = COCOeval_faster(coco, coco.loadRes(answers), "keypoints", kpt_oks_sigmas=self.sigmas)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        ap = float(evaluation.stats[0])
        return torch.tensor(100 * ap if ap >= 0 else torch.nan)  # −1 if there is nothing to find

    def _truth(self, found: dict[str, Tensor], person: int) -> dict[str, Any]:
        points, seen = found["keypoints"][person].double(), found["visible"][person] > 0
        flags = torch.cat((points, 2.0 * seen[:, None]), dim=1) * seen[:, None]
        low, high = (points[seen].amin(0), points[seen].amax(0)) if seen.any() else (points.new_zeros(2),) * 2
        return {
            "id": person + 1,
            "image_id": int(found["image_id"][person]),
            "category_id": 1,
            "iscrowd": 0,
            "keypoints": flags.flatten().tolist(),
            "num_keypoints": int(seen.sum()),
            "area": float(found["area"][person]),
            "bbox": [*low.tolist(), *(high - low).tolist()],
        }


def _answer(found: dict[str, Tensor], person: int) -> dict[str, Any]:
    points = found["predicted"][person].double()
    return {
        "image_id": int(found["image_id"][person]),
        "category_id": 1,
        "keypoints": torch.cat((points, torch.ones_like(points[:, :1])), dim=1).flatten().tolist(),
        "score": float(found["scores"][person].mean()),
    }
