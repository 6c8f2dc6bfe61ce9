"""A server that may send anything sees the same of two worlds that differ in a neighbour."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from lit_fed.federation.transport.security import Security
from tests.federation.adversary import sums, worlds
from tests.federation.adversary.server import KINDS, Server
from tests.federation.adversary.support import Handle, Hostile, Make, World, difference, leak, played, reached
from tests.federation.serving_support import Echo, answer_of, free_address, served, until, working
from tests.privacy.support import uniform

pytest.importorskip("dp_accounting")

NEIGHBOURS = (False, True)
SENSITIVITY = 2 * worlds.CLIP * 1.001
"""Of a sum in which one sample is replaced by another, and the grid's rounding."""
WORLDS: dict[str, tuple[Make, Callable[[str], Hostile], float | None]] = {
    "samples": (worlds.samples(), worlds.hostile, SENSITIVITY),
    "samples, states": (worlds.samples(algorithm=worlds.scaffold), worlds.hostile, None),
    "noise of nodes": (worlds.sums(True, uniform), sums.hostile, None),
    "noise of nodes, states": (worlds.sums(True), sums.hostile, None),
    "secure sums": (worlds.sums(False, uniform), sums.hostile, None),
    "secure sums, states": (worlds.sums(False), sums.hostile, None),
    "statistics": (worlds.statistics, worlds.hostile, None),
}


EVERY_DAY = {
    "samples": {"train", "step", "hello", "held", "keep"},
    "noise of nodes, states": {"train", "sum", "secure", "hello", "held", "keep"},
    "secure sums, states": {"train", "ask", "sum", "secure", "hello", "held", "keep"},
    "statistics": {"statistics"},
}
"""What sequences of all kinds must have got from nodes, so that there is something to compare."""


@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_server_sees_no_neighbour(name: str, tmp_path: Path) -> None:
    make, hostile, most = WORLDS[name]
    got = set[str]()
    for place, kind in enumerate(KINDS):
        one, other = (played(make, tmp_path / kind / str(there), hostile(kind), [place], there) for there in NEIGHBOURS)
        assert difference(one, other, most) is None, kind
        got |= reached(one)
    assert got >= EVERY_DAY[name]


def test_the_number_of_an_error_counts_none_that_the_server_is_not_told(tmp_path: Path) -> None:
    """Beside noise client 0 fails in one world, on a large model; the server's own failure is the first."""

    def sequence(world: World, drawn: random.Random) -> None:
        server = Server(world, drawn)
        (name, place), large = world.hot[0], {key: tensor.clone() for key, tensor in world.model.items()}
        large[name].view(-1)[place] = 1e18
        fixed = {"run": server.runs[0], "boot": world.boots[0], "drop": [], "together": [0], "payload": large}
        assert server.work("train", 0, 0, round=0, version=None, **fixed).word == "answer"
        said = server.work("train", 0, 0, round=1, version=[0, 1], **fixed)
        assert said.fields["cause"].endswith("(error 1 in the log of its node)")

    assert leak(WORLDS["noise of nodes, states"][0], tmp_path, sequence, [0]) is None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WORLDS)
def test_a_server_sees_no_neighbour_in_fifty_sequences_of_a_kind(name: str, kind: str, tmp_path: Path) -> None:
    """Five sequences in each of ten worlds: a node remembers what it was asked for, and has rounds to spend."""
    make, hostile, most = WORLDS[name]
    for first in range(100, 150, 5):
        assert leak(make, tmp_path / str(first), hostile(kind), range(first, first + 5), most) is None, first


def over_grpc(make: Make) -> Make:
    """The same nodes, each in a thread, at a server's port."""

    def connected(folder: Path, neighbour: bool, stack: ExitStack) -> World:
        world, address, one_at_a_time = make(folder, neighbour, stack), free_address(), threading.Lock()
        grid, handles, known = stack.enter_context(served(None, address)), list[Handle](), set[int]()

        def alone(handle: Handle, blob: bytes) -> bytes:
            with one_at_a_time:  # they share this process's generators
                return handle(blob)

        def answer(number: int, blob: bytes) -> bytes:
            reply = answer_of(grid, number, blob)
            return reply.blob or reply.error.encode()

        for handle in world.handles:
            stack.enter_context(working(Echo(partial(alone, handle)), address, Security()))
            (number,) = until(lambda: set(grid.nodes()) - known)
            known.add(number)
            handles.append(partial(answer, number))
        world.handles = handles
        return world

    return connected


@pytest.mark.long
@pytest.mark.parametrize("name", ["samples", "noise of nodes, states", "secure sums, states"])
def test_a_server_sees_no_neighbour_over_grpc(name: str, tmp_path: Path) -> None:
    make, hostile, most = WORLDS[name]
    for place, kind in enumerate(("train", "secure")):
        assert leak(over_grpc(make), tmp_path / kind, hostile(kind), [place, place + 2], most) is None, kind
