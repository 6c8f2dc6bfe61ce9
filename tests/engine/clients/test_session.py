"""Being one client: who it is, what it begins with, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import Client, Model, Split
from lit_fed.engine.clients.session import Session
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg
from lit_fed.participation import Participation
from lit_fed.protocols import PersonalTest
from tests.support import LeastSquares, Points, Wanderer, Wandering, assert_same, fit, kept, trainer, weights


class Rounds(Participation):
    """Cohorts given by the test, round by round."""

    def __init__(self, *cohorts: list[int]) -> None:
        super().__init__()
        self.cohorts = cohorts

    @property
    def nominal_cohort_size(self) -> int:
        return len(self.cohorts[0])

    def draw(self, round_idx: int) -> Any:
        import numpy as np

        return np.array(self.cohorts[round_idx], dtype=np.int64)


@contextmanager
def at_work(made: Any) -> Iterator[Session]:
    with made.run.federation.session.at_work():
        yield made.run.federation.session


def scramble(model: Model) -> None:
    """Another client's work, as far as this one can tell."""
    for tensor in model.tensors().values():
        tensor.fill_(7)


def wandered(folder: Path, *cohorts: list[int]) -> Any:
    torch.manual_seed(0)
    data = Points(num_clients=4, sizes=(2, 3))
    return fit(folder, Wanderer(), data, Wandering(), participation=Rounds(*cohorts), max_rounds=len(cohorts))


def test_a_client_begins_with_what_it_kept_and_what_it_received(tmp_path: Path) -> None:
    made = wandered(tmp_path, [0, 1], [1])
    broadcast = made.run.federation.broadcast(2)
    with at_work(made) as session:
        scramble(session.loops["model"].model)
        client = session.enter(1, broadcast, "train")
        assert not client.is_new
        assert client.state["rounds"] == 2
        own = {name: tensor for name, tensor in kept(made, 1).items() if not name.startswith("state/")}
        assert set(own) == {"network.3.weight", "network.3.bias"}
        assert_same(client.model.tensors(), {name: ({**weights(made), **own})[name] for name in client.model.names})
        assert_same(client.begun, {name: client.model.tensor(name) for name in client.begun})


def test_a_new_client_begins_with_the_first_personal_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = Wanderer()
    made = wandered(tmp_path, [0, 1], [1])
    with at_work(made) as session:
        scramble(session.loops["model"].model)
        client = session.enter(3, made.run.federation.broadcast(2), "train")
        assert client.is_new
        assert client.state["rounds"] == 0
        for name in ("network.3.weight", "network.3.bias"):
            assert torch.equal(client.model.tensor(name), first.state_dict()[name])


def test_preparing_for_a_test_leaves_no_trace(tmp_path: Path) -> None:
    made = wandered(tmp_path, [0, 1])
    protocol = PersonalTest(epochs=2)
    federation = made.run.federation
    with at_work(made) as session:
        client = protocol.enter(federation, 0, federation.broadcast(0, "test"))
        before = client.model.copy()
        with session.prepared(client):
            assert not torch.equal(client.model.tensor("network.0.weight"), before["network.0.weight"])
        assert_same(client.model.tensors(), before)


def test_the_state_of_another_method_is_refused_by_name(tmp_path: Path) -> None:
    made = wandered(tmp_path, [0, 1])
    made.run.federation.store.put(0, {"network.9.weight": torch.zeros(1)})
    made.run.federation.store.commit(made.run.workers, 1)
    with at_work(made) as session, pytest.raises(CheckpointError, match=r"client 0 .* differs in 'network\.3\.bias'"):
        session.enter(0, made.run.federation.broadcast(1), "train")


class Halting(FedAvg):
    """Freezes the weight from round 2 on; the bias goes on."""

    needs = frozenset({"loss"})

    def split(self, model: Model, round_idx: int) -> Split:
        if round_idx < 2:
            return Split(tuple(model.parameters))
        return Split(("network.bias",), frozen=("network.weight",))


class Biased(LeastSquares):
    def __init__(self) -> None:
        super().__init__(lr=0.25)
        self.network = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.network.weight)
        torch.nn.init.zeros_(self.network.bias)


def test_frozen_parameters_travel_once_to_whoever_comes_late(tmp_path: Path) -> None:
    # Client 0 (x = (1, 0), y = 2) trains alone, w₁ = b = v: v ← v − ¼·(2v − 2): ½, then ¾. In round 2 only b moves:
    # b = ¾ − ¼·(¾ + ¾ − 2) = 0.875.
    data, protocols = Points(num_clients=2, sizes=(1, 1)), list[Any]()
    made = fit(
        tmp_path, Biased(), data, Halting(), participation=Rounds([0], [0], [0], [1]), max_rounds=3, protocols=protocols
    )
    assert weights(made)["network.weight"].tolist() == [[0.75, 0.0]]
    assert weights(made)["network.bias"].tolist() == [0.875]
    broadcast = made.run.federation.broadcast(3)
    assert set(broadcast.payloads["model"]) == {"network.bias"}
    assert broadcast.num_bytes["model"] == 4
    assert {name: t.tolist() for name, t in broadcast.frozen["model"].items()} == {"network.weight": [[0.75, 0.0]]}
    with at_work(made) as session:
        scramble(session.loops["model"].model)
        client = session.enter(1, broadcast, "train")
        assert_same(client.model.tensors(), weights(made))
        session.train(client)
        # Client 1 (x = (0, 1), y = 4): b = 0.875 − ¼·(0 + 0.875 − 4) = 1.65625.
        assert client.model.tensor("network.bias").tolist() == [1.65625]
        assert client.model.tensor("network.weight").tolist() == [[0.75, 0.0]]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"local_epochs": 0}, r"trainer\.local_epochs is 0; it must be above 0, such as 5 or 0\.5"),
        ({"local_epochs": float("nan")}, r"trainer\.local_epochs is nan"),
        ({"local_epochs": float("inf")}, r"trainer\.local_epochs is inf"),
        ({"local_steps": -1}, r"trainer\.local_steps is -1; it must be at least 1"),
        (
            {"local_epochs": 2, "local_steps": 3},
            r"trainer\.local_epochs is 2 and local_steps is 3; set one of them to None",
        ),
    ],
)
def test_local_work_needs_a_length(tmp_path: Path, lengths: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **lengths)


class Looking(FedAvg):
    """Compares what a client is handed with what the engine says of it."""

    needs = frozenset({"loss"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, str, bool, int]] = []

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        self.seen.append((client.id, client.round_idx, client.stage, client.is_new, client.num_samples))
        assert client.run(batch) is client.run(batch)  # one pass, however often it is asked
        assert_same(client.anchor, {"network.weight": client.received["network.weight"]})
        again = client.run(batch, client.begun).loss
        assert again is not None
        assert float(again) == float(client.teach(batch).loss)  # type: ignore[arg-type]
        return super().objective(client, batch)


def test_what_a_client_is_handed(tmp_path: Path) -> None:
    algorithm = Looking()
    fit(tmp_path, algorithm=algorithm, max_rounds=1, protocols=[PersonalTest()])
    assert algorithm.seen == [
        (0, 0, "train", True, 1), (1, 0, "train", True, 3), (0, 0, "personal", True, 1), (1, 0, "personal", True, 3),
    ]  # fmt: skip
