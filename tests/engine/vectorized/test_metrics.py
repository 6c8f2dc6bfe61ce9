"""torchmetrics in groups: each client's values are those of one client after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor
from torchmetrics import BootStrapper, ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall

from lit_fed import Classifier, FederatedTrainer
from lit_fed.engine.vectorized.evaluation import GroupEvaluation
from lit_fed.errors import ConfigError
from lit_fed.methods import Ditto, FedAvg, FedPer
from lit_fed.protocols import ClientTest, PersonalTest
from tests.engine.vectorized.test_executor import digits, sgd
from tests.support import fit, rows, weights

Found = dict[tuple[str, ...], float]


class Measured(Classifier):
    """Logs torchmetrics in training and in tests, in the ways of their documentation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(network="mlp", input_shape=(1, 8, 8), optimizer=sgd)
        self.macro = MulticlassAccuracy(num_classes=10)
        self.micro = MulticlassAccuracy(num_classes=10, average="micro")
        self.mse = torchmetrics.MeanSquaredError()
        self.area = MulticlassAUROC(num_classes=10, thresholds=None)
        self.several = MetricCollection(
            {
                "f1": MulticlassF1Score(num_classes=10),
                "recall": MulticlassRecall(num_classes=10),
                "error": torchmetrics.MeanMetric(),
            },
            prefix="several_",
        )
        self.train_several = self.several.clone(prefix="train_several_")
        self.steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self._measure(logits, y, loss, "train", self.train_several)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.steps += 1
        x, y = batch
        logits = self(x)
        self._measure(logits, y, F.cross_entropy(logits, y), "test", self.several)

    def _measure(self, logits: Tensor, y: Tensor, loss: Tensor, stage: str, several: MetricCollection) -> None:
        self.log(f"{stage}/loss", loss)
        self.macro(logits, y)
        self.log(f"{stage}/macro", self.macro)
        self.micro.update(logits.argmax(1), target=y)
        self.log(f"{stage}/micro", self.micro)
        self.log(f"{stage}/batch_mse", self.mse(logits.softmax(1)[:, 0], (y == 0).float()))
        self.log(f"{stage}/mse", self.mse)
        self.area.update(logits, y)
        self.log(f"{stage}/area", self.area)
        several.update(preds=logits, target=y, value=loss)
        self.log_dict(several)


def federate(folder: Path, executor: str, task: Any = None, algorithm: Any = None, **kwargs: Any) -> FederatedTrainer:
    """Nine clients of 10 to 70 samples with ragged batches in training and tests."""
    settings = {"max_rounds": 2, "local_epochs": 2, "protocols": [ClientTest(), PersonalTest(lr=0.02)]} | kwargs
    data = digits(test_batch_size=4)
    return fit(folder, task or Measured(), data, algorithm or FedAvg(), executor=executor, **settings)


def by_client(made: FederatedTrainer) -> Found:
    """Every client's metrics as written, by round, client, stage and name; without clocks."""
    keys = ("round", "client_id", "stage", "metric")
    found = rows(made.log_dir / "clients.csv")
    return {tuple(row[key] for key in keys): float(row["value"]) for row in found if row["metric"] != "time_s"}


def assert_close(alone: FederatedTrainer, grouped: FederatedTrainer) -> None:
    one, other = by_client(alone), by_client(grouped)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=2e-4, abs=2e-5, nan_ok=True), key
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(grouped)[name], tensor, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("algorithm", [FedAvg, FedPer, Ditto], ids=lambda found: found.__name__)
def test_every_clients_metrics_are_its_own(tmp_path: Path, algorithm: Any) -> None:
    tasks = Measured(), Measured()
    alone, grouped = (
        federate(tmp_path / how, how, task, algorithm())
        for how, task in zip(("sequential", "vectorized"), tasks, strict=True)
    )
    assert_close(alone, grouped)
    stages = {(stage, name) for _, _, stage, name in by_client(grouped)}
    expected = {"macro", "micro", "mse", "batch_mse", "area", "several_f1", "several_recall", "several_error"}
    assert {name for stage, name in stages if stage == "test"} == {*expected, "loss"}
    assert {f"train_{name}" if "several" in name else name for name in expected} <= {
        name for stage, name in stages if stage == "train"
    }
    assert tasks[1].steps < tasks[0].steps / 2
