"""The seam around a method: its four places, by hand on `Points`, on every executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lit_fed import FederatedTrainer
from lit_fed.algorithm import Client, ClientUpdate, Cohort, Reducer
from lit_fed.codecs import CastCodec
from lit_fed.engine.method.wrapper import Privacy, View, Wrapper, Wrappers, WrapperState
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.participation import FullParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.robust import ALIE, Median, SignFlip, TrimmedMean
from tests.privacy.support import uniform
from tests.support import Points, fit, weights

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

    def setup(self) -> None:
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


# ---------------------------------------------------------------------- wrappers of one's own beside others


class Rounded(Privacy):
    """Rounds a client's update to tenths before it leaves: the server needs no more than the sum, and hides nothing."""

    sees: View = "sum"
    hides: ClassVar[Mapping[View, str]] = {}
    neighbours: Sequence[str] = ()

    def negotiate(self, others: Sequence[Wrapper]) -> None:
        self.neighbours = [other.name for other in others]

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        return update.with_payload({name: (10 * x).round() / 10 for name, x in update.payload.items()})


class Counting(Privacy):
    """Counts updates as they arrive, and declares nothing: it sees single updates, and hides them from others."""

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        return below


class Shuffled(Counting):
    """Hides who sent what."""

    hides: ClassVar[Mapping[View, str]] = {"payloads": "{} packs what single clients send, which trainer.privacy mixes"}


@pytest.mark.parametrize(
    ("settings", "neighbours"),
    [
        ({"aggregation": Median()}, ["aggregation"]),
        ({"attack": ALIE(clients=[1])}, ["attack"]),
        ({"attack": SignFlip(clients=[1]), "secure_sum": SecureSum(3, 5.0, nodes=3)}, ["attack", "secure_sum"]),
        ({"uplink_codec": CastCodec("float16")}, []),
    ],
)
def test_a_wrapper_of_ones_own_goes_beside_what_needs_nothing_that_it_hides(
    settings: dict[str, Any], neighbours: list[str], tmp_path: Path
) -> None:
    wrapper = Rounded()
    fit(
        tmp_path, data=Points(6), algorithm=uniform(), max_rounds=1, privacy=wrapper,
        participation=FullParticipation(), **settings,
    )  # fmt: skip
    assert wrapper.neighbours == neighbours


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"privacy": Counting(), "secure_sum": SecureSum(3, 1.0)}, "trainer.privacy needs single updates, which train"),
        (
            {"privacy": Counting(), "aggregation": Median()},
            "trainer.aggregation looks at single updates, which trainer",
        ),
        ({"privacy": Counting(), "attack": ALIE(clients=[1])}, "trainer.attack ALIE forges updates from all honest"),
        (
            {"privacy": Shuffled(), "uplink_codec": CastCodec("float16")},
            "trainer.uplink_codec CastCodec packs what single clients send, which trainer.privacy mixes; leave one out",
        ),
    ],
)
def test_a_wrapper_is_refused_beside_one_that_hides_what_it_must_see(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        FederatedTrainer(**settings)


def test_what_wrappers_are_to_the_loop_follows_from_what_they_declare() -> None:
    plain, private = Wrappers([None, TrimmedMean(1), SignFlip(clients=[0])]), Wrappers([ClientLevel(1.0, 1.0)])
    assert (plain.private, plain.sees_sums_only, plain.withhold, plain.keep_finite) == (False, False, False, False)
    assert (private.private, private.sees_sums_only, private.keep_finite) == (True, False, True)
    assert Wrappers([Shuffled()]).sees_sums_only
    assert Wrappers().keep_finite


def test_a_state_has_the_entries_that_checkpoints_have_had() -> None:
    @dataclass
    class Kept(WrapperState):
        unlisted = frozenset({"key"})
        count: int = 0
        key: str = ""

    one, other = Kept(count=3, key="k"), Kept()
    assert one.as_state() == {"count": 3, "_key": "k"}
    other.load_state(one.as_state())
    assert other == one
