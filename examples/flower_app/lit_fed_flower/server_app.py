"""The server: lit_fed's rounds, with Flower's grid as the transport."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from lit_fed.federation.messages.body import Blob, Bytes
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import Reply

from .parts import made, pack, unpack

app = ServerApp()


class FlowerGrid:
    """Flower's grid, as `lit_fed.federation.transport.grid.Grid`.

    SuperLink authenticates nodes, so that keys are empty.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.num_bytes = grid, 0

    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes."""
        return dict.fromkeys(self.grid.get_node_ids(), "")

    def certificate(self, node: int) -> bytes:
        """Return none: SuperLink keeps nodes' keys to itself."""
        del node
        return b""

    def push(self, node: int, blob: Bytes | Blob, most: int) -> str:
        """Send a message; SuperLink bounds the answer, not ``most``."""
        (message_id,) = self.grid.push_messages([Message(pack(blob), node, "query")])
        self.num_bytes += len(blob)
        return str(message_id)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Return the replies that have arrived."""
        for reply in self.grid.pull_messages(list(message_ids)):
            told = reply.metadata.reply_to_message_id
            answer = b"" if reply.has_error() else unpack(reply.content)
            self.num_bytes += len(answer)
            yield Reply(told, answer, reply.error.reason if reply.has_error() else "")

    def drop(self, message_ids: Collection[str]) -> None:
        """Leave messages that nobody awaits to SuperLink, which forgets them at the end of their time."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the run that ``folder`` and ``config`` of ``--run-config`` describe."""
    trainer, parts = made(context.run_config)
    federate(FlowerGrid(grid), trainer, *parts)
