"""Undefined values of torchmetrics objects, compared with scikit-learn's and SciPy's on random small samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torchmetrics import ExplainedVariance, Metric, MetricCollection, R2Score, RelativeSquaredError, SpearmanCorrCoef
from torchmetrics import classification as tm

from lit_fed.data import Arrays
from lit_fed.engine.lightning.undefined import value_of
from tests.support import LeastSquares, Points, fit

NAN = math.nan


def _auroc(y: Any, p: Any) -> float:
    return float(sk.roc_auc_score(y, p)) if 0 < y.sum() < len(y) else NAN


def _precision(y: Any, p: Any) -> float:
    return float(sk.average_precision_score(y, p)) if y.any() else NAN


def _matthews(y: Any, p: Any) -> float:
    return float(sk.matthews_corrcoef(y, p > 0.5)) if len({*y}) > 1 and len({*(p > 0.5)}) > 1 else NAN


def _of(function: Any) -> Callable[[Any, Any], float]:
    return lambda y, p: float(function(y, p > 0.5, zero_division=np.nan))


BINARY: dict[str, tuple[Callable[[], Metric], Callable[[Any, Any], float]]] = {
    "auroc": (tm.BinaryAUROC, _auroc),
    "auroc by thresholds": (lambda: tm.BinaryAUROC(thresholds=1001), _auroc),
    "auroc of a task": (lambda: tm.AUROC(task="binary"), _auroc),
    "average precision": (tm.BinaryAveragePrecision, _precision),
    "average precision by thresholds": (lambda: tm.BinaryAveragePrecision(thresholds=1001), _precision),
    "recall": (tm.BinaryRecall, _of(sk.recall_score)),
    "precision": (tm.BinaryPrecision, _of(sk.precision_score)),
    "f1": (tm.BinaryF1Score, _of(sk.f1_score)),
    "matthews": (tm.BinaryMatthewsCorrCoef, _matthews),
    "accuracy": (tm.BinaryAccuracy, lambda y, p: float(sk.accuracy_score(y, p > 0.5))),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_metric_of_two_classes_is_nan_where_scikit_learns_is_undefined(name: str) -> None:
    make, theirs = BINARY[name]
    rng, undefined = np.random.default_rng(0), 0
    for _ in range(60):
        count = int(rng.integers(2, 6))
        y = rng.integers(0, 2, count) * rng.integers(0, 2)
        y = 1 - y if rng.random() < 0.2 else y
        p = rng.permutation(np.linspace(0.05, 0.95, count)) * rng.choice([0.4, 1.0])
        metric = make()
        metric.update(torch.tensor(p), torch.tensor(y))
        expected = theirs(y, p)
        undefined += math.isnan(expected)
        assert value_of(metric) == pytest.approx(expected, abs=1e-5, nan_ok=True)  # thresholds are .001 apart
    assert name == "accuracy" or 5 < undefined < 55


REGRESSION: dict[str, tuple[Callable[[], Metric], Callable[[Any, Any], float]]] = {
    "r2": (R2Score, lambda y, p: float(sk.r2_score(y, p))),
    "explained variance": (ExplainedVariance, lambda y, p: float(sk.explained_variance_score(y, p))),
    "relative squared error": (RelativeSquaredError, lambda y, p: 1 - float(sk.r2_score(y, p))),
    "spearman": (SpearmanCorrCoef, lambda y, p: float(spearmanr(y, p).statistic)),
}


@pytest.mark.parametrize("name", REGRESSION)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all")
def test_a_metric_of_numbers_is_nan_for_constant_targets_and_for_one_sample(name: str, count: int) -> None:
    make, theirs = REGRESSION[name]
    rng = np.random.default_rng(0)
    for constant in (False, True):
        y, p = rng.normal(size=count) * (not constant) + 3, rng.normal(size=count)
        metric = make()
        metric.update(torch.tensor(p), torch.tensor(y))
        expected = NAN if constant or count < 2 else theirs(y, p)
        assert value_of(metric) == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_an_average_over_classes_is_nan_where_torchmetrics_counts_an_absent_class_as_0() -> None:
    """One against the rest: the AUROC needs every class; weighted by samples, and average precision, leave it out."""
    rng = np.random.default_rng(0)
    for classes in ([0], [1], [0, 1], [0, 2], [0, 1, 2]):
        y = np.resize(classes, 6)
        p = rng.dirichlet(np.ones(3), 6).astype(np.float32)
        one = np.eye(3)[y]
        areas = [_auroc(one[:, k], p[:, k]) for k in classes]
        precisions = [_precision(one[:, k], p[:, k]) for k in classes]
        whole = len(classes) == 3
        expected = {
            tm.MulticlassAUROC(3): np.mean(areas) if whole else NAN,
            tm.MulticlassAUROC(3, average="weighted"): np.average(areas, weights=one.sum(0)[classes]),
            tm.MulticlassAveragePrecision(3): NAN if classes == [0] else np.mean(precisions),  # torchmetrics has ⅓
            tm.MulticlassAveragePrecision(3, thresholds=5000): np.mean(precisions) if whole else NAN,
        }
        for metric, value in expected.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                metric.update(torch.tensor(p), torch.tensor(y))
                assert value_of(metric) == pytest.approx(value, abs=1e-3, nan_ok=True)


def test_a_user_who_sets_the_value_of_0_by_0_gets_it() -> None:
    metric = tm.BinaryRecall(zero_division=1.0)
    metric.update(torch.tensor([0.1]), torch.tensor([0]))
    assert value_of(metric) == 1


class Ternary(Points):
    """Three clients of four samples: of class 2 alone, of both classes, of class 4 mostly."""

    def load_arrays(self) -> Arrays:
        clients, x = np.repeat(np.arange(3), 4), np.eye(2, dtype=np.float32)[np.arange(12) % 2]
        y = np.array([2, 2, 2, 2, 2, 4, 2, 4, 4, 2, 4, 4])
        return Arrays(x, y, x, y, clients, clients, "ternary")


class Scored(LeastSquares):
    """Logs metrics as objects, as a collection, or as the values that it computes of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scores: Any = MetricCollection({"auroc": tm.BinaryAUROC(), "recall": tm.BinaryRecall()})

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.scores.update(torch.sigmoid(self(batch[0]).squeeze(1) - 1), (batch[1] > 3).long())
        if self.how == "objects":
            self.log_dict(self.scores)
        self.log("loss", self.loss(batch))

    def on_test_epoch_end(self) -> None:
        if self.how == "values":
            self.log_dict(self.scores.compute())
            self.scores.reset()


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("how", ["objects", "values"])
def test_a_client_without_a_class_is_left_out_of_the_mean_and_counted(tmp_path: Path, how: str, executor: Any) -> None:
    made = fit(tmp_path, Scored(how), Ternary(num_clients=3), max_rounds=1, executor=executor)
    weight = made.run.federation.global_model(0)["network.weight"][0]
    scores, y = weight.repeat(6).numpy(), Ternary(num_clients=3).load_arrays().test.y > 3
    parts = [slice(4, 8), slice(8, 12)]  # client 0 has neither an AUROC nor a recall
    areas = [_auroc(y[part], scores[part]) for part in parts]
    recalls = [sk.recall_score(y[part], scores[part] > 1) for part in parts]
    for name, values in (("auroc", areas), ("recall", recalls)):
        found = {key: made.metrics[f"clients/{name}_{key}"] for key in ("missing", "mean", "min", "worst")}
        least = min(values)
        assert found == pytest.approx({"missing": 1, "mean": np.mean(values), "min": least, "worst": least})
    assert "clients/loss_missing" not in made.metrics


class Trained(LeastSquares):
    """Logs an AUROC of its training samples."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = tm.BinaryAUROC()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.auroc.update(torch.sigmoid(self(batch[0]).squeeze(1)), (batch[1] > 3).long())
        self.log("auroc", self.auroc)
        return self.loss(batch)


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_client_that_trains_without_a_class_does_not_fail_and_is_left_out(tmp_path: Path, executor: Any) -> None:
    """All outputs of the first round are 0: an AUROC of ½ of the two clients with both classes."""
    made = fit(tmp_path, Trained(), Ternary(num_clients=3), max_rounds=1, executor=executor)
    assert made.metrics["train/auroc"] == 0.5
