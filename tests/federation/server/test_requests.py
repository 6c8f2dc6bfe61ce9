"""What becomes of messages to nodes: each has one outcome, in the order of arrival, or is given up."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping

import pytest

from lit_fed.errors import WireError
from lit_fed.federation.messages.wire import Message, encode
from lit_fed.federation.server import requests as requests_module
from lit_fed.federation.server.requests import Envelope, NoAnswer, Requests
from lit_fed.federation.transport.grid import Reply


class Post:
    """A grid whose replies a test lays down, by the place of their message."""

    num_bytes = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.replies: list[Reply] = []
        self.dropped: list[str] = []

    def nodes(self) -> Mapping[int, str]:
        return {}

    def push(self, node: int, blob: bytes, most: int) -> str:
        self.sent.append((node, most))
        return str(len(self.sent) - 1)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        found = [reply for reply in self.replies if reply.message_id in message_ids]
        self.replies = [reply for reply in self.replies if reply not in found]
        yield from found

    def drop(self, message_ids: Collection[str]) -> None:
        self.dropped += message_ids


def answer(place: int, cause: str = "fine") -> Reply:
    return Reply(str(place), encode(Message("answer", {"cause": cause})))


def cause_of(message: Message) -> str:
    if (cause := str(message.fields["cause"])) == "odd":
        raise WireError("an odd answer")
    return cause


Late = dict[str, Envelope[str]]


def asked(grid: Post, *nodes: int, end: float = math.inf, late: Late | None = None) -> Requests[str]:
    requests = Requests[str](grid, 1000, late)
    for node in nodes:
        requests.send(Envelope(f"node {node}", node, b"?", cause_of, end, 200))
    return requests


def test_outcomes_come_in_the_order_of_arrival_and_an_error_is_one() -> None:
    grid = Post()
    requests = asked(grid, 7, 8, 9)
    assert grid.sent == [(7, 200), (8, 200), (9, 200)]
    grid.replies = [answer(2, "odd"), answer(0), Reply("1", b"", "it left")]
    (odd, fine, gone) = requests.outcomes()
    assert (odd[0], str(odd[1])) == ("node 9", "an odd answer")
    assert fine == ("node 7", "fine")
    assert (gone[0], type(gone[1]), str(gone[1])) == ("node 8", NoAnswer, "its node did not answer: it left")
    assert not requests


def test_an_answer_larger_than_due_is_an_error() -> None:
    grid = Post()
    requests = asked(grid, 7)
    grid.replies = [answer(0, "fine" * 50)]
    ((_, outcome),) = requests.outcomes()
    assert "and at most 200 are expected; it is dropped" in str(outcome)


def test_a_message_that_is_late_still_counts_and_its_answer_is_none() -> None:
    """Also for the next queue, with which the first shares what is late."""
    grid, late = Post(), Late()
    requests = asked(grid, 7, end=time.monotonic() - 1, late=late)
    assert requests.overdue() == ["node 7"]
    assert requests.overdue() == []
    assert not requests
    later = asked(grid, 8, late=late)
    assert sorted(later.pending()) == ["node 7", "node 8"]
    grid.replies = [answer(0), answer(1)]
    assert list(later.arrived()) == [("node 7", None), ("node 8", "fine")]
    assert not list(later.pending())


def test_what_is_given_up_leaves_the_grid() -> None:
    """Of nodes that have left, and of all at the deadline of `outcomes`."""
    grid, late = Post(), Late()
    asked(grid, 7, end=0.0, late=late).overdue()
    requests = asked(grid, 7, 8, late=late)
    assert requests.drop(lambda node: node == 7) == ["node 7"]  # the late one was awaited no more
    assert sorted(grid.dropped) == ["0", "1"]
    assert list(requests.pending()) == ["node 8"]
    assert list(asked(grid, 9, end=time.monotonic() + 0.02).outcomes()) == []
    assert grid.dropped[2:] == ["3"]


def test_looks_are_rarer_until_something_is_sent_or_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """0, 5, 10 … 160 and then 250 ms."""
    slept: list[float] = []
    monkeypatch.setattr(requests_module.time, "sleep", slept.append)
    grid = Post()
    requests = asked(grid, 7)
    for _ in range(9):
        requests.rest()
    assert slept == [0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    grid.replies = [answer(0)]
    assert list(requests.arrived())
    requests.rest()
    assert slept[9:] == [0.0]
