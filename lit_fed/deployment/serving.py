"""The server's side of the connection: a grid over Flower's Fleet API, served by this process.

No other part of Flower runs. All state is in memory, one port is open, and the server only ever answers requests.
"""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from socket import socket
from typing import TYPE_CHECKING, TypeVar

from lit_fed.deployment import fleet
from lit_fed.deployment.ends import check_public, ending_by_signal, listen
from lit_fed.deployment.grid import Reply
from lit_fed.deployment.security import Security
from lit_fed.deployment.sessions import Sessions
from lit_fed.deployment.wire import join, split
from lit_fed.errors import ConfigError, ProcessLost, WireError

if TYPE_CHECKING:
    from lit_fed.deployment.gate import Gate

T = TypeVar("T")

_PARCEL_BYTES = 2**26  # messages to a node are batched up to this size, because a message takes about ten requests
_HANDSHAKE_S = 10.0
_ANSWER_S = 60.0  # time-out of a call into the serving thread, which never blocks
_OPEN_FILES = 2**16  # each connection takes one; idle strangers are closed after some seconds


class FleetGrid:
    """A grid of the nodes that are connected to this process; ``limit`` is the maximum size of a message, bytes."""

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.sessions, self.loop, self.limit = sessions, loop, limit
        self.num_bytes = 0
        self._count = 0
        self._kept: dict[int, list[tuple[str, bytes]]] = {}
        self._sent: dict[str, list[str]] = {}

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes with their public keys; an empty key without authentication."""
        return self._call(self.sessions.nodes)

    def push(self, node: int, blob: bytes) -> str:
        """Queue a message for the next `pull`, and return its id."""
        self._count += 1
        self._kept.setdefault(node, []).append((str(self._count), blob))
        return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Send the queued messages, batched by node, and yield the replies that have arrived."""
        wanted = set(message_ids)
        kept, self._kept = self._kept, {}
        for node, messages in kept.items():
            for parcel in _parcels(messages):
                yield from (reply for reply in self._send(node, parcel) if reply.message_id in wanted)
        asked = [parcel for parcel, inside in self._sent.items() if not wanted.isdisjoint(inside)]
        for sent, message_id, objects, error in self._call(lambda: self.sessions.collect(asked)) if asked else ():
            blob, inside = b"", self._sent.pop(sent)
            if not error:
                try:
                    blob = fleet.unpack(message_id, objects, self.sessions.most_held)
                except WireError as odd:
                    error = str(odd)
            self.num_bytes += len(blob)
            yield from (reply for reply in _opened(inside, blob, error) if reply.message_id in wanted)

    def _send(self, node: int, messages: Sequence[tuple[str, bytes]]) -> Iterator[Reply]:
        inside, blob = [message_id for message_id, _ in messages], join([blob for _, blob in messages])
        self.num_bytes += len(blob)
        said = fleet.about(self.sessions.run_id, fleet.SERVER_ID, node, self.sessions.ttl)
        parcel = fleet.pack(blob, said)
        if self._call(lambda: self.sessions.send(parcel, node)):
            self._sent[parcel.message_id] = inside
        else:
            yield from _opened(inside, b"", "it disconnected")

    def _call(self, what: Callable[[], T]) -> T:
        """Call a function in the serving thread, the only one that accesses the sessions."""

        async def do() -> T:
            return what()

        lost = ProcessLost("the thread that serves the nodes ended; resume with --ckpt_path last")
        if self.loop.is_closed():
            raise lost
        try:
            return asyncio.run_coroutine_threadsafe(do(), self.loop).result(_ANSWER_S)
        except (TimeoutError, CancelledError) as error:
            raise lost from error


def _parcels(kept: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Batch messages up to `_PARCEL_BYTES`."""
    parcel: list[tuple[str, bytes]] = []
    for message_id, blob in kept:
        if parcel and sum(len(one) for _, one in parcel) + len(blob) > _PARCEL_BYTES:
            yield parcel
            parcel = []
        parcel.append((message_id, blob))
    yield parcel


def _opened(inside: Sequence[str], blob: bytes, error: str) -> Iterator[Reply]:
    """Unpack the replies to the messages of a batch."""
    answers: Sequence[bytes] = [b""] * len(inside)
    if not error:
        try:
            answers = split(blob, len(inside))
            if len(answers) != len(inside):
                error = f"it sent {len(answers)} answers to {len(inside)} messages"
        except WireError as odd:
            error = str(odd)
    for place, message_id in enumerate(inside):
        yield Reply(message_id, b"" if error else answers[place], error)


@contextmanager
def fleet_grid(
    address: str,
    security: Security,
    limit: int,
    ttl: float,
    bind: str | None = None,
    keys: Collection[str] | None = None,
) -> Iterator[FleetGrid]:
    """Serve Flower's Fleet API.

    Args:
        address: The address by which nodes reach the server, and for which the certificate is valid.
        security: The server's certificate and key.
        limit: Maximum size of a message, bytes.
        ttl: Seconds after which an unanswered message is dropped.
        bind: The address to listen at; by default ``address``.
        keys: All nodes' public keys, in hexadecimal digits; None accepts any key, on loopback only.

    Raises:
        ConfigError: If it cannot listen at the address, or the address is beyond loopback without TLS and keys.
    """
    from lit_fed.deployment.gate import Gate  # needs h11, which flwr installs

    check_public(address)
    for one in dict.fromkeys((address, bind or address)):
        security.check(one, ("ca", "certificate", "key"))
    if security.is_on and not keys:
        raise ConfigError("--node_keys is missing; give TLS and keys together, or neither on loopback")
    if keys is not None and not security.is_on:
        raise ConfigError("--ca is missing; give TLS and keys together, or neither on loopback")
    fleet.proto()
    security.try_out(address)
    _raise_open_files()
    sessions = Sessions(limit, ttl, named=security.is_on)
    gate = Gate(sessions, None if keys is None else {bytes.fromhex(key) for key in keys})
    with ExitStack() as stack:
        stack.enter_context(ending_by_signal())
        door = stack.enter_context(listen(bind or address, "--superlink" if bind is None else "--bind"))
        loop = stack.enter_context(_serving(gate, sessions, door, security))
        yield FleetGrid(sessions, loop, limit)


@contextmanager
def _serving(gate: Gate, sessions: Sessions, door: socket, security: Security) -> Iterator[asyncio.AbstractEventLoop]:
    """Run the HTTP server in a thread."""
    loop, begun, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        on = security.is_on
        server = await asyncio.start_server(
            gate.converse, sock=door, backlog=1024, ssl=security.server_context() if on else None,
            ssl_handshake_timeout=_HANDSHAKE_S if on else None, ssl_shutdown_timeout=2.0 if on else None,
        )  # fmt: skip
        begun.set()
        while not end.is_set():  # drop silent nodes even while the run does not poll
            sessions.sweep()
            try:
                await asyncio.wait_for(end.wait(), 1.0)
            except TimeoutError:
                continue
        server.close()
        gate.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=2.0)  # coroutines of closed connections end by themselves

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(serve())
            finally:
                begun.set()

    thread = threading.Thread(target=run, daemon=True, name="fleet")
    thread.start()
    begun.wait()
    try:
        yield loop
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(end.set)
            thread.join(10.0)


def _raise_open_files() -> None:
    """Raise the limit of open files, so that idle connections do not lock nodes out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
