"""Who has a certificate speaks for the node whose it is, and for no other; what it sends is bounded."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from lit_fed.federation.keys.node_keys import NodeKeys, key_of
from lit_fed.federation.transport import frames, serving
from lit_fed.federation.transport.frames import CHUNK, GOODBYE, HEAD
from lit_fed.federation.transport.grid import Reply
from tests.federation.hostile.support import (
    CONTINUATION,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Keyed,
    connected,
    header,
    http2,
    many,
    request,
    resident,
    sent_until_closed,
)
from tests.federation.serving_support import Echo, answer_of, free_address, of_node, served, until, working

import grpc  # isort: skip

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_a_node_speaks_for_no_other(keys: Path) -> None:
    """It gets no message of another, and its answers to them, whose ids are easy to guess, are ignored."""
    address = free_address()
    with served(keys, address) as grid:
        honest, liar = Keyed(keys, address, "node_0"), Keyed(keys, address, "node_1")
        liar.boot = honest.boot  # whose process it says that it is
        one, other = honest.attend(), liar.attend()
        assert one.is_open()
        assert other.is_open()
        numbers = {key: number for number, key in until(lambda: len(grid.nodes()) == 2 and grid.nodes()).items()}
        first, second = (numbers[key_of((keys / f"{name}.crt").read_bytes())] for name in ("node_0", "node_1"))
        secret, own = grid.push(first, b"secret", 2**31), grid.push(second, b"own", 2**31)
        assert next(other.call)[HEAD.size :] == b"own"
        for message_id in (int(secret), GOODBYE - 1 + 2**64, 77):
            other.send(message_id, b"a lie")
        other.send(int(own), b"y")
        (reply,) = until(lambda: list(grid.pull([own])))
        assert reply.blob == b"y"
        assert list(grid.pull([secret])) == []
        assert next(one.call)[HEAD.size :] == b"secret"
        one.send(int(secret), b"x")
        (reply,) = until(lambda: list(grid.pull([secret])))
        assert reply.blob == b"x"
        other.send(GOODBYE, b"")  # takes its own leave, and no other's
        assert until(lambda: list(grid.nodes()) == [first])


def test_an_answer_counts_once(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid:
        stream = Keyed(keys, address).attend()
        (found,) = until(grid.nodes)
        message_id = grid.push(found, b"x", 2**31)
        for blob in (b"first", b"second", b"third" * CHUNK):
            stream.send(int(message_id), blob)
        last = grid.push(found, b"y", 2**31)
        stream.send(int(last), b"z")
        until(lambda: list(grid.pull([last])) == [Reply(last, b"z")])
        assert list(grid.pull([message_id])) == [Reply(message_id, b"first")]
        assert list(grid.pull([message_id])) == []
        assert grid._replies == {}


@pytest.mark.parametrize(
    "odd",
    [
        [b""],
        [b"short"],
        [HEAD.pack(1, 9) + b"x"],
        [HEAD.pack(1, 3) + b"more than three"],
        [HEAD.pack(1, 2 * CHUNK) + bytes(CHUNK), HEAD.pack(2, 2 * CHUNK) + bytes(CHUNK)],
        [HEAD.pack(1, 2**60) + bytes(CHUNK)],
    ],
)
def test_frames_that_make_no_sense_end_the_stream_and_fail_the_message(keys: Path, odd: list[bytes]) -> None:
    address = free_address()
    with served(keys, address) as grid:
        liar = Keyed(keys, address)
        stream = liar.attend()
        (found,) = until(grid.nodes)
        message_id = grid.push(found, b"x", 2**31)
        for frame in odd:
            stream.out.put(frame)
        code, why = stream.end()
        assert code is INVALID
        assert "\n" not in why
        if len(odd[0]) >= HEAD.size:
            (reply,) = grid.pull([message_id])
            assert reply.error.startswith("its node's answer is dropped: ")
        assert liar.attend().is_open()  # it may go on
        assert list(grid.nodes()) == [found]


def test_a_frame_over_its_size_is_not_read(keys: Path) -> None:
    address = free_address()
    with served(keys, address):
        stream = Keyed(keys, address).attend()
        stream.out.put(HEAD.pack(1, CHUNK + 1) + bytes(CHUNK + 1))
        assert stream.end()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("does", ["streams", "answers"])
def test_what_a_node_may_cause_is_rated_and_said_once(keys: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Every stream repeats what is pending; a node that comes and goes would also be greeted and printed each time."""
    monkeypatch.setattr(serving, "_ALLOWED", (5.0, 0.01))
    address, said = free_address(), list[str]()
    bound = NodeKeys(keys / "node_keys.yaml", say=said.append)
    with served(keys, address, node_keys=bound) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        liar, open_, ends = Keyed(keys, address), 0, []
        for _ in range(20 if does == "streams" else 1):
            stream = liar.attend()
            open_ += stream.is_open()
            for place in range(20 if does == "answers" else 0):
                stream.send(1000 + place, b"nobody asked for it")
            stream.send(GOODBYE, b"")
            ends.append(stream.end())
        assert answer_of(grid, honest, b"x").blob == b"x"
    assert open_ == (5 if does == "streams" else 1)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED if does == "streams" else INVALID
    assert ends[-1][0] is code
    told = "it opens streams, or sends answers that nobody asked for, too often"
    assert ends[-1][1].startswith(told)
    assert said == [f"the node with the key of client 0 is held back: {told}"]


def test_a_thousand_halves_of_messages_leave_nothing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 MB each, of which 1 MB is sent."""
    monkeypatch.setattr(serving, "_ALLOWED", (1e9, 1e9))
    address = free_address()
    with served(keys, address) as grid:
        liar = Keyed(keys, address)
        kept = liar.attend()
        assert kept.is_open()
        (found,) = until(grid.nodes)
        message_id, before = grid.push(found, b"x", 2**31), resident()
        for _ in range(1_000):
            stream = liar.attend()
            stream.out.put(HEAD.pack(int(message_id), 10**8) + bytes(CHUNK))
            stream.is_open()
            stream.out.put(None)
            stream.call.cancel()
        assert resident() - before < 100 * 2**20
        assert list(grid.nodes()) == [found]
        stream = liar.attend()
        stream.send(int(message_id), b"y")
        assert until(lambda: list(grid.pull([message_id]))) == [Reply(message_id, b"y")]


@pytest.mark.parametrize(
    "metadata", [{"boot": ""}, {"boot": "../x"}, {"boot": "A" * 32}, {"boot": "0" * 33}, {"boot-bin": b"\0"}]
)
def test_a_process_without_an_id_is_refused(keys: Path, metadata: dict[str, str | bytes]) -> None:
    address = free_address()
    with served(keys, address) as grid:
        liar = Keyed(keys, address)
        if "boot-bin" in metadata:
            liar.boot = ""
        code, why = liar.attend(**metadata).end()
        assert (code, why) == (INVALID, "the node's id is malformed; run the same lit_fed")
        assert grid.nodes() == {}


def test_metadata_are_bounded(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        for metadata in ({"x": "y" * 10_000}, {f"x{place}": "y" * 100 for place in range(100)}):
            code, _ = Keyed(keys, address).attend(**metadata).end()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer_of(grid, honest, b"x").blob == b"x"


FLOODS = {
    # streams that are opened and reset at once: CVE-2023-44487
    "rapid reset": lambda place: (
        http2(HEADERS, 4, 2 * place + 1, request()) + http2(RST_STREAM, 0, 2 * place + 1, b"\0\0\0\x08")
    ),
    "streams": lambda place: http2(HEADERS, 4, 2 * place + 1, request()),
    "settings": lambda place: http2(SETTINGS, 0, 0, struct.pack(">HI", 3, 100)),
    "pings": lambda place: http2(PING, 0, 0, bytes(8)),
    # headers without an end: CVE-2024-27316
    "continuation": lambda place: (
        http2(CONTINUATION, 0, 1, header(f"x{place}", "y" * 1000)) if place else http2(HEADERS, 0, 1, request())
    ),
}  # fmt: skip


ENDED = ("pings",)  # floods for which the server closes the connection; what it keeps of the others does not grow


@pytest.mark.long
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_http_2_frames_is_bounded_and_others_are_served(keys: Path, flood: str) -> None:
    """Connections of one node send until they are closed, or 100 MB in all.

    Of headers without an end, gRPC keeps what a connection sends, up to about 34 MiB, until the connection ends, and
    has no setting for it. Memory that it freed then serves the next connections.
    """
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        before, frame = resident(), FLOODS[flood]
        for _ in range(2):
            with many() as lines:
                for _ in range(3 if flood in ENDED else 20):
                    line = connected(keys, address)
                    lines.append(line)
                    line.sendall(PREFACE + http2(SETTINGS, 0, 0))
                    sent = sent_until_closed(line, frame, 2**26 if flood in ENDED else 5 * 2**20)
                    begun = time.monotonic()
                    assert answer_of(grid, honest, b"x").blob == b"x"
                    assert time.monotonic() < begun + 3
                    if flood in ENDED:
                        assert sent < 2**23
                grown = (resident() - before) / 2**20
                assert grown < (150 if flood == "continuation" else 20), f"{flood}: {grown:.0f} MiB"
        assert honest in grid.nodes()


@pytest.mark.long
def test_one_connections_headers_without_an_end_take_a_bounded_memory(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        before, frame = resident(), http2(CONTINUATION, 0, 1, header("x", "y" * 16_000))
        with connected(keys, address) as line:
            line.sendall(PREFACE + http2(SETTINGS, 0, 0) + http2(HEADERS, 0, 1, request()))
            sent = sent_until_closed(line, lambda _: frame, 2**28)
            assert sent > 2**25, sent
            assert resident() - before < 48 * 2**20
            assert answer_of(grid, honest, b"x").blob == b"x"


def test_a_node_has_one_stream_and_few_connections_without_one(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "IDLE_S", 2.0)
    address = free_address()
    with served(keys, address) as grid, many() as lines:
        one, other = Keyed(keys, address), Keyed(keys, address)
        first = one.attend()
        assert first.is_open()
        assert other.attend().end()[0] is grpc.StatusCode.ALREADY_EXISTS
        second = one.attend()
        assert second.is_open()
        assert first.end() == (grpc.StatusCode.ABORTED, "the node opened another stream")
        assert len(grid.nodes()) == 1
        for _ in range(20):
            lines.append(connected(keys, address))
            lines[-1].sendall(PREFACE + http2(SETTINGS, 0, 0))
        assert all(sent_until_closed(line, lambda _: http2(SETTINGS, 1, 0), 2**10) >= 0 for line in lines)
        for line in lines:
            line.settimeout(10)
            while line.recv(2**12):
                pass
        assert len(grid.nodes()) == 1


def test_random_frames_end_in_a_line_and_harm_nobody(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 streams of one node say anything, with the right ids now and then."""
    monkeypatch.setattr(serving, "_ALLOWED", (1e9, 1e9))
    draw, address = random.Random(3), free_address()
    with served(keys, address) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        liar = Keyed(keys, address)
        for _ in range(200):
            stream = liar.attend()
            until(lambda: len(grid.nodes()) == 2)
            message_id = grid.push(next(one for one in grid.nodes() if one != honest), b"x", 2**31)
            for _ in range(draw.randint(1, 4)):
                head = HEAD.pack(int(message_id), draw.choice([0, 5, 2**20, 2**40]))
                stream.out.put(
                    draw.choice([head, b"", draw.randbytes(16)]) + draw.randbytes(draw.choice([0, 5, 2**10]))
                )
            stream.out.put(None)
            assert "\n" not in stream.end()[1]
        assert answer_of(grid, honest, b"x").blob == b"x"
