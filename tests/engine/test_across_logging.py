"""What a task logs, as columns of metrics.csv and clients.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from lit_fed.algorithm import Client, Pass, Phase
from lit_fed.data import Parts
from lit_fed.engine.wire.workers import ClientParallelStrategy
from lit_fed.errors import ClientFailure, LitFedError
from lit_fed.methods import FedAvg, FedProx
from lit_fed.participation import UniformParticipation
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest, UnseenTest
from tests.support import LeastSquares, Points, fit, rows


def logged(made: Any) -> dict[str, float]:
    """What the task logged, in the last row of metrics.csv."""
    last = rows(made.log_dir / "metrics.csv")[-1]
    engine = ("time/", "comm/", "drift/", "participation/")
    return {name: float(value) for name, value in last.items() if name != "round" and not name.startswith(engine)}


class Talking(LeastSquares):
    """Logs under every kind of name, in training and in evaluation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.log("train/size", len(batch[0]), prog_bar=True, on_step=True)
        self.log_dict({"train_double": 2 * loss, "deep/name": 1})
        self.log("hidden", 1.0, logger=False)
        self.log("hidden_too", 1.0, False, False)
        self.log("pair", {"a": 1.0, "b": loss})
        self.log("often", 6.0, batch_size=1)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/epochs", 1.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))
        self.log_dict({"test/size": len(batch[0]), "val/odd": 7.0, "tested": 1.0}, sync_dist=True)

    def on_test_epoch_end(self) -> None:
        self.log("test_ends", 3.0)


def test_names_in_the_record(tmp_path: Path) -> None:
    made = fit(tmp_path, Talking(), max_rounds=1)
    # Client 0 (1 sample) has loss ½·2² = 2, client 1 (3 samples) ½·4² = 8: the mean over samples is 6.5; that of the
    # sizes is (1·1 + 3·3)/4. In the test w = (¼, 1½): ½·1.75² and ½·2.5².
    one, two = 0.5 * 1.75**2, 0.5 * 2.5**2
    found = logged(made)
    training = {"loss": 6.5, "size": 2.5, "double": 13.0, "deep/name": 1.0, "pair.a": 1.0, "pair.b": 6.5}
    training |= {"often": 6.0, "epochs": 1.0, "lr": 0.5}
    expected = {f"train/{name}": value for name, value in training.items()}
    tested = {"loss": (one + 3 * two) / 4, "size": 4.0, "odd": 7.0, "tested": 1.0, "ends": 3.0}
    expected |= {f"global/{name}": value for name, value in tested.items()}
    means = {"loss": (one + two) / 2, "size": 2.0, "odd": 7.0, "tested": 1.0, "ends": 3.0}
    expected |= {f"clients/{name}_mean": value for name, value in means.items()}
    statistics = ("mean", "weighted", "std", "p10", "min", "worst", "worst10")
    assert {name for name in found if not name.endswith(statistics[1:])} == expected.keys()
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    spread = {name for name in found if name.startswith("clients/")}
    assert spread == {f"clients/{name}_{kind}" for name in means for kind in statistics}


def test_the_loss_in_the_record_is_what_is_minimised(tmp_path: Path) -> None:
    # Two steps with μ = 1 from 0. Client 0: ½·2² = 2, then w₁ = 1: ½ + ½·1 = 1. Client 1: 8, then w₂ = 2: 2 + 2 = 4.
    # Means over batches, then over samples: (1·1.5 + 3·6)/4; the task's own (1·1.25 + 3·5)/4; the term (¼ + 3·1)/4.
    made = fit(tmp_path, Talking(), Points(), FedProx(mu=1.0), max_rounds=1, local_epochs=2, protocols=[])
    found = logged(made)
    assert found["train/loss"] == pytest.approx((1.5 + 3 * 6) / 4)
    assert found["train/task"] == pytest.approx((1.25 + 3 * 5) / 4)
    assert found["train/prox"] == pytest.approx((0.25 + 3 * 1) / 4)


def test_single_terms_stand_there_only_beside_others(tmp_path: Path) -> None:
    assert not {"train/task", "train/prox"} & logged(fit(tmp_path, algorithm=FedProx(mu=0.0))).keys()


class Measured(LeastSquares):
    """Metrics of torchmetrics: logged as objects, in a collection, updated or called."""

    def __init__(self) -> None:
        super().__init__()
        self.mae = torchmetrics.MeanAbsoluteError()
        self.several = torchmetrics.MetricCollection({"mse": torchmetrics.MeanSquaredError()}, prefix="test_")
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(len(batch[0]))
        self.log("train_seen", self.seen)
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        predicted = self(x).squeeze(1)
        self.mae(predicted, y)
        self.log("test_mae", self.mae)
        self.several.update(predicted, y)
        self.log_dict(self.several)


def single_batches() -> Points:
    data = Points(test_batch_size=1)
    data.batch_size = 1
    return data


def test_metric_objects_are_computed_once_over_all_batches(tmp_path: Path) -> None:
    made = fit(tmp_path, Measured(), single_batches(), max_rounds=1, local_steps=1)
    # One step each: w = (1/4·1, 3/4·2) again; errors 1.75 of one sample and 2.5 of three.
    found = logged(made)
    assert found["global/mae"] == pytest.approx((1.75 + 3 * 2.5) / 4)
    assert found["global/mse"] == pytest.approx((1.75**2 + 3 * 2.5**2) / 4)
    assert found["clients/mae_mean"] == pytest.approx((1.75 + 2.5) / 2)
    assert found["clients/mse_min"] == pytest.approx(1.75**2)
    assert made.run.names.direction("global/mae") == "min"  # torchmetrics says so


def seen(made: Any) -> list[float]:
    return [float(row["value"]) for row in rows(made.log_dir / "clients.csv") if row["metric"] == "train/seen"]


def test_a_metric_starts_anew_with_every_client(tmp_path: Path) -> None:
    assert seen(fit(tmp_path, Measured(), max_rounds=2)) == [1.0, 3.0, 1.0, 3.0]


class Looking(FedAvg):
    """Runs the task beside its training: in passes before and after it, and as a teacher of each batch."""

    needs = frozenset({"loss"})

    def phases(self, client: Client) -> list[Phase | Pass]:
        passes = [Pass(name, client.train_loader(), self._look, example={"loss": torch.empty(1)}) for name in "ab"]
        return [passes[0], *super().phases(client), passes[1]]

    def _look(self, client: Client, batch: Any) -> dict[str, Tensor]:
        loss = client.run(batch).loss
        assert loss is not None
        return {"loss": loss.reshape(1)}

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        client.teach(batch)
        return super().objective(client, batch)


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_metric_counts_no_batch_of_a_pass_or_a_teacher(tmp_path: Path, executor: str) -> None:
    made = fit(tmp_path, Measured(), algorithm=Looking(), max_rounds=2, executor=executor)
    assert sorted(seen(made)) == [1.0, 1.0, 3.0, 3.0]  # the samples of the clients' one epoch


def test_a_metric_starts_anew_after_fine_tuning(tmp_path: Path) -> None:
    """What fine-tuning updates is nobody's, and must not count for the next client."""
    assert seen(fit(tmp_path, Measured(), max_rounds=2, protocols=[PersonalTest()])) == [1.0, 3.0, 1.0, 3.0]


def test_a_metric_starts_anew_after_a_client_that_failed(tmp_path: Path) -> None:
    class Failing(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) == 1:
                raise RuntimeError("no battery")
            return loss

    assert seen(fit(tmp_path, Failing(), max_rounds=2, on_client_failure="skip")) == [3.0, 3.0]


class Gathering(LeastSquares):
    """Keeps its own list over an epoch, as many a module does."""

    def on_test_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.loss(batch))

    def on_test_epoch_end(self) -> None:
        self.log("test_worst", max(self.losses))


def test_nobody_is_asked_about_no_data(tmp_path: Path) -> None:
    """As in Lightning, hooks around an evaluation without a batch do not run: the maximum of no loss would fail."""

    class OnlyOnes(Points):
        def load_arrays(self) -> Any:
            parts = super().load_arrays()
            return Parts(parts.train, parts.test.take(slice(1, None)))

    made = fit(tmp_path, Gathering(), OnlyOnes(), max_rounds=1, protocols=[ClientTest(), GlobalTest()])
    assert logged(made)["clients/worst_mean"] == logged(made)["global/worst"] == pytest.approx(0.5 * 2.5**2)


def test_several_numbers_are_refused(tmp_path: Path) -> None:
    class Vector(LeastSquares):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("x", batch[0].new_ones(3))
            return self.loss(batch)

    with pytest.raises(ClientFailure, match=r"self\.log\('train/x', …\) got 3 values; log one number, or their mean"):
        fit(tmp_path, Vector())


def test_each_protocol_names_its_columns(tmp_path: Path) -> None:
    made = fit(
        tmp_path,
        Talking(),
        Points(6),
        FedAvg(),
        max_rounds=1,
        participation=UniformParticipation(count=2, unseen_fraction=0.5),
        protocols=[GlobalTest(), ClientTest(), UnseenTest(), PersonalTest()],
    )
    means = {name for name in logged(made) if name.endswith("/loss_mean")}
    assert means == {"clients/loss_mean", "unseen/loss_mean", "personal/loss_mean"}


class Twice(LeastSquares):
    """Logs two names that are one column: in one call, or in two of them."""

    def __init__(self, first: str, second: str, stage: str) -> None:
        super().__init__()
        self.first, self.second, self.stage = first, second, stage

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.stage == "train":
            self.log_dict({self.first: 1.0, self.second: 2.0})
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.first, 1.0)
        if self.stage == "test":
            self.log(self.second, 2.0)


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("first", "second", "stage"),
    [("size", "test/size", "test"), ("val_size", "test_size", "test"), ("size", "train/size", "train")],
)
def test_two_names_of_one_column_are_refused_and_never_averaged(
    tmp_path: Path, first: str, second: str, stage: str, executor: Any
) -> None:
    told = f"model Twice logs '{first}' and '{second}' in one step, and both are the metric '.*size' of the record"
    with pytest.raises(LitFedError, match=told):
        fit(tmp_path, Twice(first, second, stage), executor=executor)


def test_a_name_loses_one_prefix_only(tmp_path: Path) -> None:
    made = fit(tmp_path, Twice("size", "test/val_size", "test"), max_rounds=1)
    assert (made.metrics["global/size"], made.metrics["global/val_size"]) == (1.0, 2.0)


class Ordered(LeastSquares):
    """Logs an object first, then a sum, then means."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.error.update(self(batch[0]).squeeze(1), batch[1].float())
        self.log("zeal", self.error)
        self.log("count", 1.0)
        self.log("loss", self.loss(batch))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_the_first_logged_metric_chooses_the_best_round_also_an_object(
    tmp_path: Path, executor: Any, processes: int
) -> None:
    """By the order of calls, over the global model and over clients, before and after a resume."""
    for protocol, column in ((GlobalTest(), "global/zeal"), (ClientTest(), "clients/zeal_mean")):
        where, ckpt_path = tmp_path / protocol.name, None
        for rounds in (1, 2):
            together = {"devices": 2, "strategy": ClientParallelStrategy(start_method="fork")}
            options = (together if processes == 2 else {}) | {"executor": executor, "max_rounds": rounds}
            data = Points(num_clients=4, shared_batch_size=2)
            fit(where, Ordered(), data, protocols=[protocol], ckpt_path=ckpt_path, **options)
            folder, ckpt_path = where / "lightning_logs" / "version_0", "last"
            content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
            assert content["monitor"] == column
        names = [name for name in rows(folder / "metrics.csv")[0] if name.startswith(protocol.name)]
        found = list(dict.fromkeys(name.partition("/")[2].partition("_")[0] for name in names))
        assert found == ["zeal", "count", "loss"]
