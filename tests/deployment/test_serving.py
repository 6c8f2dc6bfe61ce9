"""Messages to nodes and back, over the sockets of this machine, and what becomes of them when something fails."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_fed.deployment import sessions
from lit_fed.deployment.grid import Reply
from lit_fed.deployment.security import Security
from lit_fed.deployment.serving import _opened, _parcels, fleet_grid
from lit_fed.deployment.wire import join
from lit_fed.errors import ConfigError, ProcessLost
from tests.deployment.serving_support import Echo, answer_of, free_address, of_node, served, until, working


def test_messages_to_a_node_travel_together_but_not_too_many() -> None:
    large = bytes(2**25 + 1)
    kept = [("1", b"a"), ("2", large), ("3", large), ("4", b"b")]
    assert [[name for name, _ in parcel] for parcel in _parcels(kept)] == [["1", "2"], ["3", "4"]]


@pytest.mark.parametrize(
    ("blob", "error", "answers"),
    [
        (join([b"x", b"y"]), "", [(b"x", ""), (b"y", "")]),
        (b"", "the node was lost", [(b"", "the node was lost")] * 2),
        (join([b"x"]), "", [(b"", "it sent 1 answers to 2 messages")] * 2),
        (b"???", "", [(b"", "3 bytes are not messages; run the same lit_fed on both ends")] * 2),
    ],
)
def test_every_message_of_a_parcel_is_answered(blob: bytes, error: str, answers: list[tuple[bytes, str]]) -> None:
    found = list(_opened(["1", "2"], blob, error))
    assert [reply.message_id for reply in found] == ["1", "2"]
    assert [(reply.blob, reply.error) for reply in found] == answers


@pytest.mark.parametrize(
    ("security", "bind", "keys", "expected"),
    [
        (Security(), "0.0.0.0:1", None, "--ca is missing, and 0.0.0.0:1 is not on this machine"),
        (Security(), None, {"00"}, "--ca is missing; give TLS and keys together"),
        (Security(__file__, __file__, __file__), None, None, "--node_keys is missing; give TLS and keys together"),
    ],
)
def test_a_server_is_protected_or_on_loopback(security: Security, bind: Any, keys: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected), fleet_grid("127.0.0.1:1", security, 1, 1, bind, keys):
        pytest.fail("it listens")


# ---------------------------------------------------------------------- over sockets

pytest.importorskip("flwr")


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_sent_comes_back_whole(keys: Path, secure: bool) -> None:
    address, node = free_address(), Echo(lambda blob: blob[::-1])
    with (
        served(keys if secure else None, address) as grid,
        working(node, address, of_node(keys) if secure else Security()) as line,
    ):
        (found,) = until(grid.nodes)
        for size in (0, 1000, 6_000_000):
            blob = os.urandom(size)
            assert answer_of(grid, found, blob) == Reply(str(grid._count), blob[::-1])
        together = [grid.push(found, bytes([place])) for place in range(5)]
        got: list[Reply] = []
        until(lambda: got.extend(grid.pull(together)) or len(got) == 5)
        assert [reply.blob for reply in got] == [bytes([place]) for place in range(5)]
        assert grid.nodes() == {found: line.signer.public.hex() if secure else ""}
        (session,) = grid.sessions.by_node.values()
        assert (session.held, session.out, session.uploads, grid.sessions._done, grid._sent) == (0, {}, {}, {}, {})
    assert node.said == [f"connected to the server at {address}; waiting for work"]


def test_a_node_that_takes_its_leave_is_missed_at_once_and_its_message_has_failed(keys: Path) -> None:
    address, begun, go = free_address(), threading.Event(), threading.Event()

    def dawdle(blob: bytes) -> bytes:
        begun.set()
        go.wait(20)
        return blob

    with served(keys, address) as grid:
        with working(Echo(dawdle), address, of_node(keys)):
            (found,) = until(grid.nodes)
            message_id = grid.push(found, b"x")
            list(grid.pull([message_id]))
            begun.wait(20)
            threading.Timer(1.0, go.set).start()
        assert grid.nodes() == {}
        assert list(grid.pull([message_id])) == [Reply(message_id, b"", "its node disconnected")]
        assert list(grid.pull([grid.push(found, b"x")])) == [Reply("2", b"", "it disconnected")]


def test_a_node_waits_for_its_server_and_finds_one_that_was_started_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_fed.deployment.calling._BLIP_S", 0.0)
    address, node = free_address(), Echo()
    with working(node, address, of_node(keys)):
        until(lambda: node.said)
        for _ in range(2):
            with served(keys, address) as grid:
                (found,) = until(grid.nodes)
                assert answer_of(grid, found, b"x").blob == b"x"
            until(lambda: "lost" in node.said[-1])
    waiting = (
        f"waiting for the server at {address}: the connection was refused; start the server, or correct --superlink"
    )
    assert node.said[0] == f"{waiting}; trying again"
    assert node.said[1] == f"connected to the server at {address}; waiting for work"
    assert node.said[2].startswith(f"lost the server at {address}, last heard of at ")
    assert f"the server at {address} answers again" in node.said


def test_a_node_with_a_key_that_the_server_has_not_is_told_what_to_do(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_fed.deployment.calling import Line

    monkeypatch.setattr("lit_fed.deployment.calling._LET_IN_S", 0.0)
    address = free_address()
    with served(keys, address) as grid:
        line = Line(address, of_node(keys, "stranger"), print)
        with pytest.raises(ConfigError, match=r"rejects this node: the server does not know its key; send"):
            line.connect()
        assert grid.nodes() == {}


def test_a_key_is_one_nodes_at_a_time(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_fed.deployment.calling import Line

    monkeypatch.setattr("lit_fed.deployment.calling._LET_IN_S", 0.0)
    address = free_address()
    with served(keys, address) as grid:
        with working(Echo(), address, of_node(keys)):
            (first,) = until(grid.nodes)
            with pytest.raises(ConfigError, match="another node with the same key is connected; stop it, or give"):
                Line(address, of_node(keys), print).connect()
            assert list(grid.nodes()) == [first]
        with working(Echo(), address, of_node(keys)):
            (second,) = until(grid.nodes)
            assert second != first


def test_a_clock_that_is_wrong_is_told(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime, timedelta
    from email.utils import formatdate

    from lit_fed.deployment.calling import Line

    monkeypatch.setattr("lit_fed.deployment.calling._LET_IN_S", 0.0)
    monkeypatch.setattr("lit_fed.deployment.gate.formatdate", lambda **kwargs: formatdate(time.time() - 100, **kwargs))
    address = free_address()
    with served(keys, address):
        line = Line(address, of_node(keys), print)
        line.signer._last = datetime.now(UTC) + timedelta(seconds=100)
        with pytest.raises(
            ConfigError, match=r"its clock is \d+ s ahead of the server's, and at most 60 s are accepted"
        ):
            line.connect()


def test_a_proxy_of_the_environment_is_not_asked(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys)):
        (found,) = until(grid.nodes)
        assert answer_of(grid, found, b"x").blob == b"x"


class Link:
    """A link to the server that can be cut: what was connected stays so, and nothing comes through any more."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self.to, self.cut = (host, int(port)), False
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with suppress(OSError):
                near, _ = self.door.accept()
                threading.Thread(
                    target=self._carry, args=(near, socket.create_connection(self.to)), daemon=True
                ).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with near, far, suppress(OSError):
            while True:
                for one in select.select([near, far], [], [], 0.1)[0]:
                    while self.cut:
                        time.sleep(0.05)
                    if not (data := one.recv(2**16)):
                        return
                    other[one].sendall(data)


def test_a_short_cut_of_the_link_delays_and_loses_nothing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fed.deployment.calling._BLIP_S", 0.5)
    monkeypatch.setattr("lit_fed.deployment.calling._TIMES_S", dict.fromkeys(("connect", "read", "write", "pool"), 1.0))
    monkeypatch.setattr(sessions, "POLL_S", 0.3)
    address, node = free_address(), Echo()
    link = Link(address)
    with served(keys, address) as grid, working(node, link.address, of_node(keys)):
        (found,) = until(grid.nodes)
        link.cut = True
        blob = os.urandom(7_000_000)
        message_id = grid.push(found, blob)
        assert list(grid.pull([message_id])) == []
        until(lambda: "does not answer; check the network" in node.said[-1])
        link.cut = False
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert reply.blob == blob
        assert list(grid.nodes()) == [found]
        assert "answers again" in node.said[-1]


def test_a_long_cut_of_the_link_is_noticed_and_the_node_comes_back(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fed.deployment.calling._TIMES_S", dict.fromkeys(("connect", "read", "write", "pool"), 1.0))
    monkeypatch.setattr(sessions, "POLL_S", 0.3)
    monkeypatch.setattr(sessions, "SILENT_S", 2.0)
    monkeypatch.setattr(sessions, "GONE_S", 2.0)
    address = free_address()
    link = Link(address)
    with served(keys, address) as grid, working(Echo(), link.address, of_node(keys)):
        (found,) = until(grid.nodes)
        link.cut = True
        message_id = grid.push(found, b"x")
        assert list(grid.pull([message_id])) == []
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert reply.error == "its node disconnected"
        link.cut = False
        (again,) = until(grid.nodes)
        assert again != found
        assert answer_of(grid, again, b"y").blob == b"y"


def test_an_answer_that_stops_growing_is_given_up_and_the_grid_waits_for_nobody(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "STALLED_S", 1.0)
    stop = threading.Event()
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys)) as line:
        real = line.ask

        def ask(word: str, *rest: Any) -> Any:
            if word == "push-object":
                stop.wait(20)
            return real(word, *rest)

        monkeypatch.setattr(line, "ask", ask)
        (found,) = until(grid.nodes)
        message_id = grid.push(found, b"x")
        list(grid.pull([message_id]))
        until(lambda: grid.sessions.by_node[found].uploads)
        begun = time.monotonic()
        assert list(grid.pull([message_id])) == []
        assert time.monotonic() < begun + 0.5
        (reply,) = until(lambda: list(grid.pull([message_id])))
        assert reply.error == "the upload of its answer stalled for 1 s"
        stop.set()


def test_a_message_that_is_over_the_limit_is_refused_by_name(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEAST_HELD_BYTES", 10_000_000)
    address, node = free_address(), Echo(lambda blob: blob * 3)
    with served(keys, address, limit=1) as grid, working(node, address, of_node(keys)):
        (found,) = until(grid.nodes)
        assert answer_of(grid, found, bytes(2_000_000)).blob == bytes(6_000_000)
        reply = answer_of(grid, found, os.urandom(6_000_000))
        assert reply.error == "its node's answers exceed the limit of 10,000,000 bytes; raise --most_bytes"
        until(lambda: len(node.said) > 1)
        assert node.said[1] == f"the server rejects this node's answer: {reply.error}"
        assert grid.sessions.by_node[found].held == 0


def test_messages_that_nobody_asks_for_any_more_are_dropped(keys: Path) -> None:
    address = free_address()
    with served(keys, address, ttl=0.5) as grid, working(Echo(), address, of_node(keys)):
        (found,) = until(grid.nodes)
        list(grid.pull([grid.push(found, b"x")]))
        until(lambda: grid.sessions._done)
        until(lambda: not grid.sessions._done)
        assert grid.sessions.by_node[found].held == 0


def test_a_grid_whose_door_is_closed_says_so() -> None:
    with served(None, free_address()) as grid:
        assert grid.nodes() == {}
    with pytest.raises(ProcessLost, match="the thread that serves the nodes ended; resume with --ckpt_path last"):
        grid.nodes()
