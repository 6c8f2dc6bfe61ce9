"""The comparison of two worlds finds leaks that are planted: those which an audit found once, and were mended."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_fed.engine.storage.packs import Version, VersionedFiles
from lit_fed.errors import BudgetSpent
from lit_fed.federation.node.run import StateFiles
from lit_fed.federation.secure import party
from lit_fed.federation.secure.party import Party
from lit_fed.federation.secure.sum_log import SumLog
from lit_fed.privacy import ClientLevel
from lit_fed.privacy.keys import RunKey
from lit_fed.privacy.state_snapshot import StateSnapshot
from lit_fed.tasks import Classifier
from tests.federation.adversary import sums, worlds
from tests.federation.adversary.server import Server
from tests.federation.adversary.support import Hostile, Make, World, leak
from tests.federation.adversary.test_across_worlds import SENSITIVITY
from tests.privacy.support import uniform

pytest.importorskip("dp_accounting")

Plant = Callable[[pytest.MonkeyPatch], None]


def noise_by_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Name the noise of a step by the sum alone, whatever the server sent."""
    named = RunKey.release
    patch.setattr(
        RunKey, "release", lambda self, round_idx, clients, total, asked="": named(self, round_idx, clients, total)
    )


def state_of_samples(patch: pytest.MonkeyPatch) -> None:
    """Look at nothing that a sample leaves in a task for others."""
    patch.setattr(StateSnapshot, "changed", lambda self, values=True: None)
    patch.setattr(StateSnapshot, "restore", lambda self: None)
    patch.setattr(StateSnapshot, "is_whole", True)


def refusal_by_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Give a round's noise for a sum that had it, and refuse another sum."""

    def secret(self: Any, node: int, round_idx: int, request: bytes, content: bytes) -> bytes:
        name = self._opened.release(round_idx, (node,), np.frombuffer(content, np.uint8))
        if name not in self._opened.releases:
            if round_idx in self._opened.releases.values():
                raise BudgetSpent(f"round {round_idx} got this node's noise before, for another sum")
            self._opened.record(name, round_idx)
        key: bytes = self._opened.secret(name)
        return key

    patch.setattr(ClientLevel, "secret", secret)
    patch.setattr(ClientLevel, "charge", lambda self, round_idx, request: None)
    patch.setattr(Party, "earlier_vector", lambda self, call, request: None)
    patch.setattr(SumLog, "note", lambda self, *_: None)


def version_of_the_state(patch: pytest.MonkeyPatch) -> None:
    """Tell the checksum of a client's state."""

    def write(self: Any, name: str, round_idx: int, state: Any) -> Version:
        version = VersionedFiles.write(self, name, round_idx, state)
        self.take(self.flush())
        return version

    patch.setattr(StateFiles, "write", write)
    patch.setattr(StateFiles, "is_written", VersionedFiles.is_written)


def sum_over_one_client(patch: pytest.MonkeyPatch) -> None:
    """Consent whatever the number of nodes with clients."""
    patch.setattr(party, "need", lambda *_: None)


class Drifting(Classifier):
    """Its inputs lose their running mean, once it has seen some, in a frozen parameter or in a dict.

    Args:
        in_parameter: Where the mean is.
    """

    def __init__(self, in_parameter: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(worlds.INPUTS, 3), nn.ReLU(), nn.Linear(3, 3)]
        super().__init__(nn.Sequential(*layers), num_classes=3)
        self.in_parameter, self.calls, self.seen = in_parameter, 0, {"mean": 0.0}
        self.centre = nn.Parameter(torch.zeros(worlds.INPUTS), requires_grad=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.calls += 1
        if self.in_parameter:
            with torch.no_grad():
                self.centre.mul_(0.5).add_(0.5 * x.reshape(-1, worlds.INPUTS).mean(0))
        else:
            self.seen["mean"] = 0.5 * self.seen["mean"] + 0.5 * float(x.mean())
        mean = self.centre if self.in_parameter else self.seen["mean"]
        return cross_entropy(self.network(x - mean if self.calls > 40 else x), y)


def nudged(world: World) -> list[dict[str, Tensor]]:
    """A model, and one that differs at a weight at which the neighbour alone looks."""
    (name, place), other = world.hot[0], {key: tensor.clone() for key, tensor in world.model.items()}
    other[name].view(-1)[place] += 0.5
    return [dict(world.model), other]


def twice(world: World, drawn: random.Random) -> None:
    """Rounds that an honest server asks for, each a second time with a model that differs in a weight."""
    server = Server(world, drawn)
    for round_idx in range(4):
        for client in world.clients[0]:
            fixed = {"round": round_idx, "run": server.runs[0], "boot": world.boots[0], "version": None, "drop": []}
            for model in nudged(world):
                server.work("train", 0, client, together=[0, 1], payload=model, **fixed)


def two_sums(world: World, drawn: random.Random) -> None:
    """Two sums of a round, of models that differ in a weight."""
    server = sums.SumsServer(world, drawn)
    for model in nudged(world):
        asked = sums.Asked("train", server.runs[0], 0, model)
        server.work_of_all(asked)
        server.sum(asked, {at: list(own) for at, own in enumerate(world.clients)}, {}, sums.as_it_is)


def alone(world: World, drawn: random.Random) -> None:
    """A sum of all nodes, to which one client's answer is all that they give."""
    server = sums.SumsServer(world, drawn)
    asked = sums.Asked("train", server.runs[0], 0, dict(world.model))
    server.work_of_all(asked)
    server.sum(asked, {0: [0], 1: [], 2: [], 3: []}, {}, sums.as_it_is)


PLANTED: dict[str, tuple[Plant, Make, Hostile, float | None, str]] = {
    "1, noise": (noise_by_the_sum, worlds.samples(), twice, SENSITIVITY, "train"),
    "3, a frozen parameter": (state_of_samples, worlds.samples(lambda: Drifting(True)), twice, SENSITIVITY, "step"),
    "3, a dict": (state_of_samples, worlds.samples(lambda: Drifting(False)), twice, SENSITIVITY, "step"),
    "5, a refusal": (refusal_by_the_sum, worlds.sums(True, uniform), two_sums, None, "secure"),
    "6, a version": (version_of_the_state, worlds.sums(True), sums.hostile("train"), None, "train"),
    "7, a sum over one": (sum_over_one_client, worlds.sums(False, uniform), alone, None, "sum"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_leak_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, make, hostile, most, where = PLANTED[name]
    plant(monkeypatch)
    found = leak(make, tmp_path, hostile, range(2), most)
    assert found is not None
    assert f", {where} to node" in found
