"""The seam around a method: its four places, by hand on `Points`, on every executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lit_fed.algorithm import Client, ClientUpdate, Cohort, Reducer
from lit_fed.engine.method.wrapper import Privacy, WrapperState
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.errors import ClientFailure
from lit_fed.participation import FullParticipation
from tests.privacy.support import uniform
from tests.support import fit, weights

W = "network.weight"


class Negated:
    """A loader whose targets have the other sign."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return ((x, -y) for x, y in self.loader)

    def __len__(self) -> int:
        return len(self.loader)


@dataclass
class Rounds(WrapperState):
    """The number of rounds so far."""

    rounds: int = 0


class Everywhere(Privacy):
    """Does something that shows in each place."""

    state: Rounds

    def __init__(self) -> None:
        self.reduced: list[float] = []

    def setup(self, run: Any) -> None:
        self.state = Rounds()

    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        return Negated(loader)

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        if update.client_id == 0:
            return update
        received = client.received
        return update.with_payload({n: received[n] + 2 * (x - received[n]) for n, x in update.payload.items()})

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        add = below.add

        def seen(update: ClientUpdate) -> None:
            self.reduced.append(float(update.payload[W].sum()))
            add(update)

        below.add = seen  # type: ignore[method-assign]
        return below

    def release(self, aggregate: Any, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        self.state.rounds += 1
        return {name: tensor + 1 for name, tensor in aggregate.items()}, cohort, {"wrapper/rounds": self.state.rounds}


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_each_place_is_called_where_it_should_be(executor: str, tmp_path: Path) -> None:
    wrapper = Everywhere()
    made = fit(
        tmp_path, algorithm=uniform(), max_rounds=1, executor=executor, privacy=wrapper,
        participation=FullParticipation(),
    )  # fmt: skip
    # Negated targets: client 0 moves by (-1, 0), client 1 by (0, -2), doubled; their mean is (-½, -2), and 1 more.
    assert sorted(wrapper.reduced) == [-4.0, -1.0]
    assert weights(made)[W].tolist() == [[0.5, -1.0]]
    assert made.metrics["wrapper/rounds"] == 1
    assert made.run.federation.server["around.privacy"] == {"rounds": 1}


def test_what_a_wrapper_keeps_is_resumed(tmp_path: Path) -> None:
    for rounds in (1, 3):
        made = fit(tmp_path, algorithm=uniform(), max_rounds=rounds, privacy=Everywhere(), ckpt_path="last")
    assert made.metrics["wrapper/rounds"] == 3


class Refusing(Privacy):
    """Fails for one client."""

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        if client.id == 1:
            raise ValueError("not this one")
        return update


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_a_client_whose_update_a_wrapper_refuses_is_named(executor: str, tmp_path: Path) -> None:
    settings = {"algorithm": uniform(), "max_rounds": 1, "executor": executor, "privacy": Refusing()}
    with pytest.raises(ClientFailure, match="client 1 failed in round 0: ValueError: not this one"):
        fit(tmp_path / "raise", participation=FullParticipation(), **settings)
    made = fit(tmp_path / "skip", participation=FullParticipation(), on_client_failure="skip", **settings)
    assert made.metrics["participation/failed"] == 1
    assert made.metrics["participation/count"] == 1
