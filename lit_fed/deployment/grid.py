"""How messages travel between a server and its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple
from typing import Protocol as Interface


class Reply(NamedTuple):
    """What came back to a message.

    Args:
        message_id: The message.
        blob: The answer; empty where there is none.
        error: Why there is none.
    """

    message_id: str
    blob: bytes
    error: str = ""


class Grid(Interface):
    """Messages to nodes, and their answers."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are there, each with what proves who it is; empty where nothing does."""

    def push(self, node: int, blob: bytes) -> str:
        """Send a message; its id."""

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """The answers that have come to some messages, each once; it does not wait."""


class MemoryGrid:
    """Nodes in this process, that answer as soon as they are asked for it.

    Args:
        handlers: What answers, by node.
    """

    def __init__(self, handlers: Mapping[int, Callable[[bytes], bytes]]) -> None:
        self.handlers = dict(handlers)
        self.num_bytes = 0
        self._waiting: dict[str, tuple[int, bytes]] = {}
        self._count = 0

    def nodes(self) -> Mapping[int, str]:
        """Its nodes."""
        return dict.fromkeys(self.handlers, "")

    def push(self, node: int, blob: bytes) -> str:
        """Keep a message for its node."""
        self._count += 1
        self._waiting[str(self._count)] = node, blob
        self.num_bytes += len(blob)
        return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Let one node answer."""
        for message_id in list(message_ids)[:1]:
            node, blob = self._waiting.pop(message_id)
            if node not in self.handlers:
                yield Reply(message_id, b"", "the node has left")
                return
            answer = self.handlers[node](blob)
            self.num_bytes += len(answer)
            yield Reply(message_id, answer)
