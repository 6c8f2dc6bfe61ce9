"""What an operator reads of a federation at work, and what nobody reads there."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.server.status import Status, prometheus, status_page
from lit_fed.federation.transport.serving import RpcGrid
from tests.federation.serving_support import Echo, answer_of, free_address, of_node, served, until, working
from tests.support import ROOT, start_cli

RUN: Any = SimpleNamespace(next_round=3, max_rounds=5, withholds=False, failures=SimpleNamespace(count=2))
PRIVATE: Any = SimpleNamespace(**{**vars(RUN), "withholds": True})


@contextmanager
def page_of(grid: RpcGrid) -> Iterator[tuple[Status, str]]:
    port = int(free_address().rpartition(":")[2])
    with status_page(port, grid) as status:
        yield status, f"127.0.0.1:{port}"


def read(address: str, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def raw(address: str, request: str) -> str:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(request.encode())
        return b"".join(iter(lambda: line.recv(2**16), b"")).decode()


def test_the_page_shows_rounds_nodes_bytes_answers_and_failures(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys)), page_of(grid) as (status, at):
        (node,) = until(grid.nodes)
        assert json.loads(read(at)) == {"round": 0, "rounds": None, "nodes": 1}
        status.on_fit_start(RUN)
        assert json.loads(read(at))["last_answers"] == {}
        answer_of(grid, node, b"<script>")
        found = json.loads(read(at))
        last = found.pop("last_answers")
        # 8 bytes there and 8 back
        assert found == {"round": 3, "rounds": 5, "nodes": 1, "bytes": 16, "failures": 2}
        assert list(last) == ["client 0"]
        lines = [line for line in read(at, "/metrics").splitlines() if not line.startswith("#")]
        assert lines == [
            "lit_fed_round 3", "lit_fed_rounds 5", "lit_fed_nodes 1", "lit_fed_bytes 16", "lit_fed_failures 2",
            f'lit_fed_last_answers{{node="client 0"}} {last["client 0"]}',
        ]  # fmt: skip


def test_a_private_run_shows_nobody_who_takes_part_and_no_count_of_them(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys)), page_of(grid) as (status, at):
        (node,) = until(grid.nodes)
        answer_of(grid, node, b"x")
        status.on_fit_start(PRIVATE)
        assert json.loads(read(at)) == {"round": 3, "rounds": 5, "nodes": 1}
        assert "client" not in read(at, "/metrics")


def test_the_status_page_is_on_loopback_for_reading_and_repeats_nothing(keys: Path) -> None:
    """Nothing that a reader sends comes back, no key is shown, and another site's page in a browser is refused."""
    with served(keys, free_address()) as grid, page_of(grid) as (status, at):
        status.on_fit_start(RUN)
        assert at.startswith("127.0.0.1:")
        for path in ("/<script>", "/../server.key", "/metrics/"):
            answer = raw(at, f"GET {path} HTTP/1.0\r\nHost: {at}\r\n\r\n")
            assert answer.startswith("HTTP/1.0 404")
            assert path not in answer
        for method in ("POST", "PUT", "DELETE", "<x>"):
            answer = raw(at, f"{method} / HTTP/1.0\r\nHost: {at}\r\n\r\n")
            assert answer.startswith("HTTP/1.0 501")
            assert "<x>" not in answer.partition("\r\n")[2]
        assert raw(at, "GET / HTTP/1.0\r\nHost: evil.example.org\r\n\r\n").startswith("HTTP/1.0 403")
        shown = read(at) + read(at, "/metrics")
        assert grid.keys is not None
        assert not any(key in shown for key in grid.keys)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(at.partition(":")[2])), timeout=1)


def test_who_says_nothing_to_the_status_page_delays_others_and_no_more() -> None:
    with served(None, free_address()) as grid, page_of(grid) as (_, at):
        host, port = at.split(":")
        before = threading.active_count()
        lines = [socket.create_connection((host, int(port))) for _ in range(2)]
        assert json.loads(read(at))["nodes"] == 0  # after twice two seconds
        assert threading.active_count() == before
        for line in lines:
            line.close()


def test_a_status_port_that_cannot_be_is_refused() -> None:
    with served(None, free_address()) as grid, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*; choose another port"):
            status_page(port, grid).__enter__()
        for odd in (0, 65536):
            with pytest.raises(ConfigError, match=f"--status_port is {odd}; it must be"):
                status_page(odd, grid).__enter__()


def test_a_number_that_is_not_known_yet_is_left_out_of_the_metrics() -> None:
    text = prometheus({"round": 0, "rounds": None, "nodes": 0})
    assert [line for line in text.splitlines() if line[0] != "#"] == ["lit_fed_round 0", "lit_fed_nodes 0"]


@pytest.mark.long
def test_the_server_command_serves_the_page_from_the_gathering_on(tmp_path: Path) -> None:
    server, at = free_address(), free_address()
    words = ("federate", "-c", ROOT / "configs/quickstart.yaml", "--server", server, "--status_port", at.split(":")[1])
    process = start_cli(*words, cwd=tmp_path)

    def nodes() -> str | None:
        try:
            return read(at)
        except urllib.error.URLError:
            return None

    try:
        assert json.loads(until(nodes, 60.0)) == {"round": 0, "rounds": None, "nodes": 0}
    finally:
        process.terminate()
        process.communicate(timeout=60)
