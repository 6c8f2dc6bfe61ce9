"""Scores of classes and of labels by name: torchmetrics objects, whose states merge over batches and processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torchmetrics import Accuracy, F1Score, Recall
from torchmetrics.classification import AUROC, AveragePrecision

ScoreName = Literal["auroc", "balanced_accuracy", "f1", "average_precision"]
_MADE: dict[str, Any] = {
    "acc": Accuracy,
    "auroc": AUROC,
    "balanced_accuracy": lambda task, **given: Recall(task="multiclass", **given),
    "f1": F1Score,
    "average_precision": AveragePrecision,
}


def columns_of(names: Iterable[str], labels: Sequence[str] | None) -> dict[str, tuple[str, int]]:
    """The columns of scores: each with its score, and the position of its label, or of the positive of two classes."""
    places = {f"_{label}": place for place, label in enumerate(labels)} if labels else {"": 1}
    scores = dict.fromkeys(["acc", *names] if labels else names)
    return {f"{name}{end}": (name, place) for end, place in places.items() for name in scores}


class Scores(nn.ModuleList):
    """The scores that a task logs, each by the name of its column.

    ``auroc`` is the area under the ROC curve, ``balanced_accuracy`` the mean recall of the classes, ``f1`` the harmonic
    mean of precision and recall, ``average_precision`` the area under the precision-recall curve. Of two classes the
    second is the positive one; of more classes a score is the plain mean over them. Each label has scores and an
    accuracy of its own, named ``<score>_<label>``.

    Args:
        names: The scores.
        num_classes: Number of classes.
        labels: Names of the labels; None for classes.
    """

    def __init__(self, names: Iterable[str], num_classes: int, labels: Sequence[str] | None) -> None:
        self.columns = columns_of(names, labels)
        count = 2 if labels else num_classes
        given = {"task": "binary" if count == 2 else "multiclass", "num_classes": count, "average": "macro"}
        super().__init__(_MADE[name](**given) for name, _ in self.columns.values())

    def update(self, probability: Tensor, y: Tensor) -> Iterable[tuple[str, Any]]:
        """Take in probabilities (B, C, …) and classes (B, …), or labels (B, C) of 0 and 1; the objects by column."""
        for metric, (name, place) in zip(self, self.columns.values(), strict=True):
            seen, wanted = probability, y
            if getattr(metric, "num_classes", 2) == 2:  # a class or a label against the rest
                seen, wanted = probability[:, place], y[:, place] if y.ndim == probability.ndim else y
                seen = (seen > 0.5).long() if name == "balanced_accuracy" else seen
            metric.update(seen, wanted)  # type: ignore[operator]  # a module of any kind
        return zip(self.columns, self, strict=True)
