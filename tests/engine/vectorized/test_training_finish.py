"""What clients of a group send and keep: asked for all at once or one by one it is the same, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.engine.method.client import Client, Update
from lit_fed.engine.vectorized.executor import VectorizedExecutor
from lit_fed.engine.vectorized.training import GroupFinish
from lit_fed.errors import ClientFailure
from lit_fed.methods import FedAvg, FedDyn, FedNova, FedRep, Moon, Scaffold
from lit_fed.methods.ditto import Ditto
from tests.engine.vectorized.test_executor import NUM_CLIENTS, assert_close, digits, everything, federate
from tests.support import assert_same

METHODS: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "Scaffold": Scaffold,  # divides by the length of a client's way, of which these clients have several
    "Scaffold-1": lambda: Scaffold(option=1),
    "FedDyn": FedDyn,
    "FedNova": FedNova,  # sends a number of Python as a tensor
    "FedRep": FedRep,  # keeps personal tensors
    "Ditto": Ditto,  # sends what was there before a phase
    "Moon": Moon,
}


def answers(made: Any) -> GroupFinish:
    executor = made.run.federation.executor
    assert isinstance(executor, VectorizedExecutor)
    return executor.finishes["model"]


@pytest.mark.parametrize("name", METHODS)
def test_together_is_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    together = federate(tmp_path / "together", "vectorized", METHODS[name]())
    assert answers(together).together
    monkeypatch.setattr(GroupFinish, "of_all", lambda *_: None)
    assert_same(everything(together), everything(federate(tmp_path / "alone", "vectorized", METHODS[name]())))


class Counted(FedDyn):
    """Counts how often it is asked."""

    asked = 0

    def finish(self, client: Client) -> Update:
        type(self).asked += 1
        return super().finish(client)


def test_a_group_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "asked", 0)
    federate(tmp_path, "vectorized", Counted(), max_rounds=3)
    rounds = 3
    assert rounds <= Counted.asked < rounds * NUM_CLIENTS


class Numbered(FedAvg):
    """Keeps the client's number."""

    def finish(self, client: Client) -> Update:
        return Update(super().finish(client).payload, {"id": torch.tensor(int(client.id))})


class Sized(FedAvg):
    """Weighs by the data."""

    def finish(self, client: Client) -> Update:
        return Update(super().finish(client).payload, weight=2.0 * client.num_samples)


class Measured(FedAvg):
    """Branches by what was trained."""

    def finish(self, client: Client) -> Update:
        update = super().finish(client)
        update.weight = 1.0 if next(iter(update.payload.values())).sum() > 0 else 2.0
        return update


class Peeking(FedAvg):
    """Keeps whether it is asked for one client: something else together than alone."""

    def finish(self, client: Client) -> Update:
        return Update(super().finish(client).payload, {"alone": torch.tensor(type(client) is Client)})


@pytest.mark.parametrize("method", [Numbered, Sized, Measured, Peeking])
def test_who_looks_at_a_client_is_asked_for_each(tmp_path: Path, method: Any) -> None:
    grouped = federate(tmp_path / "grouped", "vectorized", method())
    assert not answers(grouped).together
    assert_close(federate(tmp_path / "alone", "sequential", method()), grouped)


class Failing(FedAvg):
    """Fails for one client, from the second round on."""

    def finish(self, client: Client) -> Update:
        if client.round_idx and client.id == 3:
            raise ValueError("no answer")
        return super().finish(client)


def test_who_has_no_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 3 failed in round 1: ValueError: no answer"):
        federate(tmp_path, "vectorized", Failing(), data=digits())
