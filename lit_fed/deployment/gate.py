"""The server's door: HTTP/1.1 that answers who has a known key, before a byte of what it says is read.

A connection is one coroutine, `Gate._answer_all`, to be read from top to bottom: time, path, key, size, and only
then the body. Whoever has shown no key holds a connection for some seconds and some kilobytes.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from typing import Any, NamedTuple

import h11

from lit_fed.deployment import fleet
from lit_fed.deployment.keys import is_signed, loaded
from lit_fed.deployment.sessions import Refused, Sessions
from lit_fed.errors import WireError

FIRST_REQUEST_S = 10.0  # in which who connects must have shown a key
IDLE_S = 30.0  # between two requests of a node
BODY_S = 120.0  # for a body of at most 5 MiB: .4 Mbit/s
WRITE_S = 120.0
CLOCKS_APART_S = 60.0  # by which a node's clock may differ
MOST_HEAD_BYTES = 2**14
MOST_OBJECT_BYTES = fleet.CHUNK_BYTES + 2**12
MOST_STRANGERS = 512  # connections that have shown no key; beyond them, the oldest is closed
MOST_LINES = 16  # connections of one node
_BLOCK = 2**16


class _Head(NamedTuple):
    """What a request begins with.

    Args:
        word: What is asked, as in `fleet.REQUESTS`.
        key: Of who asks.
        length: Of the body.
    """

    word: str
    key: bytes
    length: int


class Gate:
    """Lets nodes in.

    Args:
        sessions: Does what they ask.
        keys: The public keys of all that there are; None lets in whoever signs with any, on this machine.
    """

    def __init__(self, sessions: Sessions, keys: Collection[bytes] | None) -> None:
        self.sessions = sessions
        self.keys: Mapping[bytes, Any] | None = None if keys is None else {key: loaded(key) for key in keys}
        self._open: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._lines: dict[bytes, int] = {}
        self._signed: set[int] = set()  # hashes of keys and times, of which many come within two minutes
        self._ends: deque[tuple[float, int]] = deque()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        self._open.add(writer)
        self._strangers[writer] = None
        if len(self._strangers) > MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        keys: list[bytes] = []
        try:
            with suppress(OSError, TimeoutError, h11.ProtocolError):
                await self._answer_all(h11.Connection(h11.SERVER, MOST_HEAD_BYTES), reader, writer, keys)
        finally:
            self._open.discard(writer)
            self._strangers.pop(writer, None)
            for key in keys:
                self._lines[key] -= 1
                if not self._lines[key]:
                    del self._lines[key]
                self.sessions.hang_up(key, writer)
            writer.close()

    async def _answer_all(
        self, line: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: list[bytes]
    ) -> None:
        """Answer requests until there is no reason to go on; the key that was shown is put into a list.

        Raises:
            OSError: If who asks has gone, or takes too long.
            ProtocolError: If it speaks no HTTP.
        """
        while True:
            async with asyncio.timeout(IDLE_S if keys else FIRST_REQUEST_S):
                event = await _next_event(line, reader)
            if not isinstance(event, h11.Request):
                return
            try:
                head = self._admit(event)
                if not keys:
                    keys.append(head.key)
                    self._lines[head.key] = self._lines.get(head.key, 0) + 1
                    self._strangers.pop(writer, None)
                if [head.key] != keys or self._lines[head.key] > MOST_LINES:
                    raise Refused(429, "a connection is one node's, and a node has few")
                self.sessions.session_of(head.key, writer)
                if line.they_are_waiting_for_100_continue:
                    writer.write(line.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                async with asyncio.timeout(BODY_S):
                    body = await _read_body(line, reader, head.length)
                status, content = 200, await self._do(head, body, line, reader, writer)
            except Refused as error:
                status, content = error.status, error.why.encode()
            await _write(line, writer, status, content)
            if not keys or line.our_state is not h11.DONE or line.their_state is not h11.DONE:
                return
            line.start_next_cycle()

    def close(self) -> None:
        """Hang up."""
        for writer in self._open:
            writer.transport.abort()

    # ------------------------------------------------------------------ before a body is read

    def _admit(self, request: h11.Request) -> _Head:
        """What is asked, by whom, and how much is to be read of it.

        Raises:
            Refused: If nothing is.
        """
        target = request.target.decode("ascii", "replace")
        word = fleet.REQUESTS.get(target.removeprefix(fleet.PREFIX)) if target.startswith(fleet.PREFIX) else None
        if request.method != b"POST" or word is None or (word == "RegisterNodeFleet" and self.keys is not None):
            raise Refused(404)
        headers = dict(request.headers)
        if len(headers) != len(request.headers.raw_items()):  # which of two of a name is meant, readers disagree on
            raise Refused(400)
        key = self._key(headers)
        length = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers or not length.isdigit() or len(length) > 12:
            raise Refused(411, "a body has a length")
        if int(length) > (MOST_OBJECT_BYTES if word == "PushObject" else fleet.MOST_ABOUT_BYTES):
            raise Refused(413, "the body is too large")
        return _Head(word, key, int(length))

    def _key(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The key that signed a request just now, and no other request.

        Raises:
            Refused: If none did.
        """
        try:
            key, signature = (
                base64.b64decode(headers[name.encode()], validate=True) for name in (fleet.KEY, fleet.SIGNATURE)
            )
            stamp = headers[fleet.TIMESTAMP.encode()]
            public = _loaded(key) if self.keys is None else self.keys[key]  # before anything is computed for it
            apart = (datetime.now(UTC) - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
            if (
                not abs(apart) < CLOCKS_APART_S
                or hash((key, stamp)) in self._signed
                or not is_signed(public, stamp, signature)
            ):
                raise Refused(401)
        except (KeyError, ValueError, TypeError) as error:
            raise Refused(401) from error
        now = time.monotonic()
        self._signed.add(hash((key, stamp)))
        self._ends.append((now + 2 * CLOCKS_APART_S, hash((key, stamp))))
        while self._ends[0][0] < now:
            self._signed.discard(self._ends.popleft()[1])
        return key

    # ------------------------------------------------------------------ what is asked

    async def _do(
        self, head: _Head, body: bytes, line: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """The answer to a request.

        Raises:
            Refused: If it is not followed.
            ConnectionError: If who asked has gone.
        """
        request = getattr(fleet.proto(), f"{head.word}Request")()
        try:
            request.ParseFromString(body)
        except Exception as error:  # protobuf has its own for each of its implementations
            raise Refused(400, "the body is none of Flower's messages") from error
        try:
            asked = self.sessions.answer(head.word, request, head.key, writer)
            found = await (_unless_hung_up(asked, line, reader) if head.word == "PullMessages" else asked)
        except WireError as error:
            raise Refused(400, str(error)) from error
        content: bytes = found.SerializeToString()
        return content


async def _unless_hung_up(asked: Coroutine[Any, Any, Any], line: h11.Connection, reader: asyncio.StreamReader) -> Any:
    """An answer that takes its time; none to who hangs up meanwhile, who may be the node that had the work to do.

    Raises:
        ConnectionError: If who asked has gone.
    """
    doing, more = asyncio.ensure_future(asked), asyncio.ensure_future(reader.read(_BLOCK))
    try:
        await asyncio.wait({doing, more}, return_when=asyncio.FIRST_COMPLETED)
        if more.done():
            if not more.result():
                raise ConnectionResetError("the node has hung up")
            line.receive_data(more.result())
        return await doing
    finally:
        for one in (doing, more):
            one.cancel()
        await asyncio.gather(doing, more, return_exceptions=True)  # a reader has one who waits at a time


@lru_cache(1024)
def _loaded(key: bytes) -> Any:
    return loaded(key)


async def _next_event(line: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := line.next_event()) is h11.NEED_DATA:
        line.receive_data(await reader.read(_BLOCK))
    return event


async def _read_body(line: h11.Connection, reader: asyncio.StreamReader, length: int) -> bytes:
    parts: list[bytes] = []
    while isinstance(event := await _next_event(line, reader), h11.Data):
        parts.append(bytes(event.data))
    if not isinstance(event, h11.EndOfMessage) or sum(map(len, parts)) != length:
        raise ConnectionResetError("a body has ended early")
    return b"".join(parts)


async def _write(line: h11.Connection, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
    """An answer; a connection whose body has not been read is closed after it."""
    headers = [("content-length", str(len(content))), ("date", formatdate(usegmt=True))]
    headers.append(("content-type", fleet.MEDIA_TYPE if status == 200 else "text/plain; charset=utf-8"))
    if line.their_state is not h11.DONE:
        headers.append(("connection", "close"))
    events = [h11.Response(status_code=status, headers=headers), h11.Data(data=content), h11.EndOfMessage()]
    writer.write(b"".join(line.send(event) or b"" for event in events))
    async with asyncio.timeout(WRITE_S):
        await writer.drain()
