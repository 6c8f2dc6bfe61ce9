"""The server's end of a federation: a grid over Flower's Fleet API, which this process itself serves.

Nothing else of Flower's is served or started. Everything is in memory, and one port is open. Nodes ask; nothing is
ever sent to who has not.
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

_PARCEL_BYTES = 2**26  # messages to a node travel together up to this size: each takes some ten requests
_HANDSHAKE_S = 10.0
_ANSWER_S = 60.0  # in which the thread that serves does what it is told: it never waits
_OPEN_FILES = 2**16  # a connection is one; those that say nothing are closed after some seconds


class FleetGrid:
    """The nodes that are connected to this process.

    Args:
        sessions: Knows them.
        loop: Of the thread that serves.
        limit: The size of the largest message that is taken.
    """

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.sessions, self.loop, self.limit = sessions, loop, limit
        self.num_bytes = 0
        self._count = 0
        self._kept: dict[int, list[tuple[str, bytes]]] = {}
        self._sent: dict[str, list[str]] = {}

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are there, each with its public key where keys are looked at."""
        return self._call(self.sessions.nodes)

    def push(self, node: int, blob: bytes) -> str:
        """Keep a message for the next `pull`; its id."""
        self._count += 1
        self._kept.setdefault(node, []).append((str(self._count), blob))
        return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Send what was kept, several messages to a node as one; the answers that have come."""
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
            yield from _opened(inside, b"", "it has left")

    def _call(self, what: Callable[[], T]) -> T:
        """Do something in the thread that serves, which alone looks at the sessions."""

        async def do() -> T:
            return what()

        lost = ProcessLost("what serves the nodes has ended; go on with --ckpt_path last")
        if self.loop.is_closed():
            raise lost
        try:
            return asyncio.run_coroutine_threadsafe(do(), self.loop).result(_ANSWER_S)
        except (TimeoutError, CancelledError) as error:
            raise lost from error


def _parcels(kept: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Messages together, as long as they are not too large together."""
    parcel: list[tuple[str, bytes]] = []
    for message_id, blob in kept:
        if parcel and sum(len(one) for _, one in parcel) + len(blob) > _PARCEL_BYTES:
            yield parcel
            parcel = []
        parcel.append((message_id, blob))
    yield parcel


def _opened(inside: Sequence[str], blob: bytes, error: str) -> Iterator[Reply]:
    """The answers to the messages of a parcel."""
    answers: Sequence[bytes] = [b""] * len(inside)
    if not error:
        try:
            answers = split(blob, len(inside))
            if len(answers) != len(inside):
                error = f"it gave {len(answers)} answers to {len(inside)} messages"
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
    """Serve Flower's Fleet API for a while.

    Args:
        address: By which nodes know the server; its certificate is for that.
        security: Its certificate and key.
        limit: The size of the largest message that is taken.
        ttl: Seconds after which a message without an answer is dropped.
        bind: Where it listens; at ``address`` by default.
        keys: All nodes' public keys, in hexadecimal digits; None takes any, where nobody else can connect.

    Raises:
        ConfigError: If it cannot listen there, or others could hear what nothing protects.
    """
    from lit_fed.deployment.gate import Gate  # whose h11 comes with flwr

    check_public(address)
    for one in dict.fromkeys((address, bind or address)):
        security.check(one, ("ca", "certificate", "key"))
    if security.is_on and not keys:
        raise ConfigError("--node_keys is missing: TLS and keys are used together, or on loopback not at all")
    if keys is not None and not security.is_on:
        raise ConfigError("--ca is missing: keys and TLS are used together, or on loopback not at all")
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
    """A thread that serves."""
    loop, begun, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        on = security.is_on
        server = await asyncio.start_server(
            gate.converse, sock=door, backlog=1024, ssl=security.server_context() if on else None,
            ssl_handshake_timeout=_HANDSHAKE_S if on else None, ssl_shutdown_timeout=2.0 if on else None,
        )  # fmt: skip
        begun.set()
        while not end.is_set():  # who is silent is missed, even while nobody looks
            sessions.sweep()
            try:
                await asyncio.wait_for(end.wait(), 1.0)
            except TimeoutError:
                continue
        server.close()
        gate.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=2.0)  # who is hung up on ends by itself

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
    """Take as many open files as the system gives: many who say nothing must not keep nodes out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
