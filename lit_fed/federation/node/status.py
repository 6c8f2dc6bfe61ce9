"""The state of a node, for the operator of its site."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from typing_extensions import override

from lit_fed.federation.node.node import Node
from lit_fed.federation.transport.calling import Handler, Line
from lit_fed.federation.transport.status_port import StatusPort, StatusSource, serving_status


class NodeStatus(StatusSource):
    """The facts that a node's pages show.

    Under ``trainer.privacy.withhold`` they lack whatever tells whether the node's clients take part in a round: the
    run's id, the last message, bytes, and times of work.
    """

    def __init__(self, node: Node, line: Line) -> None:
        super().__init__("work_seconds")
        self.node, self.line = node, line
        if not node.run.withholds:
            line.on_work = lambda seconds: self.seconds.labels(*self._names()).observe(seconds)

    @override
    def is_ready(self) -> bool:
        """Whether the node is connected to its server."""
        return self.line.away() == 0

    @override
    def facts(self) -> dict[str, Any]:
        node, (run, method) = self.node, self._names()
        facts = {"connected": self.is_ready(), "done": node.done, "method": method}
        if node.run.withholds:
            return facts
        return facts | {"run": run, "last_message": node.at, "bytes": self.line.num_bytes}

    def _names(self) -> tuple[str, str]:
        return self.node.run_id, type(self.node.federation.algorithm).__name__


def watched(node: Handler, settings: Any, line: Line) -> AbstractContextManager[None]:
    """Serve the pages of a node that trains, if the command's settings have a port for them."""
    return serving_status(StatusPort.of(settings), NodeStatus(node, line)) if isinstance(node, Node) else nullcontext()
