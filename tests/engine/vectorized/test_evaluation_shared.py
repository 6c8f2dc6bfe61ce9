"""Clients with one model, tested by one pass over the data they share: the values of one client after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Digits, Dirichlet, Parts
from lit_fed.engine.vectorized.evaluation import SharedEvaluation
from lit_fed.methods import FedAvg, FedPer
from lit_fed.participation import FullParticipation
from lit_fed.protocols import ClientGlobalTest, ClientTest, GlobalTest
from tests.support import LeastSquares, Points, fit, rows

NUM_CLIENTS = 9


class Counting(Classifier):
    """Counts its test steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            network="mlp", input_shape=(1, 8, 8), optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5)
        )
        self.steps = 0

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.steps += 1
        super().test_step(batch, batch_idx)


class LogsAMetric(Counting):
    """Logs a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("test/metric", self.accuracy)


class LogsARoot(Counting):
    """Logs what is no mean over samples."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test/rms", self(batch[0]).square().mean().sqrt())


class Perplexed(Counting):
    """Logs what is no mean over samples, and looks like one while all outputs are alike: in round 0 nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5 * self.current_epoch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test/perplexity", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]).exp())


class LooksAtTheIndex(Counting):
    """Logs what depends on the number of the batch."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("test/first", float(batch_idx == 0))


class Watched(Counting):
    """Has a hook that sees one evaluation at a time."""

    def on_test_epoch_start(self) -> None:
        self.log("test/begun", 1.0)


def federate(folder: Path, executor: str, task: Any = None, algorithm: Any = None, **kwargs: Any) -> FederatedTrainer:
    settings: dict[str, Any] = {"max_train_samples": 300, "batch_size": 8, "test_batch_size": 7}
    data = Digits(num_clients=NUM_CLIENTS, partition=Dirichlet(alpha=0.5), shared_batch_size=100, **settings)
    protocols = [GlobalTest(), ClientTest(), ClientGlobalTest()]
    made = {"max_rounds": 1, "protocols": protocols} | kwargs
    return fit(folder, task or Counting(), data, algorithm or FedAvg(), executor=executor, **made)


def found_by_client(made: FederatedTrainer) -> dict[tuple[str, str, str], float]:
    """Every client's metrics, by client, stage and name."""
    found = rows(made.log_dir / "clients.csv")
    return {
        (r["client_id"], r["stage"], r["metric"]): float(r["value"]) for r in found if r["stage"] in ("test", "global")
    }


def assert_close(one: dict[Any, float], other: dict[Any, float]) -> None:
    assert one
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), key


@pytest.mark.parametrize("task", [Counting, LogsAMetric, LogsARoot, LooksAtTheIndex, Watched])
def test_values_are_those_of_one_client_after_the_other(tmp_path: Path, task: type[Counting]) -> None:
    alone, grouped = (federate(tmp_path / how, how, task()) for how in ("sequential", "vectorized"))
    assert_close(found_by_client(alone), found_by_client(grouped))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of clients that each pass over shared data answered for; empty passes are not shared."""
    counts: list[int] = []
    together = SharedEvaluation._together

    def counted(*args: Any) -> Any:
        counts.append(0)
        updates = together(*args)
        counts[-1] = len(updates)
        return updates

    monkeypatch.setattr(SharedEvaluation, "_together", counted)
    return counts


def test_what_looks_like_a_mean_while_all_outputs_are_alike_is_not_taken_for_one(
    tmp_path: Path, shared: list[int]
) -> None:
    settings = {"max_rounds": 2, "protocols": [ClientTest()]}
    alone, grouped = (federate(tmp_path / how, how, Perplexed(), **settings) for how in ("sequential", "vectorized"))
    assert shared == [0, 0]
    assert_close(found_by_client(alone), found_by_client(grouped))


def test_personal_models_are_tested_one_after_the_other(tmp_path: Path) -> None:
    alone, grouped = (federate(tmp_path / how, how, algorithm=FedPer()) for how in ("sequential", "vectorized"))
    assert_close(found_by_client(alone), found_by_client(grouped))


@pytest.mark.parametrize(("kind", "piece_values"), [(Counting, 1), (Counting, 2**19), (LogsAMetric, 2**19)])
def test_the_shared_data_are_gone_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Counting], piece_values: int
) -> None:
    monkeypatch.setattr("lit_fed.engine.vectorized.evaluation._PIECE_VALUES", piece_values)
    task = kind()
    made = federate(tmp_path, "vectorized", task, protocols=[ClientTest(), ClientGlobalTest()])
    batches = len(made.run.federation.data.test_loader())
    assert batches == 4
    pieces = batches if piece_values == 1 else 1  # 4 × 100 × 64 values are fewer than 2**19
    assert task.steps == 2 * pieces


def test_arguments_of_metrics_are_held_for_few_values_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: list[int]
) -> None:
    """11 values a sample: 10 logits and a label."""
    held = "lit_fed.engine.vectorized.evaluation._HELD_VALUES"
    samples = len(federate(tmp_path / "all", "vectorized", LogsAMetric()).run.federation.data.test_loader().indices)
    found = []
    for values in (11 * samples, 11 * samples - 1):
        monkeypatch.setattr(held, values)
        found.append(found_by_client(federate(tmp_path / str(values), "vectorized", LogsAMetric())))
    assert shared == [NUM_CLIENTS] * 4 + [0] * 2
    assert_close(*found)


def test_by_hand(tmp_path: Path) -> None:
    """With w = 0 client 0's loss is ½·2² = 2, client 1's ½·4² = 8, on however many samples; the mean is 5."""
    made = fit(tmp_path, LeastSquares(lr=0.0), Points(), FedAvg(), executor="vectorized", protocols=[ClientTest()])
    assert found_by_client(made) == {("0", "test", "loss"): 2.0, ("1", "test", "loss"): 8.0}
    assert float(rows(made.log_dir / "metrics.csv")[-1]["clients/loss_mean"]) == 5.0


class SomeWithoutTests(Points):
    """Clients 1, 2 and 5, the last, have nothing to be tested on."""

    def load_arrays(self) -> Parts:
        found = super().load_arrays()
        assert found.test.clients is not None
        return Parts(found.train, found.test.take(~np.isin(found.test.clients, [1, 2, 5])))


def test_a_client_without_test_samples_has_no_metrics(tmp_path: Path) -> None:
    data = SomeWithoutTests(num_clients=6, sizes=(1, 3))
    made = fit(tmp_path, LeastSquares(lr=0.0), data, FedAvg(), executor="vectorized", protocols=[ClientTest()])
    expected = {("0", "test", "loss"): 2.0, ("3", "test", "loss"): 8.0, ("4", "test", "loss"): 2.0}
    assert found_by_client(made) == expected


class Remembering(LeastSquares):
    """Has a buffer, which clients may keep."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.largest += batch[0].abs().max()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("buffers", "entered", "alike"), [("average", 1, [0, 1]), ("local", 2, [0])])
def test_one_client_is_entered_where_none_has_tensors_of_its_own(
    buffers: str, entered: int, alike: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fit(
        tmp_path, Remembering(), max_rounds=1, buffers=buffers, executor="sequential", client_store="memory",
        participation=FullParticipation(),
    )  # fmt: skip
    federation = made.run.federation
    session, broadcast = federation.session, federation.broadcast(0, "test")
    seen: list[int] = []
    admit = session.admit

    def counted(client_id: int, *args: Any) -> Any:
        seen.append(client_id)
        return admit(client_id, *args)

    monkeypatch.setattr(session, "admit", counted)
    with session.at_work():
        found = SharedEvaluation(session, next(iter(session.loops)))._alike([0, 1], broadcast)
    assert (found, len(seen)) == (alike, entered)
