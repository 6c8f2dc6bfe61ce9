"""Clients with models of their own, tested in groups: the values of one client after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lit_fed import FederatedTrainer
from lit_fed.data import Digits, Dirichlet
from lit_fed.engine.vectorized.evaluation import GroupEvaluation
from lit_fed.methods import FedAvg, FedPer
from lit_fed.protocols import ClientGlobalTest, ClientTest, LocalTest, PersonalTest
from tests.engine.vectorized.test_evaluation_shared import Counting, LogsAMetric, LogsARoot, LooksAtTheIndex, Watched
from tests.engine.vectorized.test_executor import METHODS
from tests.support import assert_same, fit, rows, trainer, weights

NUM_CLIENTS = 9
STAGES = ("test", "personal", "global", "local")
Found = dict[tuple[str, ...], str]


def every_test() -> list[Any]:
    return [ClientTest(), PersonalTest(lr=0.02), LocalTest(), ClientGlobalTest(max_clients=5)]


def federate(folder: Path, executor: str, algorithm: Any = None, task: Any = None, **kwargs: Any) -> FederatedTrainer:
    """Two rounds with all tests of clients; their last batches of 4 are ragged, and some clients have few samples."""
    data = Digits(
        num_clients=NUM_CLIENTS, max_train_samples=300, batch_size=8, test_batch_size=4, partition=Dirichlet(alpha=0.5)
    )
    made = {"max_rounds": 2, "protocols": every_test()} | kwargs
    return fit(folder, task or Counting(), data, algorithm or FedPer(), executor=executor, **made)


def found_by_client(made: FederatedTrainer) -> Found:
    """Every client's metrics as they were written, by round, client, stage and name."""
    found = rows(made.log_dir / "clients.csv")
    keys = ("round", "client_id", "stage", "metric")
    return {tuple(row[key] for key in keys): row["value"] for row in found if row["stage"] in STAGES}


def assert_close(one: Found, other: Found) -> None:
    assert {stage for _, _, stage, _ in one} == set(STAGES)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert float(other[key]) == pytest.approx(float(value), rel=2e-4, abs=2e-6, nan_ok=True), key


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_clients_are_tested_as_one_after_the_other(tmp_path: Path, name: str) -> None:
    alone, grouped = (federate(tmp_path / how, how, METHODS[name]()) for how in ("sequential", "vectorized"))
    assert_close(found_by_client(alone), found_by_client(grouped))


@pytest.mark.parametrize("task", [LogsAMetric, LogsARoot, LooksAtTheIndex, Watched])
def test_values_are_right_whatever_a_task_logs(tmp_path: Path, task: type[Counting]) -> None:
    """What is no mean over samples, or knows its batch's number, is as well: a group's batches are the clients' own."""
    alone, grouped = (federate(tmp_path / how, how, FedAvg(), task()) for how in ("sequential", "vectorized"))
    assert_close(found_by_client(alone), found_by_client(grouped))


@pytest.mark.parametrize("algorithm", [FedPer, FedAvg], ids=lambda found: found.__name__)
def test_a_groups_step_is_made_once_for_all(
    tmp_path: Path, algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupEvaluation, "_check", lambda *args: None)  # tests a client alone as well
    steps = []
    for how in ("sequential", "vectorized"):
        task = Counting()
        federate(tmp_path / how, how, algorithm(), task, protocols=[PersonalTest()], max_rounds=1)
        steps.append(task.steps)
    assert steps[1] < steps[0] / 3


def test_what_a_client_gets_does_not_depend_on_who_is_in_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (1, 2, 4, 9):
        monkeypatch.setattr("lit_fed.engine.vectorized.evaluation._FEWEST", 1)
        found.append(found_by_client(federate(tmp_path / str(size), "vectorized", group_size=size)))
    assert found[0]
    assert all(one == found[0] for one in found)


def test_tests_leave_training_as_it_is(tmp_path: Path) -> None:
    tested = federate(tmp_path / "tested", "vectorized")
    untested = federate(tmp_path / "untested", "vectorized", protocols=[], evaluate_every=0)
    assert_same(weights(tested), weights(untested))
    stores = [one.run.federation.store for one in (tested, untested)]
    for client_id in range(NUM_CLIENTS):
        one, other = (store.get(client_id) or {} for store in stores)
        assert_same(one, other)


class OnlyAlone(Counting):
    """Cannot be computed for several clients: it looks at a value."""

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        if float(self(batch[0]).sum()) > 0:
            self.log("test/positive", 1.0)


def test_a_step_that_needs_one_client_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    before = GroupEvaluation._answers

    def answers(self: GroupEvaluation, question: Any, *args: Any) -> Any:
        tried.append(question.protocol)
        return before(self, question, *args)

    monkeypatch.setattr(GroupEvaluation, "_answers", answers)
    alone, grouped = (federate(tmp_path / how, how, task=OnlyAlone()) for how in ("sequential", "vectorized"))
    assert_close(found_by_client(alone), found_by_client(grouped))
    assert sorted(tried) == ["clients", "clients_global", "personal"]


@pytest.mark.parametrize("algorithm", [FedPer, FedAvg], ids=lambda found: found.__name__)
def test_in_mixed_precision_clients_are_tested_alone(tmp_path: Path, algorithm: type[Any]) -> None:
    """Autocast does not see through vmap, so a group's values would differ."""
    settings = {"precision": "bf16-mixed", "max_rounds": 1}
    trained = federate(tmp_path, "sequential", algorithm(), logger=True, **settings)
    tested = []
    for how in ("sequential", "vectorized"):
        made = trainer(tmp_path / how, executor=how, protocols=every_test(), **settings)
        parts = Counting(), trained.run.federation.data, algorithm()
        tested.append(made.test(*parts, ckpt_path=str(tmp_path / "lightning_logs" / "version_0")))
    assert tested[0] == tested[1]
