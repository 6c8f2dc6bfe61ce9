"""The node's side of the connection: a thread keeps a stream to the server open. A node opens no port.

The main thread works meanwhile. A broken stream delays messages and loses nothing: the server sends unanswered messages
again, the node answers each from memory if it already has, and forgets an answer that the server acknowledges.
"""

from __future__ import annotations

import math
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from itertools import chain, starmap
from typing import Any
from typing import Protocol as Interface

from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.ends import Alert, next_line, split_address, without_userinfo
from lit_fed.federation.messages.body import Bytes
from lit_fed.federation.messages.wire import shown
from lit_fed.federation.transport import frames  # before grpc, which it sets up
from lit_fed.federation.transport.security import Security

import grpc  # isort: skip

_AGAIN_S = (0.05, 5.0)  # shortest and longest pause before a retry
_AFTER_S = 15.0  # the same, once the run is done
_BLIP_S = 3.0  # outage that is not reported
_LET_IN_S = 120.0  # time for an operator to register an unknown key
_MESSAGE_BYTES = 2**10  # overhead of a message in memory
_REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNIMPLEMENTED)


class Handler(Interface):
    """A node, as its connection sees it: it turns messages into answers, one at a time."""

    limit: int
    """Maximum size of a message, bytes."""
    say: Callable[[str], object]
    """Prints a line."""

    @property
    def done(self) -> bool:
        """Whether the server has said that the run is done."""

    def at_work(self) -> AbstractContextManager[Any]:
        """Prepare to handle messages."""

    def handle(self, blob: Bytes) -> Bytes:
        """Handle a message, and return the answer; every error becomes an answer, too."""

    def idle(self, connected: bool = True) -> None:
        """Do what is due while no message comes, from a connected server or not; called about once a second."""


class Line:
    """A node's connection to its server, within a ``with`` statement.

    Args:
        address: The server's address.
        security: The node's certificate and key.
        say: Prints a line.
        limit: Maximum size of a message, and of all messages that wait for the node, bytes.
        proxy: URL of an HTTP proxy; None connects directly.
    """

    def __init__(
        self, address: str, security: Security, say: Callable[[str], object], limit: int, proxy: str | None = None
    ) -> None:
        self.address, self.security, self.say, self.limit, self.proxy = address, security, say, limit, proxy
        self.boot = secrets.token_hex(16)
        self.inbox: queue.Queue[tuple[str, int, Bytes] | Exception] = queue.Queue()
        """Messages with their session, and the error that ends the node."""
        self._session = ""
        self._answers: dict[int, Bytes | None] = {}  # by message; None until the node has answered
        self._held = 0  # bytes of messages in the inbox and at work
        self._out: queue.SimpleQueue[tuple[int, Bytes] | None] = queue.SimpleQueue()
        self._room = threading.Condition()  # guards the five fields above
        self._closed = threading.Event()
        self.done = False
        """Whether the run is done; a lost server is then expected."""
        self.num_bytes = 0
        self.on_work: Callable[[float], object] = lambda seconds: None
        """Called with the time that a message took."""
        self._waiting = _Waiting(address, say)
        self._met = False
        self._refused: float | None = None
        dial = partial(security.dial, address, proxy)
        self._renewed, self._channel = security.renewed(dial, say), dial()
        self._thread = threading.Thread(target=self._stay, daemon=True, name="grpc")

    def __enter__(self) -> Line:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take leave if the server is reachable, and close the connection."""
        with self._room:
            self._closed.set()
            self._room.notify_all()
            self._out.put((frames.GOODBYE, b""))
            self._out.put(None)
        self._thread.join(2.0)
        self._channel.close()

    def answer(self, session: str, message_id: int, blob: Bytes, size: int) -> None:
        """Send the answer to a message of ``size`` bytes, unless the server has given the message up."""
        self.num_bytes += size + len(blob)
        with self._room:
            self._held -= size + _MESSAGE_BYTES
            self._room.notify_all()
            if session == self._session and message_id in self._answers:
                self._answers[message_id] = blob
                self._out.put((message_id, blob))
                self._forget()

    def is_settled(self) -> bool:
        """Whether the server has acknowledged every answer, or is gone."""
        return not self._answers or self.away() > _BLIP_S

    def away(self) -> float:
        """Return for how many seconds there has been no stream."""
        begun = self._waiting.begun
        return 0.0 if begun is None else time.monotonic() - begun

    def _forget(self) -> None:
        """Bound the memory of answers that a server does not acknowledge, the oldest first."""
        kept = [
            (message_id, len(blob) + _MESSAGE_BYTES) for message_id, blob in self._answers.items() if blob is not None
        ]
        total = sum(size for _, size in kept)
        for answered, size in kept[:-1]:
            if total <= self.limit:
                return
            del self._answers[answered]
            total -= size

    # ------------------------------------------------------------------ in the thread

    def _stay(self) -> None:
        """Keep a stream open, until the line is closed or an error ends it."""
        pause = _AGAIN_S[0]
        while not self._closed.is_set():
            with self._room:
                if self._closed.is_set():
                    return
                out = self._out = queue.SimpleQueue()
            try:
                if (channel := self._renewed()) is not None:
                    self._channel.close()
                    self._channel = channel
                attend = self._channel.stream_stream(f"/{frames.SERVICE}/{frames.METHOD}")
                outgoing = chain.from_iterable(starmap(frames.divide, iter(out.get, None)))
                call = attend(outgoing, metadata=(("boot", self.boot),))
                if self._listen(call):
                    pause = _AGAIN_S[0]
            except (ConfigError, ValueError) as error:  # ValueError: the channel was closed meanwhile
                self.inbox.put(error)
                return
            finally:
                out.put(None)
            self._closed.wait(pause * random.uniform(0.5, 1.0))
            pause = _AFTER_S if self.done else min(2 * pause, _AGAIN_S[1])

    def _listen(self, call: Any) -> bool:
        """Take in messages until the stream ends; return whether the server accepted it and sent nothing invalid."""
        session = ""
        joiner = frames.Joiner(lambda _: self.limit)
        try:
            session = dict(call.initial_metadata() or ()).get("session", "")
            if session:
                self._begin(session)
            for frame in call:
                if (message := joiner.take(frame)) is not None:
                    self._take_in(session, *message)
                del frame, message  # no message stays in memory while the next one is awaited
        except WireError as error:
            session = ""  # a longer pause before each retry
            call.cancel()
            self.say(Alert(f"the server at {self.address} sent an invalid message: {error}"))
        except grpc.RpcError as error:
            if not self._closed.is_set():
                self._judge(error)
        return bool(session)

    def _begin(self, session: str) -> None:
        """Go on with a session, or begin another, in which nothing of the one before is of use."""
        self._met, self._refused = True, None
        self._waiting.over()
        with self._room:
            if session == self._session:
                return
            self.say(f"connected to the server at {self.address}; waiting for work")
            self._session = session
            self._answers.clear()
            while not self.inbox.empty():
                entry = self.inbox.get_nowait()
                if not isinstance(entry, Exception):
                    self._held -= len(entry[2]) + _MESSAGE_BYTES

    def _take_in(self, session: str, message_id: int, blob: Bytes) -> None:
        """Queue a message, or answer it again; wait while too many bytes are queued."""
        with self._room:
            if not blob:
                self._answers.pop(message_id, None)
            elif message_id not in self._answers:
                self._answers[message_id] = None
                self._held += len(blob) + _MESSAGE_BYTES
                self.inbox.put((session, message_id, blob))
                self._room.wait_for(lambda: self._held <= self.limit or self._closed.is_set())
            elif (answer := self._answers[message_id]) is not None:
                self._out.put((message_id, answer))

    def _judge(self, error: Any) -> None:
        """Note why a stream ended; raise `ConfigError` if the server rejects this node for good."""
        code, details = error.code(), shown(without_userinfo(error.details() or ""), 200)
        if code not in _REFUSED:
            if not self._met:  # it may be the wrong server, for which retrying is futile
                self.security.greet(self.address, self.proxy)
            why = _reason(details) if code is grpc.StatusCode.UNAVAILABLE else details
            self._waiting.note(why if self.proxy is None else f"{why} (by way of --proxy)", self.done)
            return
        if code is grpc.StatusCode.UNIMPLEMENTED:
            details = "the program at this address is not a federation server; correct --server"
        self._refused = self._refused or time.monotonic()
        self._waiting.note(f"it rejects this node: {details}")
        if time.monotonic() > self._refused + _LET_IN_S:
            raise ConfigError(f"the server at {self.address} rejects this node: {details}")


class _Waiting:
    """Reports that the server is unreachable, and since when."""

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        self.address, self.say = address, say
        self._contact: datetime | None = None
        self.begun: float | None = time.monotonic()
        """Start of the outage; None while there is a stream."""
        self._next, self._tries, self._parted = _BLIP_S, 0, False

    def note(self, why: str, done: bool = False) -> None:
        """Note a broken stream; print it once, if the outage lasts, then at growing intervals, and once after a run."""
        now = time.monotonic()
        if self.begun is None:
            self.begun, self._next, self._tries = now, _BLIP_S, 0
            self._contact = self._contact and datetime.now().astimezone()
        self._tries, lasted, parted, self._parted = self._tries + 1, now - self.begun, self._parted, done
        if done:
            self._next = math.inf
            if not parted:
                self.say(f"the run is done, and the server at {self.address} ended")
        if lasted < self._next:
            return
        if self._contact is None:
            words = f"waiting for the server at {self.address}"
        else:
            words = f"lost the server at {self.address}, last heard of at {self._contact:%H:%M:%S}"
        more = f" for {lasted / 60:.0f} min and {self._tries} attempts" if self._next > _BLIP_S else ""
        self.say(Alert(f"{words}{more}: {why}; trying again"))
        self._next = next_line(lasted)

    def over(self) -> None:
        """Note that the server answered."""
        if self.begun is not None and self._contact is not None and _BLIP_S < self._next < math.inf:
            lasted = (time.monotonic() - self.begun) / 60
            self.say(f"the server at {self.address} answers again, after {lasted:.0f} min and {self._tries} attempts")
        self._contact, self.begun = datetime.now().astimezone(), None


def serve(
    node: Handler,
    address: str,
    security: Security,
    proxy: str | None = None,
    until_done: bool = False,
    watch: Callable[[Line], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run a node until the process is stopped.

    Args:
        node: The node.
        address: The server's.
        security: The node's certificate and key.
        proxy: URL of an HTTP proxy; None connects directly.
        until_done: Return when the server has said that the run is done.
        watch: Entered with the connection, to show it to an operator.
    """
    security.check(address)
    security.try_out()
    split_address(address)
    with node.at_work():
        security.greet(address, proxy)
        with Line(address, security, node.say, node.limit, proxy) as line, watch(line):
            attend(node, line, until_done)


def attend(node: Handler, line: Line, until_done: bool = False) -> None:
    """Do the server's work; raise `ConfigError` if the server rejects this node."""
    while True:
        try:
            entry = line.inbox.get(timeout=1.0)
        except queue.Empty:
            if until_done and node.done and line.is_settled():
                return
            node.idle(not line.away())
            continue
        if isinstance(entry, Exception):
            raise entry
        session, message_id, blob = entry
        begun, answer = time.perf_counter(), node.handle(blob)
        line.on_work(time.perf_counter() - begun)
        line.done = node.done  # before the server can end
        line.answer(session, message_id, answer, len(blob))
        del entry, blob, answer  # no message stays in memory while the node waits


def _reason(details: str) -> str:
    """Explain a failed connection in a network operator's terms."""
    text = details.lower()
    if "refused" in text:
        return "the connection was refused; start the server, or correct --server"
    if "dns" in text or "name resolution" in text or "domain name" in text:
        return "its host name does not resolve; correct --server, or check this machine's network"
    if "timeout" in text or "timed out" in text or "deadline" in text:
        return "it does not answer; check the network and firewalls"
    if "proxy" in text or "connect response" in text:
        return f"the proxy does not connect ({details})"
    return "the connection was closed; the server stopped or rejects this node's certificate, or the network failed"
