"""A server's executor: what it holds of an answer, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from lit_fed.methods import FedAvg, Scaffold
from tests.federation.support import nodes_of, simulate, small
from tests.support import Points, assert_same, weights


class Counting(MemoryGrid):
    """Counts what refers to an answer when the next one is due, as a tensor that is a view of its bytes does."""

    given: Any = bytearray()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: list[int] = []

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        self.counts.append(sys.getrefcount(self.given))
        for reply in super().pull(message_ids):
            self.given = reply.blob
            yield reply


@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold])
def test_an_answer_is_summed_and_freed_before_the_next_one_is_awaited(tmp_path: Path, algorithm: Any) -> None:
    """Two rounds of four clients, who train and are tested: 16 answers, and greetings."""
    make = small(data=lambda: Points(num_clients=4), algorithm=algorithm, max_rounds=2)
    nodes = nodes_of(make, tmp_path, [[0, 1], [2], [3]])
    grid = Counting({place: node.handle for place, node in enumerate(nodes)})
    made, *parts = make(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(grid, made, *parts)
    assert len(grid.counts) > 16
    assert max(grid.counts) <= 2  # the attribute's and the call's
    assert_same(weights(made), weights(simulate(make, tmp_path / "one")))
