"""The server's HTTP/1.1 front end: it authenticates a request by its key before it reads the body.

A connection is one coroutine, `Gate._answer_all`, which checks time, path, key and size in this order, and then reads
the body. A connection without a key is limited to a few seconds and a few kilobytes.
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

FIRST_REQUEST_S = 10.0  # time-out for showing a key
IDLE_S = 30.0  # time-out between two requests of a node
BODY_S = 120.0  # time-out of a body of at most 5 MiB: 0.4 Mbit/s
WRITE_S = 120.0
CLOCKS_APART_S = 60.0  # maximum difference of a node's clock
MOST_HEAD_BYTES = 2**14
MOST_OBJECT_BYTES = fleet.CHUNK_BYTES + 2**12
MOST_STRANGERS = 512  # maximum number of connections without a key; the oldest is closed first
MOST_LINES = 16  # maximum number of connections per node
_BLOCK = 2**16


class _Head(NamedTuple):
    """The head of a request: a value of `fleet.REQUESTS`, the sender's public key, and the body's length in bytes."""

    word: str
    key: bytes
    length: int


class Gate:
    """Authenticates nodes and passes their requests on.

    Args:
        keys: The public keys of all nodes; None accepts any key, on loopback only.
    """

    def __init__(self, sessions: Sessions, keys: Collection[bytes] | None) -> None:
        self.sessions = sessions
        self.keys: Mapping[bytes, Any] | None = None if keys is None else {key: loaded(key) for key in keys}
        self._open: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._lines: dict[bytes, int] = {}
        self._signed: set[int] = set()  # hashes of keys and time stamps, against replay
        self._ends: deque[tuple[float, int]] = deque()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection in order."""
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
        """Answer requests until the connection closes; append the node's key to ``keys``.

        Raises:
            OSError: If the client disconnects or times out.
            ProtocolError: If the client does not speak HTTP.
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
                    raise Refused(429, "too many connections of one node, or two nodes on one connection")
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
        """Close all connections."""
        for writer in self._open:
            writer.transport.abort()

    # ------------------------------------------------------------------ before a body is read

    def _admit(self, request: h11.Request) -> _Head:
        """Authenticate a request, and bound its body.

        Raises:
            Refused: For an unknown path or key, or an inadmissible body.
        """
        target = request.target.decode("ascii", "replace")
        word = fleet.REQUESTS.get(target.removeprefix(fleet.PREFIX)) if target.startswith(fleet.PREFIX) else None
        if request.method != b"POST" or word is None or (word == "RegisterNodeFleet" and self.keys is not None):
            raise Refused(404)
        headers = dict(request.headers)
        if len(headers) != len(request.headers.raw_items()):  # parsers disagree on which duplicate counts
            raise Refused(400)
        key = self._key(headers)
        length = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers or not length.isdigit() or len(length) > 12:
            raise Refused(411, "content-length is missing or malformed")
        if int(length) > (MOST_OBJECT_BYTES if word == "PushObject" else fleet.MOST_ABOUT_BYTES):
            raise Refused(413, "the body is too large")
        return _Head(word, key, int(length))

    def _key(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the key that signed a request, unless the signature is stale or replayed.

        Raises:
            Refused: If there is no such key.
        """
        try:
            key, signature = (
                base64.b64decode(headers[name.encode()], validate=True) for name in (fleet.KEY, fleet.SIGNATURE)
            )
            stamp = headers[fleet.TIMESTAMP.encode()]
            public = _loaded(key) if self.keys is None else self.keys[key]  # looked up before any expensive computation
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
        """Answer a request.

        Raises:
            Refused: If the request is rejected.
            ConnectionError: If the client disconnects.
        """
        request = getattr(fleet.proto(), f"{head.word}Request")()
        try:
            request.ParseFromString(body)
        except Exception as error:  # protobuf's exception depends on its implementation
            raise Refused(400, "the body is not a Flower message") from error
        try:
            asked = self.sessions.answer(head.word, request, head.key, writer)
            found = await (_unless_hung_up(asked, line, reader) if head.word == "PullMessages" else asked)
        except WireError as error:
            raise Refused(400, str(error)) from error
        content: bytes = found.SerializeToString()
        return content


async def _unless_hung_up(asked: Coroutine[Any, Any, Any], line: h11.Connection, reader: asyncio.StreamReader) -> Any:
    """Await an answer while watching the connection, so that a message is not handed to a disconnected node.

    Raises:
        ConnectionError: If the client disconnects.
    """
    doing, more = asyncio.ensure_future(asked), asyncio.ensure_future(reader.read(_BLOCK))
    try:
        await asyncio.wait({doing, more}, return_when=asyncio.FIRST_COMPLETED)
        if more.done():
            if not more.result():
                raise ConnectionResetError("the node disconnected")
            line.receive_data(more.result())
        return await doing
    finally:
        for one in (doing, more):
            one.cancel()
        await asyncio.gather(doing, more, return_exceptions=True)  # a reader allows one waiter at a time


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
        raise ConnectionResetError("a body ended early")
    return b"".join(parts)


async def _write(line: h11.Connection, writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
    """Write a response, and announce the close of a connection whose body was not read."""
    headers = [("content-length", str(len(content))), ("date", formatdate(usegmt=True))]
    headers.append(("content-type", fleet.MEDIA_TYPE if status == 200 else "text/plain; charset=utf-8"))
    if line.their_state is not h11.DONE:
        headers.append(("connection", "close"))
    events = [h11.Response(status_code=status, headers=headers), h11.Data(data=content), h11.EndOfMessage()]
    writer.write(b"".join(line.send(event) or b"" for event in events))
    async with asyncio.timeout(WRITE_S):
        await writer.drain()
