"""Nodes at the server: who is connected, what is under way to each, and what has come back.

One thread calls it, the one that serves; nothing in it waits but `Sessions.next_message`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from lit_fed.deployment import fleet

POLL_S = 5.0  # for which a node's question for work is kept open
SILENT_S = 20.0  # after which a node that has asked nothing is lost; it asks every 4 s, or polls
GONE_S = 8.0  # the same, where all its connections have been closed
STALLED_S = 120.0  # after which an answer that does not grow is given up
LEAST_HELD_BYTES = 2**28  # of a node's answers, of which one parcel may hold several
MOST_NODES = 10_000
_BAD, _NOT_YOURS, _GONE, _TAKEN, _TOO_LARGE = 400, 403, 404, 409, 413


class Refused(Exception):
    """A request that is not followed.

    Args:
        status: Of HTTP.
        why: In a few words, for who is known.
    """

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(eq=False)
class _Outgoing:
    """A message to a node that it has not answered.

    Args:
        parcel: The message; once the node has all of it, without its objects.
        end: When it is worth nothing any more.
    """

    parcel: fleet.Parcel
    end: float
    taken: bool = False


@dataclass(eq=False)
class _Upload:
    """An answer that is being sent.

    Args:
        reply_to: The message that it answers.
        wanted: The names of its objects.
        objects: Those that have come.
        grown: When the last came.
    """

    reply_to: str
    wanted: frozenset[str]
    objects: dict[str, bytes]
    grown: float


@dataclass(eq=False)
class NodeSession:
    """A node that is connected.

    Args:
        node: Its id, which no other session has had.
        key: Its public key.
        seen: When it last asked something.
    """

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
    """What has come of a message, until somebody asks for it."""

    session: NodeSession | None
    end: float
    message_id: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.objects.values()))


class Sessions:
    """The nodes at the server.

    Args:
        limit: The size of the largest message that is taken.
        ttl: Seconds after which a message without an answer, or an answer that nobody asks for, is dropped.
        named: Whether nodes have keys of their own, which the server was given.
        clock: Tells the time.
    """

    def __init__(self, limit: int, ttl: float, named: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_held, self.ttl, self.named, self.clock = max(limit, LEAST_HELD_BYTES), ttl, named, clock
        self.run_id = secrets.randbits(62) + 1
        self.by_key: dict[bytes, NodeSession] = {}
        self.by_node: dict[int, NodeSession] = {}
        self._done: dict[str, _Done] = {}

    # ------------------------------------------------------------------ the server's side

    def nodes(self) -> dict[int, str]:
        """Who is there, each with its key where keys are looked at."""
        self.sweep()
        return {node: one.key.hex() if self.named else "" for node, one in self.by_node.items()}

    def send(self, parcel: fleet.Parcel, node: int) -> bool:
        """Keep a message for a node until it asks; whether there is such a node."""
        if (session := self.by_node.get(node)) is None:
            return False
        session.out[parcel.message_id] = _Outgoing(parcel, self.clock() + self.ttl)
        session.work.set()
        return True

    def collect(self, message_ids: Collection[str]) -> list[tuple[str, str, dict[str, bytes], str]]:
        """What has come of some messages, each once: the message, its answer's id and objects, or why there is none."""
        self.sweep()
        found = []
        for message_id in message_ids:
            if (done := self._done.pop(message_id, None)) is not None:
                self._let_go(done)
                found.append((message_id, done.message_id, done.objects, done.error))
        return found

    def sweep(self) -> None:
        """Miss those who are silent, and drop what is too old."""
        now = self.clock()
        for session in list(self.by_node.values()):
            if now > session.seen + (SILENT_S if session.lines else GONE_S):
                self.drop(session, "its node has left")
                continue
            for message_id, out in list(session.out.items()):
                if now > out.end:
                    self._fail(session, message_id, "it has got no answer in time")
            for upload in list(session.uploads.values()):
                if now > upload.grown + STALLED_S:
                    self._fail(session, upload.reply_to, f"its node has sent nothing of its answer for {STALLED_S:g} s")
        for message_id, done in list(self._done.items()):
            if now > done.end:
                self._let_go(self._done.pop(message_id))

    def drop(self, session: NodeSession, why: str) -> None:
        """Take leave of a node; what was under way to it has failed."""
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
        """Who has a key, if connected; it has just asked something."""
        if (session := self.by_key.get(key)) is not None:
            session.seen = self.clock()
            session.lines.add(line)
        return session

    def hang_up(self, key: bytes, line: object) -> None:
        """A connection has been closed."""
        if (session := self.by_key.get(key)) is not None and line in session.lines:
            session.lines.discard(line)

    async def answer(self, word: str, request: Any, key: bytes, line: object) -> Any:
        """Do what a node asks.

        Args:
            word: What, as in `fleet.REQUESTS`.
            request: Flower's message.
            key: Of who asks, who has shown it.
            line: The connection.

        Raises:
            Refused: If that cannot be.
            WireError: If what it sends is not what it should be.
        """
        pb, session = fleet.proto(), self.by_key.get(key)
        if word in ("RegisterNodeFleet", "ActivateNode"):
            if request.public_key != key:
                raise Refused(_NOT_YOURS, "this is another key")
            if word == "RegisterNodeFleet":
                return pb.RegisterNodeFleetResponse(node_id=0)
            return pb.ActivateNodeResponse(node_id=self._connect(key, line).node)
        claimed = request.node_id if word == "DeactivateNode" else request.node.node_id
        if session is None or claimed != session.node:
            raise Refused(_NOT_YOURS, "no such node has this key")
        if word == "DeactivateNode":
            self.drop(session, "its node has left")
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
        """The first message that a node does not have; none after a while."""
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
            self.drop(before, "its node was started again")
        if len(self.by_node) >= MOST_NODES:
            raise Refused(503, f"there are {MOST_NODES:,} nodes already")
        session = NodeSession(secrets.randbits(62) + 2, key, self.clock(), lines={line})
        self.by_key[key] = self.by_node[session.node] = session
        return session

    def _object(self, session: NodeSession, name: str) -> bytes:
        for out in session.out.values():
            if (content := out.parcel.objects.get(name)) is not None:
                return content
        raise Refused(_GONE, "there is no such object for this node")

    def _begin_upload(self, session: NodeSession, request: Any) -> Any:
        pb = fleet.proto()
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(_BAD, "one message at a time")
        (message,), (tree,) = request.messages_list, request.message_object_trees
        said = message.metadata
        if said.src_node_id != session.node or said.dst_node_id != fleet.SERVER_ID:
            raise Refused(_NOT_YOURS, "it is the message of another node")
        if said.reply_to_message_id not in session.out:
            raise Refused(_GONE, "nobody waits for this answer")
        if message.HasField("error"):
            self._fail(session, said.reply_to_message_id, f"{message.error.code}: {message.error.reason[:300]}")
            return pb.PushMessagesResponse()
        wanted = fleet.names(tree, 8 + 2 * self.most_held // fleet.CHUNK_BYTES)
        if tree.object_id != said.message_id:
            raise Refused(_BAD, "the message is not that of its objects")
        # What is sent again after a cut goes on where it was.
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
            raise Refused(_GONE, "nobody waits for this object")
        if name in upload.objects:
            return True
        fleet.check_object(name, content)
        if session.held + len(content) > self.most_held:
            self._forget_late(session)
        if session.held + len(content) > self.most_held:
            why = f"its node's answers are over the limit of {self.most_held:,} bytes; raise --most_bytes"
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
        """Drop a node's answers that nobody has asked for, which may be too late to be wanted."""
        for message_id, done in list(self._done.items()):
            if done.session is session:
                self._let_go(self._done.pop(message_id))
                self._done[message_id] = _Done(None, done.end, error="its answer came when nobody asked for it")
