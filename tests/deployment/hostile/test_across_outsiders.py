"""Who has no key, with ``ca.crt`` or without, gets no further than the door, and keeps nobody else out of it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_fed.deployment import fleet
from lit_fed.deployment.keys import Signer
from tests.deployment.hostile.support import Keyed, asked, connected, listening, many, post, said_on
from tests.deployment.serving_support import Echo, answer_of, free_address, of_node, served, until, working

pytest.importorskip("flwr")

PATHS = [f"{fleet.PREFIX}{word}" for word in fleet.REQUESTS if word != "register-node"]
ELSEWHERE = [
    "/", "/health", "/docs", "/openapi.json", "/v1/control/start-run", "/v1/control/list-runs",
    "/v1/control/stream-logs", "/v1/control/pull-artifacts", "/v1/control/register-node", "/v1/control/stop-run",
    "/v1/runtime/acquire-task", "/v1/runtime/push-task-output", "/v1/runtime/get-nodes", "/v1/runtime/pull-messages",
    "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/get-run", "/v1/fleet/get-fab", "/v1/fleet/",
    "/v1/fleet", "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "//v1/control/start-run",
    "/v1/fleet/pull-messages/", "/v1/fleet/pull-messages?x=1", "/v1/fleet/pull-messages#x", "/V1/fleet/pull-messages",
    "/v1/fleet//pull-messages", "/v1/fleet/pull-messages%00", "/v1/fleet/pull-messages;x",
    "/v1/fleet/./pull-messages", "http://127.0.0.1/v1/fleet/pull-messages", "http://elsewhere/v1/control/start-run",
    "*", "/v1/fleet/ActivateNode",
]  # fmt: skip


def test_without_a_key_nothing_is_answered(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid:
        for path in PATHS:
            assert asked(keys, address, f"POST {path} HTTP/1.1", {"content-length": "0"}) == (401, b"")
            for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PRI"):
                assert asked(keys, address, f"{method} {path} HTTP/1.1", {})[0] == 404
        assert grid.nodes() == {}


@pytest.mark.parametrize("who", ["nobody", "a stranger", "a node"])
def test_there_is_nothing_but_the_fleet_api(keys: Path, who: str) -> None:
    address = free_address()
    with served(keys, address):
        signer = {"nobody": None, "a stranger": Signer(str(keys / "stranger")), "a node": Signer(str(keys / "node_0"))}[
            who
        ]
        for path in ELSEWHERE:
            headers = {"content-length": "0", **(signer.headers() if signer else {})}
            for method in ("POST", "GET"):
                assert asked(keys, address, f"{method} {path} HTTP/1.1", headers)[0] == 404, path


def test_one_port_is_open_and_nothing_else(keys: Path) -> None:
    address, before = free_address(), listening("self")
    with served(keys, address), working(Echo(), address, of_node(keys)):
        (one,) = listening("self") - before
        assert one.split()[1] == f"0100007F:{int(address.split(':')[1]):04X}"


def test_what_is_no_tls_is_not_answered(keys: Path) -> None:
    address = free_address()
    with served(keys, address), socket.create_connection(address.split(":"), timeout=20) as line:  # type: ignore[arg-type]
        assert said_on(line, f"POST {PATHS[0]} HTTP/1.1", {"content-length": "0"})[0] == 0


def test_an_own_key_opens_nothing(keys: Path) -> None:
    address, stranger = free_address(), Signer(str(keys / "stranger"))
    pb = fleet.proto()
    with served(keys, address) as grid:
        request = pb.ActivateNodeRequest(public_key=stranger.public, heartbeat_interval=10)
        assert post(keys, address, "activate-node", request, stranger) == (401, b"")
        honest = Signer(str(keys / "node_0"))
        forged = {**stranger.headers(), fleet.KEY: honest.headers()[fleet.KEY]}
        assert asked(keys, address, f"POST {PATHS[0]} HTTP/1.1", {"content-length": "0", **forged})[0] == 401
        assert grid.nodes() == {}


@pytest.mark.parametrize("age", [0.0, 61.0, 300.0, -61.0])
def test_a_signature_is_of_one_request(keys: Path, monkeypatch: pytest.MonkeyPatch, age: float) -> None:
    """Who has seen a node's request can make no other of it, at once or later."""
    from datetime import datetime, timedelta

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(seconds=age)

    address, node = free_address(), Signer(str(keys / "node_0"))
    with served(keys, address) as grid:
        monkeypatch.setattr("lit_fed.deployment.keys.datetime", Then)
        body = fleet.proto().ActivateNodeRequest(public_key=node.public, heartbeat_interval=10).SerializeToString()
        headers = {"content-length": str(len(body)), **node.headers()}
        head = f"POST {fleet.PREFIX}activate-node HTTP/1.1"
        found = [asked(keys, address, head, headers, body)[0] for _ in range(2)]
        assert found == ([401, 401] if age else [200, 401])
        assert len(grid.nodes()) == (not age)


@pytest.mark.parametrize(
    "odd",
    [
        {"flwr-public-key": "x"}, {"flwr-public-key": ""}, {"flwr-signature": "AAAA"}, {"flwr-signature": "é"},
        {"flwr-timestamp": "now"}, {"flwr-timestamp": "2026-01-01"}, {"flwr-timestamp": "9" * 5000},
        {"flwr-public-key": "QUJD" * 1000},
    ],
)  # fmt: skip
def test_headers_that_are_none_are_refused(keys: Path, odd: dict[str, str]) -> None:
    address = free_address()
    with served(keys, address):
        headers = {"content-length": "0", **Signer(str(keys / "node_0")).headers(), **odd}
        assert asked(keys, address, f"POST {PATHS[0]} HTTP/1.1", headers)[0] == 401


def test_a_body_is_not_read_before_its_size_and_key_are_looked_at(keys: Path) -> None:
    """What fits into the buffers of two sockets is sent, of 1.2 GiB, and nothing is kept of it."""
    address, node = free_address(), Signer(str(keys / "node_0"))
    head = f"POST {fleet.PREFIX}push-object HTTP/1.1"
    with served(keys, address):
        for headers, expected in (({}, 401), (node.headers(), 413)):
            with connected(keys, address) as line:
                line.settimeout(5)
                lines = [
                    head,
                    "Host: x",
                    "content-length: 1288490188",
                    *(f"{k}: {v}" for k, v in headers.items()),
                    "",
                    "",
                ]
                line.sendall("\r\n".join(lines).encode())
                assert f" {expected} " in line.recv(2**12).decode("latin-1").splitlines()[0]
                sent = 0
                with suppress(OSError):
                    while sent < 2**27:
                        line.sendall(bytes(2**16))
                        sent += 2**16
                assert sent < 2**24
        for headers, expected in (
            ({"content-length": "5246977"}, 413),
            ({}, 411),
            ({"transfer-encoding": "chunked"}, 411),
            ({"content-length": "-1"}, 0),  # h11's own reader hangs up
            ({"content-length": "9" * 50}, 0),
        ):
            assert asked(keys, address, head, {**headers, **node.headers()})[0] == expected
        assert (
            asked(keys, address, head.replace("object", "messages"), {"content-length": "262145", **node.headers()})[0]
            == 413
        )


def test_headers_without_end_are_not_read(keys: Path) -> None:
    address = free_address()
    with served(keys, address), connected(keys, address) as line:
        line.settimeout(5)
        line.sendall(f"POST {PATHS[0]} HTTP/1.1\r\n".encode())
        sent = 0
        with suppress(OSError):
            while sent < 2**26:
                line.sendall(b"x: " + b"y" * 1000 + b"\r\n")
                sent += 1005
        assert sent < 2**24


def test_two_headers_of_a_name_are_refused(keys: Path) -> None:
    address, node = free_address(), Signer(str(keys / "node_0"))
    with served(keys, address):
        headers = {"content-length": "0", **node.headers(), fleet.KEY.upper(): "x"}
        assert asked(keys, address, f"POST {PATHS[0]} HTTP/1.1", headers)[0] == 400


@pytest.mark.long
def test_who_says_nothing_keeps_nobody_out_and_is_hung_up_on(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """700 TCP, 200 TLS, 100 half requests and a drip; meanwhile a node comes and works."""
    monkeypatch.setattr("lit_fed.deployment.gate.FIRST_REQUEST_S", 10.0)
    monkeypatch.setattr("lit_fed.deployment.serving._HANDSHAKE_S", 10.0)
    address = free_address()
    host, port = address.split(":")
    with served(keys, address) as grid, many(1000) as lines:
        for _ in range(700):
            lines.append(socket.create_connection((host, int(port)), timeout=20))
        for place in range(300):
            lines.append(connected(keys, address))
            if place % 3 == 0:
                lines[-1].sendall(f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\n".encode())
        begun = time.monotonic()
        with working(Echo(), address, of_node(keys)):
            (found,) = until(grid.nodes)
            for _ in range(20):
                assert answer_of(grid, found, b"x" * 1000).blob == b"x" * 1000
            assert time.monotonic() < begun + 15  # of a loaded machine; alone it takes one
            drip = connected(keys, address)
            lines.append(drip)
            with suppress(OSError):
                while time.monotonic() < begun + 45:
                    drip.sendall(b"P")
                    time.sleep(0.2)
            assert 9 < time.monotonic() - begun < 40
            for one in lines:
                one.settimeout(5)
                with suppress(ConnectionError):
                    assert one.recv(1) == b""
            assert answer_of(grid, found, b"x").blob == b"x"


def test_many_who_say_nothing_take_each_others_place(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fed.deployment.gate.MOST_STRANGERS", 5)
    address = free_address()
    with served(keys, address) as grid, many(20) as lines, working(Echo(), address, of_node(keys)):
        (found,) = until(grid.nodes)
        for _ in range(20):
            lines.append(connected(keys, address))
        time.sleep(0.5)
        open_lines = 0
        for one in lines:
            one.settimeout(0.05)
            try:
                open_lines += one.recv(1) != b""
            except TimeoutError:
                open_lines += 1
            except OSError:
                continue
        assert open_lines == 5
        assert answer_of(grid, found, b"x").blob == b"x"
        assert Keyed(keys, address, "node_1").node in grid.nodes()
