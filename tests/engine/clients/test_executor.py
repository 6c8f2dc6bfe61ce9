"""The seam between the loop and whoever trains a cohort: only broadcasts, updates and client states cross it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import FederatedTrainer, Model
from lit_fed.callbacks import Callback
from lit_fed.engine.clients.executor import Executor, SequentialExecutor
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.loop.assemble import EXECUTORS
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.errors import ClientFailure
from lit_fed.methods import FedAvg, FedProx, Scaffold
from lit_fed.participation import UniformParticipation
from tests.support import Points, Unlucky, Wanderer, Wandering, assert_same, fit, rows, weights


class Reversed(Executor):
    """The last client first."""

    def __init__(self, session: Session) -> None:
        self.one = SequentialExecutor(session)

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        yield from self.one.run(list(client_ids)[::-1], broadcast)


class Elsewhere(Executor):
    """Every client in a session of its own, on a copy of the task that nothing was ever written into.

    What a client knows is the broadcast, its own state, its data and the first personal tensors, as on another machine.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tasks = {kind: copy.deepcopy(loop.model.task) for kind, loop in session.loops.items()}
        for task in self.tasks.values():
            for tensor in (*task.parameters(), *task.buffers()):
                tensor.detach().fill_(7)

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        for client_id in client_ids:
            here, loops = self.session, {}
            for kind, own in here.loops.items():
                model = Model(copy.deepcopy(self.tasks[kind]), own.model.buffer_policy)
                model.initial = own.model.initial
                loops[kind] = LocalLoop(own.fabric, model, own.algorithm, own.workers, own.gradients)
            session = Session(loops, here.kinds, here.algorithm, here.store, here.data, here.work, here.seed)
            with session.at_work():
                yield from SequentialExecutor(session).run([client_id], broadcast)


class Watching(Callback):
    """Takes down what crosses the seam."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], tuple[dict[str, Tensor], float, dict[str, float]]] = {}

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        metrics = {name: value for name, value in update.metrics.items() if name != "time_s"}
        payload = {name: tensor.clone() for name, tensor in update.payload.items()}
        self.seen[run.next_round, update.client_id] = (payload, update.weight, metrics)


def federate(folder: Path, algorithm: Any, executor: str, **kwargs: Any) -> tuple[FederatedTrainer, Watching]:
    torch.manual_seed(0)
    watching = Watching()
    settings: dict[str, Any] = {"max_rounds": 4, "participation": UniformParticipation(count=3)} | kwargs
    data = Points(num_clients=5, sizes=(2, 3))
    return fit(folder, Wanderer(), data, algorithm, executor=executor, callbacks=[watching], **settings), watching


def untimed(made: FederatedTrainer, name: str) -> list[Any]:
    """A CSV file's rows without what the clock wrote, and without what knows the order of arrival."""
    found = [
        tuple((key, value) for key, value in row.items() if not key.startswith(("time/", "drift/")))
        for row in rows(made.log_dir / name)
        if row.get("metric") != "time_s"
    ]
    return sorted(found)


@pytest.mark.parametrize("executor", [Reversed, Elsewhere])
@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        pytest.param(FedAvg, {}, id="fedavg"),
        pytest.param(lambda: FedProx(mu=0.1), {"local_epochs": 2}, id="fedprox"),
        pytest.param(Scaffold, {"local_steps": 3}, id="scaffold"),
        pytest.param(lambda: Scaffold(option=1), {"buffers": "local"}, id="scaffold 1, local buffers"),
        pytest.param(Wandering, {"gradient_clip_val": 0.1}, id="personal layer"),
    ],
)
def test_another_executor_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Any, algorithm: Any, kwargs: dict[str, Any]
) -> None:
    monkeypatch.setitem(EXECUTORS, "vectorized", executor)
    (one, one_seen), (two, two_seen) = (
        federate(tmp_path / name, algorithm(), name, **kwargs) for name in ("sequential", "vectorized")
    )
    assert type(two.run.federation.executor) is executor
    assert_same(weights(one), weights(two))
    assert one_seen.seen.keys() == two_seen.seen.keys()
    for key, (payload, weight, metrics) in one_seen.seen.items():
        assert_same(payload, two_seen.seen[key][0])
        assert (weight, metrics) == two_seen.seen[key][1:]
    for client_id in range(5):
        states = [made.run.federation.store.get(client_id) or {} for made in (one, two)]
        assert_same(*states)
    assert untimed(one, "clients.csv") == untimed(two, "clients.csv")
    assert untimed(one, "metrics.csv") == untimed(two, "metrics.csv")
    for name, value in one.metrics.items():
        if name.startswith("drift/"):  # summed in float32 as updates arrive
            assert two.metrics[name] == pytest.approx(value, rel=1e-5)


def test_failures_cross_the_seam_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "vectorized", Elsewhere)
    with pytest.raises(ClientFailure, match="client 7 failed in round 0: OSError: its camera broke"):
        fit(tmp_path, Wanderer(), Points(9, sizes=(2, 3)), Unlucky(), executor="vectorized")


def test_small_updates_that_go_on_together_are_their_own(tmp_path: Path) -> None:
    """The next client does not overwrite the tensors."""
    kept: list[ClientUpdate] = []

    class Keeping(Callback):
        def on_client_end(self, run: Run, update: ClientUpdate) -> None:
            kept.append(update)

    fit(tmp_path, max_rounds=1, protocols=[], callbacks=[Keeping()])
    # (1, 0) of client 0 and (0, 2) of client 1, see test_fedavg
    assert [update.payload["network.weight"].tolist() for update in kept] == [[[1.0, 0.0]], [[0.0, 2.0]]]
