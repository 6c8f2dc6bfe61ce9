"""Operators ask the queue of a server from other machines, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.keys import node_keys
from lit_fed.federation.keys.node_keys import NodeKeys, is_operator
from lit_fed.federation.messages.operating import QueueRequest, pack, unpack
from lit_fed.federation.server.queue import answer, runs
from lit_fed.federation.transport import calling, frames, operating
from lit_fed.federation.transport.calling import Line
from lit_fed.federation.transport.operating import ask
from lit_fed.federation.transport.security import Security
from lit_fed.federation.transport.serving import RpcGrid, rpc_grid
from tests.federation.hostile.support import resident
from tests.federation.serving_support import Echo, answer_of, files, free_address, of_node, until, working

import grpc  # isort: skip

CONFIG = b"trainer: {max_rounds: 3}"


class Queue:
    """A server with a queue, and what it says."""

    def __init__(self, keys: Path, folder: Path, revoked: Path | None = None) -> None:
        self.keys, self.folder, self.address = keys, folder / "queue", free_address()
        self.said: list[str] = []
        self.bound = NodeKeys(keys / "operator_keys.yaml", revoked, self.said.append)

    @contextmanager
    def open(self, operate: Callable[[str, bytes], bytes] | None = None) -> Iterator[RpcGrid]:
        operate = operate or partial(answer, self.folder)
        with rpc_grid(self.address, files(self.keys, "server"), 2**31, None, self.bound, operate) as grid:
            yield grid

    def ask(self, verb: Any, name: str = "", config: bytes = b"", by: tuple[str, ...] = ("operator",)) -> list[str]:
        lines: list[str] = unpack(
            ask(self.address, files(self.keys, *by), pack(QueueRequest(verb, name, config))), list
        )
        return lines


@pytest.fixture
def queue(keys: Path, tmp_path: Path) -> Queue:
    return Queue(keys, tmp_path, tmp_path / "revoked.txt" if (tmp_path / "revoked.txt").touch() is None else None)


def test_an_operator_submits_lists_and_stops_beside_nodes_at_work(queue: Queue) -> None:
    with queue.open() as grid, working(Echo(), queue.address, of_node(queue.keys)):
        (node,) = until(grid.nodes)
        (line,) = queue.ask("submit", "study", CONFIG)
        assert line.startswith("0001-study is queued, with configuration ")
        assert [row.split("  ")[0::2] for row in queue.ask("runs")] == [["0001-study", "operator"]]
        assert queue.ask("stop", "0001-study") == []
        assert answer_of(grid, node, b"x").blob == b"x"
    (run,) = runs(queue.folder)
    assert (run.submitter, (run.folder / "stop").read_text(), run.hash) == ("operator", "operator", line[-64:])
    assert (run.folder / "config.yaml").read_bytes() == CONFIG


def test_no_other_key_and_no_other_certificate_of_an_operators_key_submits_or_stops(queue: Queue) -> None:
    """A node, a stranger with a certificate of the authority, and an operator's key in a node's certificate."""
    with queue.open():
        queue.ask("submit", "study", CONFIG)
        for by in (("node_0",), ("stranger",), ("plain", "operator")):
            for request in (("submit", "mine", CONFIG), ("stop", "0001-study"), ("runs",)):
                with pytest.raises(
                    ConfigError, match="refuses: its key is not an operator's; get one from lit-fed provi"
                ):
                    queue.ask(*request, by=by)
    assert [(run.folder.name, run.is_stopped) for run in runs(queue.folder)] == [("0001-study", False)]
    assert queue.said == ["the node with the key of client 0 is refused as an operator"] * 3


def test_an_operator_takes_no_part_in_a_run(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_LET_IN_S", 0.0)
    with queue.open() as grid, Line(queue.address, files(queue.keys, "operator"), print, 2**20) as line:
        told = line.inbox.get(timeout=20)
        assert "its key is an operator's, which takes no part in runs; start the node with a node's key" in str(told)
        assert grid.nodes() == {}
        assert len(queue.ask("submit", "study", CONFIG)) == 1


def test_the_role_is_in_the_certificate_and_the_servers_file_has_to_agree(keys: Path, tmp_path: Path) -> None:
    roles = {name: is_operator((keys / f"{name}.crt").read_bytes()) for name in ("operator", "plain", "node_0", "ca")}
    assert roles == {"operator": True, "plain": False, "node_0": False, "ca": False}
    disagreeing = {
        ("operator.crt: [0]",): "operator.crt is an operator's certificate, and has '\\[0\\]'; correct one of them",
        (
            "node_0.crt: operator",
        ): "node_0.crt is a certificate of no operator, and has 'operator'; correct one of them",
        ("plain.crt: operator",): "plain.crt is a certificate of no operator, and has 'operator'",
        ("operator.crt: operator", "plain.crt: [0]"): "has the same key as",
    }
    for lines, words in disagreeing.items():
        path = tmp_path / "node_keys.yaml"
        path.write_text("".join(f"{keys}/{line}\n" for line in lines))
        with pytest.raises(ConfigError, match=words):
            NodeKeys(path)


def test_a_revoked_operator_is_refused_at_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.0)
    with queue.open():
        queue.ask("submit", "study", CONFIG)
        (key,) = queue.bound.operators
        assert queue.bound.revoked is not None
        queue.bound.revoked.write_text(f"{key}  # anna\n")
        with pytest.raises(
            ConfigError, match="refuses: its key is revoked; get another one from the server's operator"
        ):
            queue.ask("submit", "study", CONFIG)
    assert len(runs(queue.folder)) == 1
    assert queue.said == [f"read {queue.bound.path} again: 2 keys are accepted, and 1 revoked"]


def test_what_the_queue_refuses_is_said_in_its_words(queue: Queue) -> None:
    with queue.open():
        with pytest.raises(ConfigError, match=r"refuses: '\.\./\.\./study' cannot name a run; rename the file"):
            queue.ask("submit", "../../study", CONFIG)
        with pytest.raises(ConfigError, match="refuses: the configuration has 'ca'; an operator's has only trainer"):
            queue.ask("submit", "study", b"ca: null")
        queue.ask("submit", "study", CONFIG)
        queue.ask("stop", "0001-study")
        with pytest.raises(ConfigError, match="refuses: run 0001-study is being stopped; stop a run that is queued or"):
            queue.ask("stop", "0001-study")
    assert not (queue.folder.parent / "study").exists()


def test_a_hundred_megabytes_and_malformed_requests_are_refused_and_take_no_memory(queue: Queue) -> None:
    with queue.open(), files(queue.keys, "operator").dial(queue.address) as channel:
        call = channel.unary_unary(f"/{frames.SERVICE}/{frames.OPERATE}")
        call(pack(QueueRequest("runs")), timeout=20)
        large, before = bytes(100_000_000), resident()
        with pytest.raises(grpc.RpcError) as refused:
            call(large, timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert resident() < before + 2 * len(large) + 20_000_000  # which this process sends in two copies
        deep = b"\x91" * 900_000  # an array in an array …
        odd = pack({"verb": "submit", "name": "x" * 201}), pack({"verb": "fit"}), pack({"verb": "runs", "more": 1})
        for blob in (b"", b"\xc1", deep, *odd, pack(QueueRequest("submit", "study", bytes(1_000_001)))):
            with pytest.raises(grpc.RpcError) as refused:
                call(blob, timeout=20)
            assert "an operator's message is malformed; run the same lit_fed" in (refused.value.details() or "")
        assert unpack(call(pack(QueueRequest("runs")), timeout=20), list) == []
    assert not queue.folder.exists()


def test_a_server_that_has_no_queue_or_is_away_is_one_line(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    security = files(queue.keys, "operator")
    with (
        rpc_grid(queue.address, files(queue.keys, "server"), 2**31, None, queue.bound),
        pytest.raises(ConfigError, match="refuses: the server has no queue, or no keys of operators; start it with"),
    ):
        queue.ask("runs")
    address = free_address()
    with rpc_grid(address, Security(), 2**31, None, None, partial(answer, queue.folder)):  # any local user could submit
        with Security().dial(address) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{frames.SERVICE}/{frames.OPERATE}")(pack(QueueRequest("runs")), timeout=20)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    monkeypatch.setattr(operating, "_PATIENCE_S", 1.0)
    with pytest.raises(ConfigError, match=f"the server at {queue.address} did not answer within"):
        ask(queue.address, security, pack(QueueRequest("runs")))


def test_an_operator_waits_while_a_server_is_between_two_runs(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    monkeypatch.setattr(operating, "_AT_ONCE_S", 0.1)
    done: list[list[str]] = []
    asking = threading.Thread(target=lambda: done.append(queue.ask("submit", "study", CONFIG)))
    asking.start()
    until(lambda: "which may be between two runs" in capsys.readouterr().err)
    with queue.open():
        asking.join(60)
    assert [line.split()[0] for line in done[0]] == ["0001-study"]


def test_a_message_that_is_none_is_a_wire_error() -> None:
    for blob in (b"", b"\xc1", pack([1, 2])):
        with pytest.raises(WireError, match="an operator's message is malformed"):
            unpack(blob, list[str])
