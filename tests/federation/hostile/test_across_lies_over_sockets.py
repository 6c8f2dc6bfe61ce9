"""A keyed node that lies in every field, over TLS: each lie is its own failure, in the run of one that does not."""

from __future__ import annotations

import re
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.messages.wire import Message, decode
from lit_fed.federation.server import executor
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from tests.federation.serving_support import Echo, free_address, of_node, served, working
from tests.federation.support import nodes_of, small, written
from tests.federation.test_across_lies import ANYWHERE, IN_TRAINING, fields
from tests.support import weights


@pytest.mark.long
def test_every_lie_over_tls_is_the_failure_of_the_node_that_tells_it(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lie a round; client 0 alone halves its distance to 2 in each: after 49 rounds of lies it is 2 in float32.

    In the last round the liar tells the truth, and is believed: w₂ is 3/4 of half the way to 4.
    """
    monkeypatch.setattr(executor, "_MOST_CAUSES", 1000)
    lies = ANYWHERE | IN_TRAINING
    left = iter([lie for lie, _ in lies.values()])
    make = small(on_client_failure="skip", evaluate_every=0, max_rounds=len(lies) + 1)
    nodes = nodes_of(make, tmp_path, [[0], [1]])
    one_at_a_time = threading.Lock()
    current: list[object] = []

    def honest(blob: bytes) -> bytes:
        with one_at_a_time:
            return nodes[0].handle(blob)

    def lying(blob: bytes) -> bytes:
        with one_at_a_time:
            message, answer = decode(blob), nodes[1].handle(blob)
            if message.word != "train":
                return answer
            if message.fields["round"] >= len(current):  # one that says that it has moved is asked again
                current.append(next(left, fields()))
            said = current[-1](decode(answer))  # type: ignore[operator]
            return written(said) if isinstance(said, Message) else said

    made, *parts = make(tmp_path)
    address, bound = free_address(), NodeKeys(keys / "node_keys.yaml")
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        grid = stack.enter_context(served(keys, address, node_keys=bound))
        for name, handle in (("node_0", honest), ("node_1", lying)):
            stack.enter_context(working(Echo(handle), address, of_node(keys, name)))
        federate(grid, made, *parts, patience=Patience(round_s=60), gathering=Gathering(60), node_clients=bound)
    assert made.run.next_round == len(lies) + 1
    assert made.run.failures.count == len(lies)
    for lie, (_, words) in lies.items():
        assert any(re.search(words, cause) for cause in made.run.failures.causes), lie
    assert weights(made)["network.weight"].tolist() == [[2.0, 1.5]]
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_a_key_speaks_for_its_own_clients_only(keys: Path, tmp_path: Path) -> None:
    """Node 1, whose key is that of client 1, says that it is client 0 as well; node 0 is let in beside it."""
    nodes = nodes_of(small(), tmp_path, [[0], [0, 1]])
    made, *parts = small()(tmp_path)
    address, bound = free_address(), NodeKeys(keys / "node_keys.yaml")
    words = r"for client 1 within 4 s.*refused: node \d+ claims client 0, and its key is for client 1; correct its"
    with ExitStack() as stack:
        grid = stack.enter_context(served(keys, address, node_keys=bound))
        for name, node in (("node_1", nodes[1]), ("node_0", nodes[0])):
            stack.enter_context(working(Echo(node.handle), address, of_node(keys, name)))
        with pytest.raises(ConfigError, match=words):
            federate(grid, made, *parts, gathering=Gathering(4), node_clients=bound)
