"""`lit_fed.tasks.scores`: each score beside scikit-learn, of two classes, of three, and of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from lit_fed.engine.lightning.undefined import value_of
from lit_fed.tasks.scores import Scores

NAMES = ["auroc", "balanced_accuracy", "f1", "average_precision"]
OF_TWO: dict[str, Callable[[Any, Any], float]] = {
    "acc": lambda y, p: sk.accuracy_score(y, p > 0.5),
    "auroc": sk.roc_auc_score,
    "balanced_accuracy": lambda y, p: sk.balanced_accuracy_score(y, p > 0.5),
    "f1": lambda y, p: sk.f1_score(y, p > 0.5),
    "average_precision": sk.average_precision_score,
}
OF_THREE: dict[str, Callable[[Any, Any], float]] = {
    "auroc": lambda y, p: sk.roc_auc_score(y, p, multi_class="ovr"),
    "balanced_accuracy": lambda y, p: sk.balanced_accuracy_score(y, p.argmax(1)),
    "f1": lambda y, p: sk.f1_score(y, p.argmax(1), average="macro"),
    "average_precision": lambda y, p: sk.average_precision_score(np.eye(3)[y], p, average="macro"),
}


def in_batches(scores: Scores, probability: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    found: Any = ()
    for rows in torch.arange(len(y)).split(13):
        found = scores.update(probability[rows], y[rows])
    return {name: value_of(metric) for name, metric in found}


def drawn(count: int, outputs: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=(count, outputs)).astype(np.float32))


def test_of_two_classes_the_second_is_the_positive_one() -> None:
    p, y = drawn(60, 2).softmax(1), torch.from_numpy(np.random.default_rng(4).integers(0, 4, 60) // 3)
    found = in_batches(Scores(NAMES, 2, None), p, y)
    assert found == {name: pytest.approx(OF_TWO[name](y.numpy(), p[:, 1].numpy()), rel=1e-6) for name in NAMES}


def test_of_more_classes_a_score_is_the_plain_mean_over_them() -> None:
    p = drawn(60, 3).double().softmax(1)  # whose rows sum to 1 in 64 bits, as scikit-learn asks
    y = torch.from_numpy(np.random.default_rng(4).integers(0, 3, 60))
    expected = {name: pytest.approx(OF_THREE[name](y.numpy(), p.numpy()), rel=1e-5) for name in NAMES}
    assert in_batches(Scores(NAMES, 3, None), p, y) == expected


def test_each_label_has_columns_of_its_own() -> None:
    p, y = drawn(60, 2).sigmoid(), torch.from_numpy(np.random.default_rng(4).integers(0, 3, (60, 2)) // 2)
    found = in_batches(Scores(["auroc", "f1", "auroc"], 2, ["a b", "c.d"]), p, y)
    assert found == {
        f"{name}_{label}": pytest.approx(OF_TWO[name](y[:, at].numpy(), p[:, at].numpy()), rel=1e-6)
        for at, label in enumerate(["a b", "c.d"])
        for name in ("acc", "auroc", "f1")
    }


def test_images_of_classes_count_each_pixel() -> None:
    p, y = drawn(60, 2).softmax(1), torch.from_numpy(np.random.default_rng(4).integers(0, 2, 60))
    whole = in_batches(Scores(NAMES, 2, None), p, y)
    assert in_batches(Scores(NAMES, 2, None), p.view(3, 4, 5, 2).movedim(3, 1), y.view(3, 4, 5)) == whole


@pytest.mark.parametrize("predicted", [0.2, 0.9])
def test_without_a_class_only_those_of_two_classes_that_need_it_are_undefined(predicted: float) -> None:
    """No positive sample: F1 is 0 divided by 0 without a false positive, and 0 with one."""
    p, y = torch.tensor([0.1, predicted]), torch.tensor([0, 0])
    found = in_batches(Scores(NAMES, 2, None), torch.stack([1 - p, p], 1), y)
    undefined = {"auroc", "balanced_accuracy", "average_precision", *(["f1"] if predicted < 0.5 else [])}
    assert {name for name, value in found.items() if value != value} == undefined
