"""Who has come, who is missing and who is refused, as it is said while a federation gathers and works."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.federation.keys.node_keys import Grant
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.server import roster as roster_module
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.identity import Identity
from lit_fed.federation.server.roster import Gathering, Roster
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from tests.federation.support import Clock, KeyedGrid, nodes_of, small, written
from tests.support import LeastSquares, Points, weights

KEYS = {1: "a1", 2: "b2", 3: "a1", 4: "b2"}


@pytest.fixture
def gathering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Roster, list[str], Any]]:
    """A roster of three clients, what it says, and its grid of a node for each list of clients."""
    monkeypatch.setattr(roster_module, "_AGAIN_S", (0.0, 0.0))

    def gather(homes: list[list[int]], bound: Any = None) -> tuple[Roster, list[str], Any]:
        said: list[str] = []
        nodes = nodes_of(small(data=lambda: Points(num_clients=3)), tmp_path, homes)
        grid = KeyedGrid({place + 1: node.handle for place, node in enumerate(nodes)}, KEYS)
        settings = nodes[0].settings
        return Roster(grid, Identity("0" * 16), settings, 3, said.append, num_classes=5, node_clients=bound), said, grid

    return gather


def settle(roster: Roster, times: int = 8) -> None:
    """Look again: one answer comes with each look."""
    for _ in range(times):
        roster.refresh()


def test_it_says_who_has_come_and_who_has_left(gathering: Any) -> None:
    roster, said, grid = gathering([[0, 2], [1]])
    settle(roster)
    assert said == [
        "node 1 connected with clients 0, 2: 2 of 3 clients are connected",
        "node 2 connected with client 1: 3 of 3 clients are connected",
    ]
    del grid.handlers[1]
    settle(roster)
    assert said[2:] == ["node 1 left with clients 0, 2"]
    assert roster.home(0) is None
    assert roster.home(1) is not None


def test_whose_key_is_revoked_is_not_asked_to_connect_again(gathering: Any) -> None:
    bound = {"a1": Grant(frozenset({0, 2}))}
    roster, _, _ = gathering([[0, 2]], bound)
    new_key = "the key for client 1 is revoked, or not in --node_keys: see lit-fed provision --new_key"
    assert roster.advice([1], "restart it") == new_key
    assert roster.advice([0, 1], "restart it") == f"restart it, and {new_key}"
    assert roster.advice([0, 2], "restart it") == "restart it"
    with pytest.raises(ConfigError, match=f"no node connected for client 1 within 0.5 s; {new_key}"):
        roster.gather(Gathering(0.5))
    bound["b2"] = Grant(frozenset({1}))  # the site has another key
    assert roster.advice([1], "restart it") == "restart it"
    roster.node_clients = None
    assert roster.advice([0, 1], "restart it") == "restart it"


def test_it_says_who_is_missing_and_since_when(gathering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 5 s; a minute later; then after twice the time."""
    Clock(monkeypatch)
    roster, said, _ = gathering([[1]])
    with pytest.raises(
        ConfigError, match=r"no node connected for client 0, 2 within 300 s; start it with lit-fed node"
    ):
        roster.gather(Gathering(300))
    assert said == [
        "node 1 connected with client 1: 1 of 3 clients are connected",
        *(f"waiting for clients 0, 2: {seconds} s of at most 300 s" for seconds in (5, 65, 130, 260)),
    ]


def test_it_says_who_is_still_missing_and_when_all_are_there(gathering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    roster, said, grid = gathering([[1], [0], [2]])
    away = {node: grid.handlers.pop(node) for node in (2, 3)}

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("waiting"):
            node = min(away)
            grid.handlers[node] = away.pop(node)

    roster.say = say
    roster.gather(Gathering())
    told = [line.partition(", with")[0] for line in said if not line.startswith("node")]
    assert told == [
        "waiting for clients 0, 2: 5 s of at most 300 s",
        "waiting for client 2: 65 s of at most 300 s",
        "all 3 clients are connected, on 3 nodes",
    ]


def test_it_says_who_has_most_of_the_samples(gathering: Any) -> None:
    """A client that registers very many weighs as many: whoever starts the run is told."""
    roster, said, _ = gathering([[0, 1, 2]])
    roster.gather(Gathering(1.0))
    assert said[-1] == "all 3 clients are connected, on 1 nodes, with 5 training samples; client 1 has the most, 3"


def test_a_mistyped_client_hurts_nobody(gathering: Any) -> None:
    """Node 2 is to be client 1 and says 0: it is refused, node 1 is not, and when it is started again all are there."""
    roster, said, grid = gathering([[0, 2], [0], [1]], {"a1": Grant(frozenset({0, 2})), "b2": Grant(frozenset({1}))})
    again = grid.handlers.pop(3)
    settle(roster)
    words = (
        "refused node 2: node 2 claims client 0, and its key is for client 1; correct its --client, or the file of "
        "--node_keys"
    )
    assert said[1:] == [words]
    grid.handlers[2] = again  # under the same key it has the same id, and may not have been missed
    settle(roster)
    assert {one: home.node for one in range(3) if (home := roster.home(one))} == {0: 1, 1: 2, 2: 1}
    assert said[2:] == ["node 2 connected with client 1: 3 of 3 clients are connected"]
    assert not roster.identity.reports  # nobody is, before the run has begun


def test_a_node_that_was_started_again_takes_the_place_of_what_it_was(gathering: Any) -> None:
    """Node 3 has the key of node 1, which has not been missed yet and is asked again in vain."""
    roster, said, grid = gathering([[0, 2], [1], [0, 2]])
    again = grid.handlers.pop(3)
    settle(roster)
    grid.handlers[3] = again
    settle(roster, 3)
    assert roster.home(0) is not None
    assert "node 3 connected with clients 0, 2: 3 of 3 clients are connected" in said


def test_a_client_that_comes_back_with_other_samples_is_refused(gathering: Any) -> None:
    roster, said, grid = gathering([[0, 2], [1]])
    settle(roster)
    roster.identity.begin(roster.present())
    honest = grid.handlers.pop(2)
    settle(roster)

    def lying(blob: bytes) -> bytes:
        answer = decode(honest(blob))
        report = answer.fields["clients"]["1"] | {"samples": 4, "histogram": [0, 0, 0, 0, 4]}
        return written(replace(answer, fields={**answer.fields, "clients": {"1": report}}))

    grid.handlers[2] = lying
    settle(roster)
    assert said[-1] == ("refused node 2: client 1 reports different numbers of samples than before; start a new run")
    grid.handlers[2] = honest
    settle(roster)
    assert said[-1] == "node 2 connected with client 1: 3 of 3 clients are connected"


def test_a_node_that_gives_ever_new_reasons_is_said_five_times(gathering: Any) -> None:
    roster, said, grid = gathering([[0, 2], [1]])
    count = iter(range(100))
    grid.handlers[2] = lambda blob: encode(Message("failure", {"cause": f"reason {next(count)}"}))
    settle(roster, 40)
    assert [line for line in said if line.startswith("refused")] == [f"refused node 2: reason {at}" for at in range(5)]


class Deaf(KeyedGrid):
    """Has no answers."""

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Nothing."""
        yield from ()


def test_what_nobody_awaits_any_more_leaves_the_grid(gathering: Any) -> None:
    """An answer that comes after the time-out, and the greeting of a node that has left."""
    roster, _, grid = gathering([[0, 2], [1]])
    settle(roster)
    grid.__class__ = Deaf
    assert roster.ask({1: Message("held", {"run": "0"}), 2: Message("held", {"run": "0"})}, 0.1, lambda *_: True) == {}
    assert not grid._waiting
    roster.forget(2)
    roster.refresh()
    assert len(grid._waiting) == len(list(roster._greetings.pending())) == 1
    del grid.handlers[2]
    roster.refresh()
    assert not grid._waiting
    assert not list(roster._greetings.pending())


def test_a_client_over_its_keys_ceiling_of_samples_is_refused_by_name(gathering: Any) -> None:
    """Client 1 has 3 samples, client 0 and 2 have 1 each."""
    bound = {"a1": Grant(frozenset({0, 2}), 1), "b2": Grant(frozenset({1}), 2)}
    roster, said, _ = gathering([[0, 2], [1]], bound)
    settle(roster)
    words = "client 1 reports 3 training samples, and its key may report 2; correct its data, or most_samples in the"
    assert said[1:] == [f"refused node 2: {words} file of --node_keys"]
    bound["b2"] = Grant(frozenset({1}), 3)  # the file was corrected
    settle(roster)
    assert said[2:] == ["node 2 connected with client 1: 3 of 3 clients are connected"]


class Late(KeyedGrid):
    """Gives what node 2 says of its training in round 0 only after it was asked in round 1."""

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """The answers, in their time."""
        told = {one: (self._waiting[one][0], decode(self._waiting[one][1])) for one in message_ids}
        trained = [message.fields["round"] for node, message in told.values() if node == 2 and message.word == "train"]
        for one, (node, message) in reversed(told.items()):
            if 1 in trained or node != 2 or message.word != "train":
                yield from super().pull([one])
                return


def test_an_answer_of_an_old_round_is_left_out_and_its_node_is_back(tmp_path: Path) -> None:
    """Client 0 alone: w = (1, 0). Then 0 gives (1.5, 0), 1 gives (1, 2); with weights 1 and 3: (1.125, 1.5)."""
    make = small(on_client_failure="skip")
    nodes: list[Node] = nodes_of(make, tmp_path, [[0], [1]])
    made, *parts = make(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid: MemoryGrid = Late({1: nodes[0].handle, 2: nodes[1].handle}, KEYS)
        federate(grid, made, *parts, patience=Patience(round_s=0.3))
    assert weights(made)["network.weight"].tolist() == [[1.125, 1.5]]
    assert made.run.failures.causes == {"it did not answer within 0.3 s": 1}
    assert not grid._waiting  # nothing is left lying in the grid


class Wide(LeastSquares):
    """Sends 400,000 bytes beside its two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(100_000))


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_message_over_a_nodes_own_limit_is_not_sent_and_names_it(
    tmp_path: Path, tolerant: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last model, too; client 0 trains alone where that is tolerated, as in the test above."""
    make = small(Wide, on_client_failure="skip" if tolerant else "raise")
    nodes = [*nodes_of(make, tmp_path, [[0]]), *nodes_of(make, tmp_path / "b", [[1]], limit=100_000)]
    made, *parts = make(tmp_path)
    words = r"its message has 40\d,\d{3} bytes, and its node reads 100,000; raise --most_bytes there"
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = MemoryGrid({1: nodes[0].handle, 2: nodes[1].handle})
        if tolerant:
            federate(grid, made, *parts)
        else:
            stack.enter_context(pytest.raises(ClientFailure, match=rf"client 1 .*{words}"))
            federate(grid, made, *parts)
    if tolerant:
        assert weights(made)["network.weight"].tolist() == [[1.5, 0.0]]
        assert re.search(f"WARNING node 2 is not asked: {words}", capsys.readouterr().out)
