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
    trained = {f"train/{name}" for name in expected - {"area"}}  # no client trains on all classes, which an area needs
    assert trained <= {name for stage, name in stages if stage == "train"}
    assert tasks[1].steps < tasks[0].steps / 2


def test_each_clients_metrics_by_hand(tmp_path: Path) -> None:
    """The macro accuracy is not a mean over batches: it is the mean recall of the classes of all a client's samples.

    As in torchmetrics, a class that is only predicted has recall 0.
    """
    task = Measured()
    made = federate(tmp_path, "vectorized", task, max_rounds=1, protocols=[ClientTest()])
    data, model = made.run.federation.data, weights(made)
    for client_id in data.census.clients:
        batches = list(data.test_loader(client_id))
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        with torch.no_grad():
            predicted = torch.func.functional_call(task, model, (x,)).argmax(1)
        hits = [float((predicted[y == label] == label).double().mean()) for label in y.unique()]
        classes = torch.cat([y, predicted]).unique()
        found = by_client(made)["0", str(client_id), "test", "macro"]
        assert found == pytest.approx(sum(hits) / len(classes), abs=1e-6)


def test_metrics_in_groups_do_not_depend_on_the_group(tmp_path: Path) -> None:
    one, other = (federate(tmp_path / str(size), "vectorized", group_size=size) for size in (9, 3))
    trained = [{key: value for key, value in by_client(made).items() if key[2] == "train"} for made in (one, other)]
    assert trained[0]
    assert trained[0] == trained[1]


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    whole = federate(tmp_path / "whole", "vectorized", max_rounds=3)
    federate(tmp_path / "half", "vectorized", max_rounds=2)
    resumed = federate(tmp_path / "half", "vectorized", max_rounds=3, ckpt_path="last")
    last = {key: value for key, value in by_client(whole).items() if key[0] == "2"}
    assert last
    found = {key: value for key, value in by_client(resumed).items() if key[0] == "2"}
    assert found == pytest.approx(last, rel=0, abs=0, nan_ok=True)


def test_metrics_that_share_a_metric_share_it_in_groups(tmp_path: Path) -> None:
    class Doubled(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.twice = self.micro + self.micro

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/twice", self.twice)
            return loss

    runs = [federate(tmp_path / how, how, Doubled(), max_rounds=1) for how in ("sequential", "vectorized")]
    assert_close(*runs)
    found = by_client(runs[1])
    for client_id in range(9):
        own = [found["0", str(client_id), "train", f"train/{name}"] for name in ("micro", "twice")]
        assert own[1] == pytest.approx(2 * own[0], abs=1e-6)


class OfSums(Measured):
    """Updates a metric with a number that is not a mean over samples: padding would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.squares = torchmetrics.SumMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.squares.update(self(batch[0]).square().sum())
        self.log("train/squares", self.squares)
        return loss


def test_a_metric_that_needs_whole_batches_gets_them(tmp_path: Path) -> None:
    runs = [federate(tmp_path / how, how, OfSums(), max_rounds=1) for how in ("sequential", "vectorized")]
    one, other = ({key: value for key, value in by_client(made).items() if key[3] == "train/squares"} for made in runs)
    assert len(one) == 9
    assert other == pytest.approx(one, rel=1e-4)


class OfBatches(Measured):
    """Weights a metric by the size of a batch, as a number and as a tensor: a sample alone would count 1."""

    def __init__(self) -> None:
        super().__init__()
        self.by_number, self.by_tensor = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.by_number.update(loss, weight=len(y))
        self.by_tensor.update(loss, weight=torch.tensor(y.numel()))
        self.log_dict({"test/by_number": self.by_number, "test/by_tensor": self.by_tensor})


@pytest.mark.parametrize("algorithm", [FedAvg, FedPer], ids=lambda found: found.__name__)
def test_a_metric_may_depend_on_the_sizes_of_batches(tmp_path: Path, algorithm: Any) -> None:
    runs = [federate(tmp_path / how, how, OfBatches(), algorithm()) for how in ("sequential", "vectorized")]
    assert_close(*runs)


class OfSizes(Measured):
    """Says the size of each batch, as Lightning asks for."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("train/micro", self.micro(logits, y), batch_size=len(y))
        self.log("train/first", logits[:, 0].mean(), batch_size=len(y))
        self.log("train/five", logits[:, 0].mean(), batch_size=5)
        return F.cross_entropy(logits, y)


def test_a_logged_value_has_the_weight_that_the_task_gives(tmp_path: Path) -> None:
    """Clients with full and with smaller batches step together."""
    runs = [federate(tmp_path / how, how, OfSizes(), protocols=[ClientTest()]) for how in ("sequential", "vectorized")]
    assert_close(*runs)


# ---------------------------------------------------------------------- refused


class Weighted(Metric):
    """Holds weights."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
        self.add_state("total", torch.zeros(()))

    def update(self, logits: Tensor) -> None:
        self.total = self.total + self.layer(logits).sum()

    def compute(self) -> Any:
        return self.total


class Odd(Measured):
    """Uses metrics in a way that a group refuses.

    Args:
        how: The way.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weighted = Weighted()
        self.drawing = BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=2)
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(num_classes=10, average=None))
        self.hidden = [MulticlassAccuracy(num_classes=10)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if self.how == "loss":
            loss = loss * (1 + self.macro(logits, y))
        if self.how == "state":
            self.macro.update(logits, y)
            self.log("train/tp", self.macro.tp.sum())  # type: ignore[union-attr]  # a tensor here
        if self.how == "count":
            self.macro.update(logits, y)
            self.log("train/count", self.macro.update_count)
        if self.how == "weights":
            self.weighted.update(logits)
        if self.how == "draws":
            self.drawing.update(logits.mean(1))
        if self.how == "several":
            self.log("train/classes", self.classwise(logits, y))
        if self.how == "hidden":
            self.log("train/hidden", self.hidden[0])
        return loss


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("loss", "a step uses a value of the metric 'macro' for more than self.log"),
        ("state", "a step reads the state of the metric 'macro'"),
        ("count", "a step reads the state of the metric 'macro'"),
        ("weights", "the metric 'weighted' holds weights"),
        ("draws", "a metric draws random numbers"),
        ("several", "a step logs 'train/classes', and its metric gives several values"),
        ("hidden", "a step logs 'train/hidden', a torchmetrics object that is not a submodule of the model"),
    ],
)
def test_what_a_group_cannot_have_is_refused_by_name(tmp_path: Path, how: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        federate(tmp_path, "vectorized", Odd(how))


def test_a_refusal_leaves_the_tasks_metrics_as_they_are(tmp_path: Path) -> None:
    task = Odd("state")
    before = {name: set(vars(metric)) for name, metric in task.named_modules() if isinstance(metric, Metric)}
    with pytest.raises(ConfigError):
        federate(tmp_path, "vectorized", task)
    assert {name: set(vars(metric)) for name, metric in task.named_modules() if isinstance(metric, Metric)} == before
    task.macro.update(torch.eye(10), torch.arange(10))
    assert float(task.macro.compute()) == pytest.approx(1.0)


class DrawsInTests(Measured):
    """Draws in a test."""

    def __init__(self) -> None:
        super().__init__()
        self.drawing = BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=2, std=False)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.drawing.update(self(batch[0]).mean(1))
        self.log_dict({"test/drawn": self.drawing.compute()["mean"]})


def test_a_test_that_a_group_cannot_make_is_made_alone(tmp_path: Path) -> None:
    runs = [
        federate(tmp_path / how, how, DrawsInTests(), FedPer(), max_rounds=1, protocols=[ClientTest()])
        for how in ("sequential", "vectorized")
    ]
    assert_close(*runs)
    assert any(name == "drawn" for _, _, _, name in by_client(runs[1]))
