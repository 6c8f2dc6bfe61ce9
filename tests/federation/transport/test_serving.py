"""Messages to nodes and back, over the sockets of this machine, and what becomes of them when something fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError, ProcessLost
from lit_fed.federation.keys.node_keys import key_of
from lit_fed.federation.transport import calling, frames, serving
from lit_fed.federation.transport.calling import Line
from lit_fed.federation.transport.grid import Reply
from lit_fed.federation.transport.security import Security
from lit_fed.federation.transport.serving import rpc_grid
from tests.federation.serving_support import Echo, Link, answer_of, free_address, of_node, served, until, working
from tests.support import ROOT


@pytest.mark.parametrize(
    ("security", "bind", "keys", "expected"),
    [
        (Security(), "0.0.0.0:1", None, "--ca is missing, and 0.0.0.0:1 is not on this machine"),
        (Security(), None, {"00"}, "--ca is missing; give TLS and keys together"),
        (Security(__file__, __file__, __file__), None, None, "--node_keys is missing; give TLS and keys together"),
    ],
)
def test_a_server_is_protected_or_on_loopback(security: Security, bind: Any, keys: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected), rpc_grid("127.0.0.1:1", security, 1, bind, keys):
        pytest.fail("it listens")


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_sent_comes_back_whole(keys: Path, secure: bool) -> None:
    address, node = free_address(), Echo(lambda blob: blob[::-1])
    security = of_node(keys) if secure else Security()
    with served(keys if secure else None, address) as grid, working(node, address, security) as line:
        (found,) = until(grid.nodes)
        for size in (1, 1000, 6_000_000):
            blob = os.urandom(size)
            assert answer_of(grid, found, blob) == Reply(str(grid._count), blob[::-1])
        together = [grid.push(found, bytes([place]), 2**31) for place in range(5)]
        got: list[Reply] = []
        until(lambda: got.extend(grid.pull(together)) or len(got) == 5)
        assert [reply.blob for reply in got] == [bytes([place]) for place in range(5)]
        assert grid.nodes() == {found: key_of((keys / "node_0.crt").read_bytes()) if secure else ""}
        until(lambda: not line._answers)  # all are acknowledged
        (peer,) = grid._peers.values()
        assert (peer.pending, len(peer.outbox), grid._replies, line._held) == ({}, 0, {}, 0)
    assert node.said == [f"connected to the server at {address}; waiting for work"]


def test_a_large_message_and_its_answer_are_in_memory_once_on_each_end_and_not_for_longer(keys: Path) -> None:
    """Of 64 MiB: the request on the server and on the node, the answer on the node and on the server; then nothing."""
    size, address = 2**26, free_address()
    node = Echo(lambda blob: bytearray(len(blob)))  # type: ignore[arg-type, return-value]
    with served(keys, address) as grid, working(node, address, of_node(keys)) as line:
        (found,) = until(grid.nodes)
        tracemalloc.start()
        try:
            for _ in range(2):  # what is left of the first would be in memory beside the second
                assert len(answer_of(grid, found, bytearray(size)).blob) == size  # type: ignore[arg-type]
                until(lambda: not line._answers)  # all are acknowledged
                until(lambda: tracemalloc.get_traced_memory()[0] < size / 8)
            assert tracemalloc.get_traced_memory()[1] < 4.25 * size
        finally:
            tracemalloc.stop()


def test_a_node_that_takes_its_leave_is_missed_at_once_and_its_message_has_failed(keys: Path) -> None:
    address, begun, go = free_address(), threading.Event(), threading.Event()

    def dawdle(blob: bytes) -> bytes:
        begun.set()
        go.wait(20)
        return blob

    with served(keys, address) as grid:
        with working(Echo(dawdle), address, of_node(keys)):
            (found,) = until(grid.nodes)
            message_id = grid.push(found, b"x", 2**31)
            begun.wait(20)
            threading.Timer(1.0, go.set).start()
        assert until(lambda: grid.nodes() == {}, 1.0)
        assert list(grid.pull([message_id])) == [Reply(message_id, b"", "its node disconnected")]
        assert list(grid.pull([grid.push(found, b"x", 2**31)])) == [Reply("2", b"", "it disconnected")]


def test_an_answer_larger_than_what_is_due_is_not_read_whatever_the_limit_of_messages(keys: Path) -> None:
    """1 MB is due, and 30 MB come: the message fails by the size in the first frame, and the node is served again."""
    address, sizes = free_address(), iter((30_000_000, 1_000_000))
    with served(keys, address) as grid, working(Echo(lambda blob: bytes(next(sizes))), address, of_node(keys)):
        (found,) = until(grid.nodes)
        message_id = grid.push(found, b"x", 1_000_000)
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert reply.error.startswith(
            "its node's answer is dropped: a message of 30,000,000 bytes exceeds the 1,000,000"
        )
        (found,) = until(grid.nodes)
        message_id = grid.push(found, b"x", 1_000_000)
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert (len(reply.blob), reply.error) == (1_000_000, "")


def test_a_message_that_is_given_up_leaves_nothing_on_either_end(keys: Path) -> None:
    """One is at work, one waits, and one has been answered; the node goes, and what it then owes is given up, too."""
    address, go = free_address(), threading.Event()
    worked: list[bytes] = []

    def work(blob: bytes) -> bytes:
        worked.append(blob)
        if blob == b"slow":
            go.wait(20)
        return blob

    with served(keys, address) as grid, working(Echo(work), address, of_node(keys)) as line:
        (found,) = until(grid.nodes)
        ids = [grid.push(found, blob, 2**31) for blob in (b"done", b"slow", b"waiting")]
        until(lambda: grid._replies and len(worked) == 2)
        grid.drop(ids)
        assert (grid._replies, [peer.pending for peer in grid._peers.values()]) == ({}, [{}])
        go.set()
        assert answer_of(grid, found, b"next").blob == b"next"
        until(lambda: not line._answers)
        assert (grid._replies, line._held) == ({}, 0)
        gone = grid.push(found + 1, b"x", 2**31)
        grid.drop([gone])
        assert grid._replies == {}


def test_a_killed_node_is_missed_within_three_seconds() -> None:
    address = free_address()
    code = (
        "import sys, threading; from tests.federation.serving_support import *\n"
        "with working(Echo(), sys.argv[1], Security()): threading.Event().wait()"
    )
    with served(None, address) as grid:
        node = subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT)
        (found,) = until(grid.nodes, 60)
        node.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        node.wait()
        message_id = grid.push(found, b"x", 2**31)
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert "disconnected" in reply.error
        assert time.monotonic() < begun + 3


def test_a_node_waits_for_its_server_and_finds_one_that_was_started_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_BLIP_S", 0.0)
    address, node = free_address(), Echo()
    with working(node, address, of_node(keys)):
        until(lambda: node.said)
        for _ in range(2):
            with served(keys, address) as grid:
                (found,) = until(grid.nodes)
                assert answer_of(grid, found, b"x").blob == b"x"
            until(lambda: "lost" in node.said[-1])
    waiting = f"waiting for the server at {address}: the connection was refused; start the server, or correct --server"
    assert node.said[0] == f"{waiting}; trying again"
    assert node.said[1] == f"connected to the server at {address}; waiting for work"
    assert node.said[2].startswith(f"lost the server at {address}, last heard of at ")
    assert any(line.startswith(f"the server at {address} answers again, after 0 min and ") for line in node.said)


def test_an_outage_is_said_once_then_counted_at_growing_intervals_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A try every 5 s for 24 h: a line 3 s after the loss, at the next try, a minute later, and at doubled intervals.

    So at 5, 65, 130, 260, …, 16,640 s; from then on every four hours.
    """
    now, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = calling._Waiting("server:1", said.append)
    waiting.over()
    for second in range(0, 24 * 3600, 5):
        now[0] = float(second)
        waiting.note("it is away")
    doubled = [5, *(65 * 2**n for n in range(9)), 16_640 + 14_400, 16_640 + 28_800, 16_640 + 43_200, 16_640 + 57_600]
    assert len(said) == len(doubled)
    assert said[0].endswith(": it is away; trying again")
    counts = [int(re.findall(r" and (\d+) attempts: ", line)[0]) for line in said[1:]]
    assert counts == [second // 5 + 1 for second in doubled[1:]]
    waiting.over()
    assert said[-1] == f"the server at server:1 answers again, after {(24 * 3600 - 5) / 60:.0f} min and 17280 attempts"
    waiting.over()
    assert len(said) == len(doubled) + 1


def test_a_run_that_is_done_is_said_once_however_often_the_server_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "_BLIP_S", 0.0)
    said: list[str] = []
    waiting = calling._Waiting("server:1", said.append)
    for _ in range(3):
        waiting.over()
        waiting.note("it is away", done=True)
        waiting.note("it is away", done=True)
    assert said == ["the run is done, and the server at server:1 ended"]


def test_a_node_with_a_key_that_the_server_has_not_is_told_what_to_do(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_LET_IN_S", 0.0)
    address = free_address()
    with served(keys, address) as grid, Line(address, of_node(keys, "stranger"), print, 2**20) as line:
        told = line.inbox.get(timeout=20)
        assert isinstance(told, ConfigError)
        assert "rejects this node: the server does not know its key; send node.crt to" in str(told)
        assert grid.nodes() == {}


def test_a_key_is_one_nodes_at_a_time(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_LET_IN_S", 0.0)
    address = free_address()
    with served(keys, address) as grid:
        with working(Echo(), address, of_node(keys)):
            (first,) = until(grid.nodes)
            with Line(address, of_node(keys), print, 2**20) as line:
                assert "another node with this key is connected; stop it, or give" in str(line.inbox.get(timeout=20))
            assert list(grid.nodes()) == [first]
            assert answer_of(grid, first, b"x").blob == b"x"
        with working(Echo(), address, of_node(keys)):
            (second,) = until(grid.nodes)
            assert second != first


def test_a_proxy_is_used_if_an_option_says_so_and_never_because_of_the_environment(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS is between the node and the server; the proxy sees the server's address and ciphertext."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    address, security = free_address(), of_node(keys)
    proxy = Link(address, proxy=True)
    with served(keys, address) as grid:
        for chosen, asked in ((None, 0), (f"http://me:pass%20word@{proxy.address}", 1)):
            security.greet(address, chosen)
            with working(Echo(), address, security, proxy=chosen):
                (found,) = until(grid.nodes)
                assert answer_of(grid, found, b"x").blob == b"x"
            assert len(proxy.asked) == 2 * asked
            until(lambda: not grid.nodes())
    for head in proxy.asked:
        assert head.startswith(f"CONNECT {address} HTTP/1.".encode())
        assert b"Basic bWU6cGFzcyB3b3Jk" in head  # me:pass word


def test_a_node_does_not_print_the_password_of_a_proxy_that_fails(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_BLIP_S", 0.0)
    node = Echo()
    for proxy in (free_address(), "proxy.invalid:3128"):
        with Line(free_address(), of_node(keys), node.say, 2**20, f"http://me:s3cret@{proxy}"):
            until(lambda: node.said)
        assert "by way of --proxy" in node.said[0]
        assert "s3cret" not in "".join(node.said)
        node.said.clear()


def test_a_short_cut_of_the_link_delays_and_loses_nothing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that was at work before the cut is worked on once."""
    worked: list[bytes] = []
    go = threading.Event()

    def work(blob: bytes) -> bytes:
        worked.append(blob)
        go.wait(20)
        return blob

    address, node = free_address(), Echo(work)
    link = Link(address)
    with served(keys, address) as grid, working(node, link.address, of_node(keys)):
        (found,) = until(grid.nodes)
        blobs = [b"x", os.urandom(7_000_000)]
        ids = [grid.push(found, blobs[0], 2**31)]
        until(lambda: worked)
        link.cut = True
        ids.append(grid.push(found, blobs[1], 2**31))
        go.set()
        time.sleep(3)
        assert list(grid.pull(ids)) == []
        link.cut = False
        got: list[Reply] = []
        until(lambda: got.extend(grid.pull(ids)) or len(got) == 2)
        assert [reply.blob for reply in got] == worked == blobs
        assert list(grid.nodes()) == [found]


def test_a_long_cut_of_the_link_is_noticed_and_the_node_comes_back(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "KEEPALIVE_S", (1.0, 1.0))
    monkeypatch.setattr(serving, "GRACE_S", 0.5)
    address = free_address()
    link = Link(address)
    with served(keys, address) as grid, working(Echo(), link.address, of_node(keys)):
        (found,) = until(grid.nodes)
        link.cut = True
        message_id = grid.push(found, b"x", 2**31)
        assert list(grid.pull([message_id])) == []
        (reply,) = until(lambda: list(grid.pull([message_id])), 10)
        assert reply.error == "its node disconnected"
        link.cut = False
        (again,) = until(grid.nodes)
        assert again != found
        assert answer_of(grid, again, b"y").blob == b"y"


def test_a_stream_that_breaks_is_opened_again_and_every_message_is_worked_on_once(keys: Path) -> None:
    """The connection is closed at its middle, where the node works and the server has another message for it."""
    worked: list[bytes] = []
    begun = threading.Event()

    def work(blob: bytes) -> bytes:
        worked.append(blob)
        begun.set()
        time.sleep(0.5)
        return blob

    address = free_address()
    with served(keys, address) as grid, working(Echo(work), address, of_node(keys)):
        (found,) = until(grid.nodes)
        ids = [grid.push(found, bytes([place]), 2**31) for place in range(4)]
        begun.wait(20)
        (peer,) = grid._peers.values()
        for _ in range(3):
            end = until(lambda: peer.end)
            with grid._lock:
                grid._end(peer, "for this test")
                peer.left = time.monotonic()
            until(lambda end=end: peer.end not in (None, end))
        got: list[Reply] = []
        until(lambda: got.extend(grid.pull(ids)) or len(got) == 4)
        assert [reply.blob for reply in got] == worked == [bytes([place]) for place in range(4)]
        assert list(grid.nodes()) == [found]


def test_a_message_that_is_over_the_limit_is_refused_by_name(keys: Path) -> None:
    address, node = free_address(), Echo(lambda blob: blob * 3)
    with served(keys, address, limit=10_000_000) as grid, working(node, address, of_node(keys)):
        (found,) = until(grid.nodes)
        assert answer_of(grid, found, bytes(2_000_000)).blob == bytes(6_000_000)
        reply = answer_of(grid, found, os.urandom(6_000_000))
        words = "a message of 18,000,000 bytes exceeds the 10,000,000 that are due, or --most_bytes"
        assert reply.error == f"its node's answer is dropped: {words}"
        assert answer_of(grid, found, b"x").blob == b"xxx"  # the node goes on


def test_what_waits_for_a_node_and_what_a_server_does_not_acknowledge_is_bounded(keys: Path) -> None:
    """Ten messages of 1 MB for a node with a limit of 2.5 MB; the server is held back by HTTP/2's flow control."""
    go = threading.Event()

    def work(blob: bytes) -> bytes:
        go.wait(20)
        return blob

    address, node = free_address(), Echo(work)
    node.limit = 2_500_000  # type: ignore[misc]  # of this node alone
    with served(keys, address) as grid, working(node, address, of_node(keys)) as line:
        (found,) = until(grid.nodes)
        ids = [grid.push(found, bytes([place]) * 1_000_000, 2**31) for place in range(10)]
        until(lambda: line._held > node.limit)
        time.sleep(0.5)
        assert line._held < 2 * node.limit
        go.set()
        got: list[Reply] = []
        until(lambda: got.extend(grid.pull(ids)) or len(got) == 10)
        with line._room:
            line._answers = {place: bytes(1_000_000) for place in range(10)}
            line._forget()
            assert list(line._answers) == [8, 9]


def test_a_grid_whose_door_is_closed_says_so() -> None:
    with served(None, free_address()) as grid:
        assert grid.nodes() == {}
    with pytest.raises(ProcessLost, match=r"the thread that serves the nodes ended; resume with ckpt_path='last"):
        grid.nodes()
