"""A grid carries messages to nodes, and their replies back: the interface, and nodes in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple
from typing import Protocol as Interface

from lit_fed.federation.messages.body import Blob, Bytes


class Reply(NamedTuple):
    """The reply to a message: a blob, or the reason why there is none."""

    message_id: str
    blob: Bytes
    error: str = ""


class Grid(Interface):
    """A transport of messages to nodes and of their replies."""

    num_bytes: int
    """Bytes of all messages and replies so far."""

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes with their public keys; an empty key without authentication."""

    def certificate(self, node: int) -> bytes:
        """Return a connected node's certificate in PEM; empty without authentication."""

    def push(self, node: int, blob: Bytes | Blob, most: int) -> str:
        """Send a message, and return its id.

        Args:
            node: The node.
            blob: The message.
            most: Maximum size of the answer that is due, bytes; a transport takes no memory for a larger one.
        """

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Return the replies that have arrived, each once, without waiting."""

    def drop(self, message_ids: Collection[str]) -> None:
        """Give up messages whose replies nobody awaits any more; nothing of them is kept."""


class MemoryGrid:
    """Nodes in this process, by their message handlers; they answer when `pull` asks for a reply."""

    def __init__(self, handlers: Mapping[int, Callable[[bytes], Bytes]]) -> None:
        self.handlers = dict(handlers)
        self.num_bytes = 0
        self._waiting: dict[str, tuple[int, bytes]] = {}
        self._count = 0

    def nodes(self) -> Mapping[int, str]:
        """Return the nodes."""
        return dict.fromkeys(self.handlers, "")

    def certificate(self, node: int) -> bytes:
        """Return none."""
        return b""

    def push(self, node: int, blob: Bytes | Blob, most: int) -> str:
        """Queue a message for a node; the answer is in memory already, whatever its size."""
        self._count += 1
        self._waiting[str(self._count)] = node, bytes(blob)
        self.num_bytes += len(blob)
        return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Let one node answer one message."""
        for message_id in list(message_ids)[:1]:
            node, blob = self._waiting.pop(message_id)
            if node not in self.handlers:
                yield Reply(message_id, b"", "the node has left")
                return
            answer = self.handlers[node](blob)
            self.num_bytes += len(answer)
            yield Reply(message_id, answer)

    def drop(self, message_ids: Collection[str]) -> None:
        """Forget messages."""
        for message_id in message_ids:
            self._waiting.pop(message_id, None)
