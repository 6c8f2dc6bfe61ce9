"""Messages as frames, and frames that are none."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from lit_fed.errors import WireError
from lit_fed.federation.transport.frames import CHUNK, HEAD, Joiner, divide
from tests.support import ROOT


def joined(parts: list[bytes], most: int | None = 2**30) -> list[tuple[int, bytes]]:
    joiner = Joiner(lambda _: most)
    return [found for part in parts if (found := joiner.take(part)) is not None]


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_a_message_is_what_it_was(size: int) -> None:
    blob = random.Random(size).randbytes(size)
    parts = list(divide(7, blob))
    assert len(parts) == max(-(-size // CHUNK), 1)
    assert all(len(part) <= CHUNK + HEAD.size for part in parts)
    assert joined([*parts, *divide(8, b"next")]) == [(7, blob), (8, b"next")]


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [bytes(HEAD.size - 1)],
        [HEAD.pack(1, 3)],  # no content where there must be some: a stream of these would never end
        [HEAD.pack(1, 3) + b"ab"],
        [HEAD.pack(1, 3) + b"abcd"],
        [HEAD.pack(1, 0) + b"a"],
        [HEAD.pack(1, CHUNK + 1) + b"a"],  # small pieces cost more memory than they hold
        [HEAD.pack(1, CHUNK + 1) + bytes(CHUNK), HEAD.pack(2, CHUNK + 1) + b"a"],
        [HEAD.pack(1, CHUNK + 1) + bytes(CHUNK), HEAD.pack(1, CHUNK + 2) + b"a"],
    ],
)
def test_a_frame_that_is_none_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError, match="a frame of a message is malformed"):
        joined(parts)


def test_a_length_is_looked_at_before_the_content() -> None:
    with pytest.raises(WireError, match=r"a message of 2,147,483,648 bytes exceeds the 1,000 that are due"):
        joined([HEAD.pack(1, 2**31) + bytes(CHUNK)], 1000)


def test_a_message_that_nobody_asked_for_takes_no_memory() -> None:
    joiner = Joiner(lambda message_id: 2**40 if message_id == 2 else None)
    for part in divide(1, bytes(3 * CHUNK)):
        assert joiner.take(part) is None
        assert joiner._content == b""
    assert joiner.take(next(divide(2, b"x"))) == (2, b"x")


def test_ten_thousand_mutated_frames_are_a_message_or_one_error() -> None:
    """Of messages of one and of two frames: bytes are changed, cut off, repeated or added, frames left out or mixed."""
    draw = random.Random(1)
    whole = [list(divide(1, b"hello")), list(divide(2, bytes(CHUNK + 9)))]
    refused = 0
    for _ in range(10_000):
        parts = list(draw.choice(whole)) + (list(whole[0]) if draw.random() < 0.3 else [])
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(parts))
            part = parts[place]
            match draw.randrange(5):
                case 0:
                    at = draw.randrange(min(len(part), 24) or 1)
                    parts[place] = part[:at] + draw.randbytes(1) + part[at + 1 :]
                case 1:
                    parts[place] = part[: draw.randrange(len(part) + 1)]
                case 2:
                    parts[place] = part + draw.randbytes(draw.randint(1, 9))
                case 3:
                    parts.insert(draw.randrange(len(parts) + 1), part)
                case _ if len(parts) > 1:
                    del parts[place]
        try:
            for _, blob in joined(parts, 2 * CHUNK):
                assert len(blob) <= 2 * CHUNK
        except WireError:
            refused += 1
    assert refused > 5_000


def test_a_forked_child_does_not_collect_a_server_whose_thread_it_lacks() -> None:
    program = """
import asyncio, gc, os, signal
import lit_fed.federation.transport.frames
import grpc

gc.disable()

async def serve():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)
    cycle = [server]
    cycle.append(cycle)

asyncio.run(serve())
if (child := os.fork()) == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr  # 14, the alarm, where the child waits
