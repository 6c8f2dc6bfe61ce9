"""A federation over nodes in one process: every message crosses as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from lit_fed import FederatedTrainer
from lit_fed.deployment.grid import MemoryGrid
from lit_fed.deployment.node import Node
from lit_fed.deployment.server import federate
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, Points, trainer


class Parts(NamedTuple):
    """What every end of a federation makes for itself."""

    trainer: FederatedTrainer
    model: Any
    data: Any
    algorithm: Any


Make = Callable[[Path], Parts]


def small(module: Any = LeastSquares, data: Any = Points, algorithm: Any = FedAvg, **kwargs: Any) -> Make:
    """Makes the parts of a small federation anew."""
    return lambda folder: Parts(trainer(folder, **kwargs), module(), data(), algorithm())


def simulate(make: Make, folder: Path, ckpt_path: str | None = None) -> FederatedTrainer:
    """Train in one process."""
    made, *parts = make(folder)
    made.fit(*parts, ckpt_path)
    return made


def nodes_of(make: Make, folder: Path, homes: Sequence[Sequence[int]], **kwargs: Any) -> list[Node]:
    """A node for each list of clients."""
    quiet = {"say": lambda line: None} | kwargs
    return [
        Node(*make(folder / f"node_{place}"), clients=clients, folder=folder / f"node_{place}" / "states", **quiet)
        for place, clients in enumerate(homes)
    ]


def deploy(
    make: Make,
    folder: Path,
    homes: Sequence[Sequence[int]],
    ckpt_path: str | None = None,
    handlers: Callable[[list[Node]], Mapping[int, Callable[[bytes], bytes]]] | None = None,
    own: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> FederatedTrainer:
    """Train over nodes that hold some clients each.

    Args:
        make: Makes the parts.
        folder: Of the server; the nodes' lie in it.
        homes: Who lives where.
        ckpt_path: Resume from here.
        handlers: What answers for the nodes; the nodes themselves by default.
        own: The settings of the nodes.
        kwargs: The settings of `federate`.
    """
    nodes = nodes_of(make, folder, homes, **(own or {}))
    themselves = {place + 1: node.handle for place, node in enumerate(nodes)}
    made, *parts = make(folder)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(MemoryGrid(handlers(nodes) if handlers else themselves), made, *parts, ckpt_path, **kwargs)
    return made
