"""Federations in one process whose nodes are lost, whose server is killed, or whose server breaks the protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.signer import Signer
from lit_fed.federation.server.federate import federate
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from lit_fed.methods import FedAvg
from lit_fed.privacy import SecureSum
from tests.federation.support import Make, nodes_of, small
from tests.support import Points

HOMES = [[0], [1], [2, 3], [4]]
STAGES = ("offer", "keys", "shares", "vectors", "consents", "total")


def make(algorithm: Any = FedAvg, threshold: int = 3, **kwargs: Any) -> Make:
    settings = {"max_rounds": 2, "secure_sum": SecureSum(threshold, 0.5), **kwargs}
    return small(data=lambda: Points(num_clients=5, sizes=(2, 3)), algorithm=algorithm, **settings)


class Killed(BaseException):
    """The server is gone, without a word."""


class Watched(MemoryGrid):
    """Nodes in this process, of whose messages each may be changed, lost or deadly.

    Args:
        nodes: The nodes, from number 1.
        change: Takes a node's number and a message to it, and returns what reaches it; None loses the node's answer.
    """

    def __init__(self, nodes: Sequence[Node], change: Callable[[int, Message], Message | None] | None = None) -> None:
        super().__init__({place + 1: node.handle for place, node in enumerate(nodes)})
        self.change = change or (lambda _, message: message)
        self.crossed: list[tuple[int, Message, Message]] = []
        self.causes: list[str] = []

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        for message_id in list(message_ids)[:1]:
            node, blob = self._waiting[message_id]
            message = self.change(node, decode(blob))
            if message is None:
                del self._waiting[message_id]
                yield Reply(message_id, b"", "it was lost")
                return
            self._waiting[message_id] = node, encode(message)
            for reply in super().pull([message_id]):
                if not reply.error:
                    answer = decode(reply.blob)
                    self.crossed.append((node, message, answer))
                    self.causes += [answer.fields["cause"]] if answer.word == "failure" else []
                yield reply


def is_at(message: Message, stage: str, work: str = "train", round_idx: int = 1) -> bool:
    """Whether a message begins a stage of a sum; the later ones name no work."""
    found = {"offer": 0, "keys": 0}.keys()
    asked = (message.fields.get("work"), message.fields.get("round")) if stage in found else (work, round_idx)
    return message.word == "secure" and message.fields["stage"] == stage and asked == (work, round_idx)


def run(
    make: Make,
    folder: Path,
    change: Callable[[int, Message], Message | None] | None = None,
    nodes: Sequence[Node] | None = None,
    ckpt_path: str | None = None,
    grids: list[Watched] | None = None,
    **kwargs: Any,
) -> Any:
    """Train over nodes; the grid is put into a list, for what is looked at after an error."""
    nodes = nodes or nodes_of(make, folder, HOMES)
    made, *parts = make(folder)
    grid = Watched(nodes, change)
    if grids is not None:
        grids.append(grid)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(grid, made, *parts, ckpt_path, **kwargs)
    return made


def keyed(make: Make, folder: Path) -> list[Node]:
    """Nodes that know each other's keys."""
    signers = [Signer() for _ in HOMES]
    peers = frozenset(signer.name for signer in signers)
    return [
        Node(
            *make(folder / str(place)), clients=clients, folder=folder / str(place) / "states", say=lambda line: None,
            signer=Signer(signers[place].key, peers),
        )
        for place, clients in enumerate(HOMES)
    ]  # fmt: skip


def killed_in_evaluation_of(round_idx: int) -> Callable[[int, Message], Message]:
    """What kills a server after a round's sum, and before its checkpoint."""
    now = [0]

    def kill(_: int, message: Message) -> Message:
        now[0] = message.fields["round"] if message.word == "train" else now[0]
        if now[0] == round_idx and message.word == "ask":
            raise Killed
        return message

    return kill
