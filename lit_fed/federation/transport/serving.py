"""The server's side of the connection: a grid of the nodes whose streams are open.

Every node holds one gRPC stream open, on which messages and answers travel; the stream and HTTP/2's pings are the
node's presence. All state is in memory, one port is open, and the server only ever answers.
"""

from __future__ import annotations

import asyncio
import math
import re
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lit_fed.errors import ConfigError, LitFedError, ProcessLost, WireError
from lit_fed.federation.ends import Alert, check_free, check_public
from lit_fed.federation.keys.node_keys import NodeKeys, key_of
from lit_fed.federation.messages.body import Blob, Bytes
from lit_fed.federation.transport import frames  # before grpc, which it sets up
from lit_fed.federation.transport.grid import Reply
from lit_fed.federation.transport.security import Security

import grpc  # isort: skip


GRACE_S = 2.0  # time for a node whose stream broke to open another
MOST_NODES = 10_000
_OPEN_FILES = 2**16  # each connection takes one; strangers are closed after some seconds
_BOOT = re.compile(r"[0-9a-f]{32}")
_ALLOWED = (100.0, 1.0)  # streams and unasked answers of a key: at once, and per second from then on
_SAY_S = 60.0  # interval of messages about a key that exceeds it
_OFTEN = "it opens streams, or sends answers that nobody asked for, too often"
_TAKEN = "another node with this key is connected; stop it, or give this node its own key"
_NO_QUEUE = "the server has no queue, or no keys of operators; start it with --queue, --ca and --node_keys"
_NO_LIST = "the server has no valid list of revoked certificates of its authority; ask the server's operator for --crl"


class Refused(Exception):
    """An inadmissible stream, with gRPC's status and the reason."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


class Pending(NamedTuple):
    """A message without an answer, and the maximum size of its answer, bytes."""

    blob: Bytes | Blob
    most: int


class Peer:
    """A node, as long as its streams follow each other within `GRACE_S`.

    Args:
        key: Hash of the node's public key; empty without keys.
        boot: Random id of the node's process.
    """

    def __init__(self, key: str, boot: str) -> None:
        self.key, self.boot = key, boot
        self.number = secrets.randbits(62) + 2
        self.certificate = b""  # of the last stream, in PEM
        self.pending: dict[int, Pending] = {}
        self.outbox: deque[tuple[int, Bytes | Blob]] = deque()
        self.wake = asyncio.Event()
        self.end: asyncio.Future[str] | None = None  # ends the open stream, with the reason
        self.left = 0.0  # when the last stream ended
        self.answered = 0.0  # when the last answer came, seconds since 1970; 0 before the first


@dataclass
class Allowance:
    """The streams and unasked answers that are left to a key, as of some time; a token bucket."""

    left: float = _ALLOWED[0]
    updated: float = 0.0
    last_line: float = -math.inf

    def take(self) -> bool:
        """Return whether one more is allowed, and count it."""
        now = time.monotonic()
        self.left, self.updated = min(self.left + (now - self.updated) * _ALLOWED[1], _ALLOWED[0]), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class RpcGrid:
    """A grid of the nodes that are connected to this process.

    Args:
        limit: Maximum size of a message, bytes.
        keys: The nodes' and operators' keys; None without authentication, on loopback only.
        operate: Answers a request of the operator with a name; None where there is no queue.
    """

    def __init__(self, limit: int, keys: NodeKeys | None, operate: Callable[[str, bytes], bytes] | None = None) -> None:
        self.limit, self.keys, self.operate = limit, keys, operate
        self.num_bytes = 0
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # by key, or by process without keys
        self._replies: dict[str, Reply] = {}
        self._allowances: dict[str, Allowance] = {}  # by accepted key
        self._count = frames.GOODBYE

    # ------------------------------------------------------------------ the run's side, in the main thread

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes with the hashes of their keys, and end the streams of revoked keys."""
        self._check()
        with self._lock:
            self._sweep()
            return {peer.number: peer.key for peer in self._peers.values()}

    def certificate(self, node: int) -> bytes:
        """Return a connected node's certificate in PEM; empty without keys, or if it has left."""
        with self._lock:
            return next((peer.certificate for peer in self._peers.values() if peer.number == node), b"")

    def answered(self) -> list[tuple[int, str, float]]:
        """Return every connected node with the hash of its key, and the time of its last answer; 0 for none yet."""
        with self._lock:
            return [(peer.number, peer.key, peer.answered) for peer in self._peers.values()]

    def push(self, node: int, blob: Bytes | Blob, most: int) -> str:
        """Send a message, and return its id; an answer of more than ``most`` bytes is not read."""
        self._check()
        with self._lock:
            self._count += 1
            peer = next((candidate for candidate in self._peers.values() if candidate.number == node), None)
            if peer is None:
                self._fail(self._count, "it disconnected")
            else:
                self.num_bytes += len(blob)
                peer.pending[self._count] = Pending(blob, min(most, self.limit))
                self._send_soon(peer, self._count, blob)
            return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Return the replies that have arrived, each once, without waiting."""
        self._check()
        with self._lock:
            self._sweep()
            replies = [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]
        self.num_bytes += sum(len(reply.blob) for reply in replies)
        yield from replies

    def drop(self, message_ids: Collection[str]) -> None:
        """Give up messages, whose answers are not read any more; their nodes forget them, too."""
        with self._lock:
            for message_id in message_ids:
                self._replies.pop(message_id, None)
                for peer in self._peers.values():
                    if peer.pending.pop(int(message_id), None) is not None:
                        self._send_soon(peer, int(message_id), b"")

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            for peer in list(self._peers.values()):
                self._drop(peer, "the server stops")

    def _check(self) -> None:
        if self.loop.is_closed():
            raise ProcessLost("the thread that serves the nodes ended; resume with --ckpt_path last")

    # ------------------------------------------------------------------ with the lock

    def _sweep(self) -> None:
        """Drop nodes that did not come back, and nodes whose keys were revoked."""
        if self.keys is not None:
            self.keys.refresh()
        for peer in list(self._peers.values()):
            if self.keys is not None and (why := self.keys.objection(peer.key, peer.certificate)):
                self._drop(peer, why)
            elif peer.end is None and time.monotonic() > peer.left + GRACE_S:
                self._drop(peer, "its node disconnected")

    def _drop(self, peer: Peer, why: str) -> None:
        self._peers.pop(peer.key or peer.boot, None)
        for message_id in peer.pending:
            self._fail(message_id, why)
        peer.pending.clear()
        self._end(peer, why)

    def _allows(self, key: str) -> bool:
        """Count a stream or an unasked answer of a key; return False, and print it once a minute, if it is too many."""
        if self.keys is None:
            return True
        allowance, now = self._allowances.setdefault(key, Allowance()), time.monotonic()
        if allowance.take():
            return True
        if now > allowance.last_line + _SAY_S:
            allowance.last_line = now
            self.keys.say(Alert(f"{self.keys.whose(key)} is held back: {_OFTEN}"))
        return False

    def _end(self, peer: Peer, why: str) -> None:
        """End a node's open stream."""
        if (end := peer.end) is not None:
            peer.end = None
            self.loop.call_soon_threadsafe(_resolve, end, why)

    def _fail(self, message_id: int, why: str) -> None:
        self._replies[str(message_id)] = Reply(str(message_id), b"", why)

    def _send_soon(self, peer: Peer, message_id: int, blob: Bytes | Blob) -> None:
        peer.outbox.append((message_id, blob))
        self.loop.call_soon_threadsafe(peer.wake.set)

    # ------------------------------------------------------------------ the nodes' side, in the serving thread

    async def attend(self, _: Any, context: Any) -> None:
        """Serve one stream of a node: send messages, and take in answers."""
        with suppress(asyncio.CancelledError):  # the connection is gone, or the server stops
            await self._attend(context)

    async def _attend(self, context: Any) -> None:
        try:
            peer, end, outbox = self._admit(context)
        except Refused as error:
            await context.abort(error.code, error.why)
            raise
        await context.send_initial_metadata((("session", str(peer.number)),))
        sending = asyncio.ensure_future(self._send(peer, outbox, context))
        receiving = asyncio.ensure_future(self._receive(peer, context))
        try:
            await asyncio.wait((sending, receiving, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in (sending, receiving):
                job.add_done_callback(lambda task: task.cancelled() or task.exception())  # asyncio prints an unseen one
                job.cancel()
            with self._lock:
                if peer.end is end:
                    peer.end, peer.left = None, time.monotonic()
        if end.done():
            await context.abort(grpc.StatusCode.ABORTED, end.result())
        if receiving.done() and isinstance(odd := receiving.exception(), WireError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(odd))

    def _admit(self, context: Any) -> tuple[Peer, asyncio.Future[str], deque[tuple[int, Bytes | Blob]]]:
        """Authenticate a node; return it, the future that ends its stream, and the stream's outbox; raise `Refused`."""
        boot = dict(context.invocation_metadata() or ()).get("boot", "")
        if not isinstance(boot, str) or not _BOOT.fullmatch(boot):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the node's id is malformed; run the same lit_fed")
        with self._lock:
            key, certificate = self._identify(context)
            peer = self._peers.get(key or boot)
            if peer is not None and peer.boot != boot:
                if peer.end is not None:
                    raise Refused(grpc.StatusCode.ALREADY_EXISTS, _TAKEN)
                self._drop(peer, "its node restarted")
                peer = None
            if peer is None:
                if len(self._peers) >= MOST_NODES:
                    raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the server has {MOST_NODES:,} nodes")
                peer = self._peers[key or boot] = Peer(key, boot)
            self._end(peer, "the node opened another stream")
            peer.certificate = certificate
            peer.end = asyncio.get_running_loop().create_future()
            peer.outbox = deque((message_id, message.blob) for message_id, message in peer.pending.items())
            return peer, peer.end, peer.outbox

    def _identify(self, context: Any, operates: bool = False) -> tuple[str, bytes]:
        """Return the key and the certificate of a node, or of an operator; with the lock. Raise `Refused`."""
        certificate = b"" if self.keys is None else context.auth_context()["x509_pem_cert"][0]
        key = "" if self.keys is None else key_of(certificate)
        self._sweep()
        if self.keys is not None and (why := self.keys.objection(key, certificate, operates)):
            if operates and key in self.keys and self._allows(key):
                self.keys.say(Alert(f"{self.keys.whose(key)} is refused as an operator"))
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, why)
        if self.keys is not None and self.keys.lists is not None and not self.keys.lists.cover(certificate):
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, _NO_LIST)
        if not self._allows(key):
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_OFTEN}; wait")
        return key, certificate

    async def answer_operator(self, blob: bytes, context: Any) -> bytes:
        """Answer one request of an operator."""
        code, why = grpc.StatusCode.FAILED_PRECONDITION, _NO_QUEUE
        try:
            if self.keys is not None and self.operate is not None:
                with self._lock:
                    name = self.keys.operators[self._identify(context, operates=True)[0]]
                return await asyncio.to_thread(self.operate, name, blob)
        except Refused as error:
            code, why = error.code, error.why
        except (LitFedError, OSError) as error:
            code, why = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        return bytes(await context.abort(code, why))  # which raises

    async def _send(self, peer: Peer, outbox: deque[tuple[int, Bytes | Blob]], context: Any) -> None:
        while True:
            while outbox:
                message_id, blob = outbox.popleft()
                if not blob or message_id in peer.pending:
                    for frame in frames.divide(message_id, blob):
                        await context.write(frame)
                    del frame
                del blob  # no message stays in memory while the next one is awaited
            peer.wake.clear()
            if not outbox:
                await peer.wake.wait()

    async def _receive(self, peer: Peer, context: Any) -> None:
        """Take in answers until the stream ends.

        Raises:
            WireError: If the node violates the protocol; the message at hand has failed then.
        """

        def most(message_id: int) -> int | None:
            pending = peer.pending.get(message_id)
            return None if pending is None else pending.most

        joiner, discarded = frames.Joiner(most), 0
        while (frame := await context.read()) is not grpc.aio.EOF:
            try:
                message = joiner.take(frame)
            except WireError as error:
                with self._lock:
                    if peer.pending.pop(joiner.message_id, None) is not None:
                        self._fail(joiner.message_id, f"its node's answer is dropped: {error}")
                raise
            with self._lock:
                if frame == _GOODBYE:
                    peer.left = -GRACE_S
                    self._drop(peer, "its node disconnected")
                elif joiner.discarded > discarded and not self._allows(peer.key):
                    raise WireError(_OFTEN)
                elif message is not None and peer.pending.pop(message[0], None) is not None:
                    peer.answered = time.time()
                    self._replies[str(message[0])] = Reply(str(message[0]), message[1])
                    self._send_soon(peer, message[0], b"")
            discarded = joiner.discarded
            del frame, message


_GOODBYE = next(frames.divide(frames.GOODBYE, b""))


def _resolve(end: asyncio.Future[str], why: str) -> None:
    if not end.done():
        end.set_result(why)


@contextmanager
def rpc_grid(
    address: str,
    security: Security,
    limit: int,
    bind: str | None = None,
    keys: NodeKeys | None = None,
    operate: Callable[[str, bytes], bytes] | None = None,
) -> Iterator[RpcGrid]:
    """Serve nodes and operators.

    Args:
        address: The address by which nodes reach the server, and for which the certificate is valid.
        security: The server's certificate and key.
        limit: Maximum size of a message, bytes.
        bind: The address to listen at; by default ``address``.
        keys: The nodes' and operators' keys; None accepts any node, on loopback only.
        operate: Answers a request of the operator with a name; None where there is no queue.
    """
    check_public(address)
    for host in dict.fromkeys((address, bind or address)):
        security.check(host)
    if security.is_on != (keys is not None):
        absent = "--node_keys" if security.is_on else "--ca"
        raise ConfigError(f"{absent} is missing; give TLS and keys together, or neither on loopback")
    security.try_out(address)
    _raise_open_files()
    check_free(bind or address, "--server" if bind is None else "--bind")  # its errors are clearer than gRPC's
    grid = RpcGrid(limit, keys, operate)
    credentials = None if keys is None else security.of_server(address, keys.say)
    with _serving(grid, bind or address, credentials):
        yield grid


@contextmanager
def _serving(grid: RpcGrid, address: str, credentials: grpc.ServerCredentials | None) -> Iterator[None]:
    """Run the gRPC server in a thread."""
    begun, end = Future[None](), asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=frames.options(), maximum_concurrent_rpcs=2 * MOST_NODES)
        handler = grpc.stream_stream_rpc_method_handler(grid.attend)
        handlers = {frames.METHOD: handler, frames.OPERATE: grpc.unary_unary_rpc_method_handler(grid.answer_operator)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(frames.SERVICE, handlers),))
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
        await server.start()
        begun.set_result(None)
        await end.wait()
        grid.close()
        await server.stop(1.0)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: grid.loop) as runner:
            try:
                runner.run(serve())
            except RuntimeError as error:  # the port was taken in the meantime
                begun.set_exception(ConfigError(f"the server cannot listen at {address}; choose another port"))
                raise SystemExit from error

    thread = threading.Thread(target=run, daemon=True, name="grpc")
    thread.start()
    try:
        begun.result()
        yield
    finally:
        if not grid.loop.is_closed():
            grid.loop.call_soon_threadsafe(end.set)
        thread.join(10.0)


def _raise_open_files() -> None:
    """Raise the limit of open files, so that idle connections do not lock nodes out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
