"""Messages to nodes, and their outcomes as they arrive: the one queue through which a server asks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, TypeVar

from lit_fed.errors import WireError
from lit_fed.federation.messages.body import Blob, Bytes, make_room
from lit_fed.federation.messages.wire import Message, shown
from lit_fed.federation.server.answers import LONGEST_GREETING, hear
from lit_fed.federation.transport.grid import Grid, Reply

A = TypeVar("A")

_PAUSE_S = (0.005, 0.25)  # shortest and longest interval of looks for answers


class NoAnswer(WireError):
    """A message that its node does not answer any more."""


@dataclass(frozen=True, eq=False, slots=True)
class Envelope(Generic[A]):
    """A message to a node.

    Args:
        about: The caller's own.
        node: The node.
        blob: The message.
        read: Validates and converts the answer.
        end: The deadline of the answer.
        most: Maximum size of the answer, bytes.
    """

    about: A
    node: int
    blob: Bytes | Blob
    read: Callable[[Message], Any]
    end: float = math.inf
    most: int = LONGEST_GREETING


class Requests(Generic[A]):
    """Messages to nodes whose answers are awaited.

    Args:
        grid: The transport.
        limit: Maximum size of any message, bytes.
        late: Messages whose deadline has passed, by id, also of other queues: their nodes are still at work.
    """

    def __init__(self, grid: Grid, limit: int, late: dict[str, Envelope[A]] | None = None) -> None:
        self.grid, self.limit = grid, limit
        self.queue: deque[A] = deque()
        """Subjects whose message waits until its node can take it; the caller sends it."""
        self._sent: dict[str, Envelope[A]] = {}
        self._late = {} if late is None else late
        self._pause = 0.0

    def __bool__(self) -> bool:
        return bool(self.queue or self._sent)

    def pending(self) -> Iterator[A]:
        """Yield the subjects of all messages that their nodes have not answered, late ones too."""
        return (sent.about for sent in chain(self._sent.values(), self._late.values()))

    def send(self, envelope: Envelope[A]) -> None:
        """Send a message."""
        self._sent[self.grid.push(envelope.node, envelope.blob, envelope.most)] = replace(envelope, blob=b"")
        self._pause = 0.0

    def arrived(self) -> Iterator[tuple[A, Any]]:
        """Yield the outcomes that are here, without waiting.

        An outcome is what ``read`` makes of the answer, or the `WireError` that says why it makes nothing of it; None
        for an answer after its deadline.
        """
        ids = [*self._sent, *self._late]
        replies = deque(self.grid.pull(ids) if ids else ())
        while replies:
            reply, self._pause = replies.popleft(), 0.0  # and no longer in memory than its outcome
            if (late := self._late.pop(reply.message_id, None)) is not None:
                yield late.about, None
            elif (sent := self._sent.pop(reply.message_id, None)) is not None:
                make_room(len(reply.blob))  # with the last answer, the request was freed
                yield sent.about, self._outcome(sent, reply)

    def _outcome(self, sent: Envelope[A], reply: Reply) -> Any:
        if reply.error:
            return NoAnswer(f"its node did not answer: {shown(reply.error)}")
        try:
            return hear(reply.blob, self.limit, sent.most, sent.read)
        except WireError as error:
            return error

    def overdue(self) -> list[A]:
        """Return the subjects of messages whose deadline has just passed."""
        now = time.monotonic()
        late = [message_id for message_id, sent in self._sent.items() if now > sent.end]
        self._late |= {message_id: self._sent.pop(message_id) for message_id in late}
        return [self._late[message_id].about for message_id in late]

    def drop(self, which: Callable[[int], bool] = lambda _: True) -> list[A]:
        """Give up the messages to some nodes; return the subjects whose outcome was awaited."""
        every = chain(self._sent.items(), self._late.items())
        gone = [message_id for message_id, sent in every if which(sent.node)]
        self.grid.drop(gone)
        found = [self._sent.pop(message_id).about for message_id in gone if message_id in self._sent]
        for message_id in gone:
            self._late.pop(message_id, None)
        return found

    def rest(self) -> None:
        """Sleep for a moment, a longer one each time until something is sent or arrives."""
        time.sleep(self._pause)
        self._pause = min(max(2 * self._pause, _PAUSE_S[0]), _PAUSE_S[1])

    def outcomes(self, idle: Callable[[], object] = lambda: None) -> Iterator[tuple[A, Any]]:
        """Wait, and yield outcomes as they arrive, until every message has one or is given up at its deadline.

        Args:
            idle: Is called between two looks for answers.
        """
        while self:
            yield from self.arrived()
            self.overdue()
            idle()
            self.rest()
        self.drop()
