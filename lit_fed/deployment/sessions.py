"""Sessions of nodes at the server: connections, outgoing messages and received answers.

Only the serving thread calls this module, and only `Sessions.next_message` waits.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from lit_fed.deployment import fleet

POLL_S = 5.0  # duration of a long poll
SILENT_S = 20.0  # time-out of a silent node; heartbeats come every 4 s
GONE_S = 8.0  # time-out of a node without an open connection
STALLED_S = 120.0  # time-out of an upload without progress
LEAST_HELD_BYTES = 2**28  # minimum buffer for a node's answers, because a batch may hold several
MOST_NODES = 10_000
_BAD, _NOT_YOURS, _GONE, _TAKEN, _TOO_LARGE = 400, 403, 404, 409, 413


class Refused(Exception):
    """A rejected request, with the HTTP status and, for authenticated nodes, the reason."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(eq=False)
class _Outgoing:
    """An unanswered message to a node, until its expiry; its objects are freed once the node has them."""

    parcel: fleet.Parcel
    end: float
    taken: bool = False


@dataclass(eq=False)
class _Upload:
    """An answer that is being uploaded, with the objects received so far and the time of the last one."""

    reply_to: str
    wanted: frozenset[str]
    objects: dict[str, bytes]
    grown: float


@dataclass(eq=False)
class NodeSession:
    """A connected node, with a random id that is unique to the session, and the time of its last request."""

    node: int
    key: bytes
    seen: float
    out: dict[str, _Outgoing] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    lines: set[object] = field(default_factory=set)
    held: int = 0
    work: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Done:
    """The outcome of a message, until it is collected."""

    session: NodeSession | None
    end: float
    message_id: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.objects.values()))


class Sessions:
    """All sessions of nodes.

    Args:
        limit: Maximum size of a message, bytes.
        ttl: Seconds after which an unanswered message, or an uncollected answer, is dropped.
        named: Whether the server knows the nodes' keys.
        clock: Returns the current time in seconds.
    """

    def __init__(self, limit: int, ttl: float, named: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_held, self.ttl, self.named, self.clock = max(limit, LEAST_HELD_BYTES), ttl, named, clock
        self.run_id = secrets.randbits(62) + 1
        self.by_key: dict[bytes, NodeSession] = {}
        self.by_node: dict[int, NodeSession] = {}
        self._done: dict[str, _Done] = {}

    # ------------------------------------------------------------------ the server's side

    def nodes(self) -> dict[int, str]:
        """Return the connected nodes with their public keys; an empty key without authentication."""
        self.sweep()
        return {node: one.key.hex() if self.named else "" for node, one in self.by_node.items()}

    def send(self, parcel: fleet.Parcel, node: int) -> bool:
        """Queue a message for a node; return whether the node is connected."""
        if (session := self.by_node.get(node)) is None:
            return False
        session.out[parcel.message_id] = _Outgoing(parcel, self.clock() + self.ttl)
        session.work.set()
        return True

    def collect(self, message_ids: Collection[str]) -> list[tuple[str, str, dict[str, bytes], str]]:
        """Return, once per message, its id, its answer's id and objects, and the reason of a failure."""
        self.sweep()
        found = []
        for message_id in message_ids:
            if (done := self._done.pop(message_id, None)) is not None:
                self._let_go(done)
                found.append((message_id, done.message_id, done.objects, done.error))
        return found

    def sweep(self) -> None:
        """Drop silent nodes, expired messages and stalled uploads."""
        now = self.clock()
        for session in list(self.by_node.values()):
            if now > session.seen + (SILENT_S if session.lines else GONE_S):
                self.drop(session, "its node disconnected")
                continue
            for message_id, out in list(session.out.items()):
                if now > out.end:
                    self._fail(session, message_id, "its node did not answer in time")
            for upload in list(session.uploads.values()):
                if now > upload.grown + STALLED_S:
                    self._fail(session, upload.reply_to, f"the upload of its answer stalled for {STALLED_S:g} s")
        for message_id, done in list(self._done.items()):
            if now > done.end:
                self._let_go(self._done.pop(message_id))

    def drop(self, session: NodeSession, why: str) -> None:
        """End a session, and fail its unanswered messages."""
        for message_id in list(session.out):
            self._fail(session, message_id, why)
        self.by_node.pop(session.node, None)
        if self.by_key.get(session.key) is session:
            del self.by_key[session.key]
        session.work.set()

    def _fail(self, session: NodeSession, message_id: str, why: str) -> None:
        session.out.pop(message_id, None)
        for name, upload in list(session.uploads.items()):
            if upload.reply_to == message_id:
                del session.uploads[name]
                session.held -= sum(map(len, upload.objects.values()))
        self._done[message_id] = _Done(None, self.clock() + self.ttl, error=why)

    def _let_go(self, done: _Done) -> None:
        if done.session is not None:
            done.session.held -= done.num_bytes

    # ------------------------------------------------------------------ a node's side

    def session_of(self, key: bytes, line: object) -> NodeSession | None:
        """Return a key's session, if any, and record a request on it."""
        if (session := self.by_key.get(key)) is not None:
            session.seen = self.clock()
            session.lines.add(line)
        return session

    def hang_up(self, key: bytes, line: object) -> None:
        """Record a closed connection."""
        if (session := self.by_key.get(key)) is not None and line in session.lines:
            session.lines.discard(line)

    async def answer(self, word: str, request: Any, key: bytes, line: object) -> Any:
        """Answer a request, a value of `fleet.REQUESTS`, of an authenticated node.

        Raises:
            Refused: If the request is inadmissible.
            WireError: If an uploaded object is malformed.
        """
        pb, session = fleet.proto(), self.by_key.get(key)
        if word in ("RegisterNodeFleet", "ActivateNode"):
            if request.public_key != key:
                raise Refused(_NOT_YOURS, "the key differs from the one that signed the request")
            if word == "RegisterNodeFleet":
                return pb.RegisterNodeFleetResponse(node_id=0)
            return pb.ActivateNodeResponse(node_id=self._connect(key, line).node)
        claimed = request.node_id if word == "DeactivateNode" else request.node.node_id
        if session is None or claimed != session.node:
            raise Refused(_NOT_YOURS, "the node's id does not belong to this key")
        if word == "DeactivateNode":
            self.drop(session, "its node disconnected")
            return pb.DeactivateNodeResponse()
        if word == "SendNodeHeartbeat":
            return pb.SendNodeHeartbeatResponse(success=True)
        if word == "PullMessages":
            return await self.next_message(session)
        if word == "PullObject":
            content = self._object(session, request.object_id)
            return pb.PullObjectResponse(object_found=True, object_available=True, object_content=content)
        if word == "ConfirmMessageReceived":
            if (out := session.out.get(request.message_object_id)) is not None:
                out.taken = True
                out.parcel.objects.clear()
            return pb.ConfirmMessageReceivedResponse()
        if word == "PushMessages":
            return self._begin_upload(session, request)
        assert word == "PushObject"
        return pb.PushObjectResponse(stored=self._upload(session, request))

    async def next_message(self, session: NodeSession) -> Any:
        """Return the first message that a node has not fetched; an empty response after `POLL_S`."""
        pb, end = fleet.proto(), self.clock() + POLL_S
        while True:
            for out in session.out.values():
                if not out.taken:
                    parcel = out.parcel
                    return pb.PullMessagesResponse(messages_list=[parcel.message], message_object_trees=[parcel.tree])
            if self.by_node.get(session.node) is not session or (left := end - self.clock()) <= 0:
                return pb.PullMessagesResponse()
            session.work.clear()
            try:
                await asyncio.wait_for(session.work.wait(), left)
            except TimeoutError:
                return pb.PullMessagesResponse()

    def _connect(self, key: bytes, line: object) -> NodeSession:
        self.sweep()
        if (before := self.by_key.get(key)) is not None:
            if before.lines - {line}:
                raise Refused(_TAKEN, "another node with this key is connected")
            self.drop(before, "its node restarted")
        if len(self.by_node) >= MOST_NODES:
            raise Refused(503, f"the server has the maximum of {MOST_NODES:,} nodes")
        session = NodeSession(secrets.randbits(62) + 2, key, self.clock(), lines={line})
        self.by_key[key] = self.by_node[session.node] = session
        return session

    def _object(self, session: NodeSession, name: str) -> bytes:
        for out in session.out.values():
            if (content := out.parcel.objects.get(name)) is not None:
                return content
        raise Refused(_GONE, "this node has no such object to fetch")

    def _begin_upload(self, session: NodeSession, request: Any) -> Any:
        pb = fleet.proto()
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(_BAD, "the request must hold exactly one message")
        (message,), (tree,) = request.messages_list, request.message_object_trees
        said = message.metadata
        if said.src_node_id != session.node or said.dst_node_id != fleet.SERVER_ID:
            raise Refused(_NOT_YOURS, "the message belongs to another node")
        if said.reply_to_message_id not in session.out:
            raise Refused(_GONE, "the answer's message is unknown or expired")
        if message.HasField("error"):
            self._fail(session, said.reply_to_message_id, f"{message.error.code}: {message.error.reason[:300]}")
            return pb.PushMessagesResponse()
        wanted = fleet.names(tree, 8 + 2 * self.most_held // fleet.CHUNK_BYTES)
        if tree.object_id != said.message_id:
            raise Refused(_BAD, "the message does not match its objects")
        # An upload that is repeated after a lost connection continues where it stopped.
        before = [one for one in session.uploads.values() if one.reply_to == said.reply_to_message_id]
        kept: dict[str, bytes] = {}
        for one in before:
            kept |= {name: content for name, content in one.objects.items() if name in wanted}
        for name in [name for name, one in session.uploads.items() if one in before]:
            del session.uploads[name]
        session.held += sum(map(len, kept.values())) - sum(len(one) for old in before for one in old.objects.values())
        session.uploads[said.message_id] = _Upload(said.reply_to_message_id, frozenset(wanted), kept, self.clock())
        missing = [name for name in wanted if name not in kept]
        return pb.PushMessagesResponse(objects_to_push=missing, session_id=said.message_id)

    def _upload(self, session: NodeSession, request: Any) -> bool:
        upload, name, content = session.uploads.get(request.session_id), request.object_id, request.object_content
        if upload is None or name not in upload.wanted:
            raise Refused(_GONE, "the object does not belong to an open upload")
        if name in upload.objects:
            return True
        fleet.check_object(name, content)
        if session.held + len(content) > self.most_held:
            self._forget_late(session)
        if session.held + len(content) > self.most_held:
            why = f"its node's answers exceed the limit of {self.most_held:,} bytes; raise --most_bytes"
            self._fail(session, upload.reply_to, why)
            raise Refused(_TOO_LARGE, why)
        upload.objects[name], upload.grown = content, self.clock()
        session.held += len(content)
        if len(upload.objects) == len(upload.wanted):
            del session.uploads[request.session_id]
            session.out.pop(upload.reply_to, None)
            end = self.clock() + self.ttl
            self._done[upload.reply_to] = _Done(session, end, request.session_id, upload.objects)
        return True

    def _forget_late(self, session: NodeSession) -> None:
        """Drop a node's uncollected answers, which are probably too late."""
        for message_id, done in list(self._done.items()):
            if done.session is session:
                self._let_go(self._done.pop(message_id))
                self._done[message_id] = _Done(None, done.end, error="its answer was dropped before it was collected")
