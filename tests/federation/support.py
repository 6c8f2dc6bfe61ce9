"""A federation over nodes in one process: every message crosses as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch

from lit_fed import FederatedTrainer
from lit_fed.engine.storage.packs import Version, checksum, read_pack
from lit_fed.federation import ends
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.node.node import Node
from lit_fed.federation.server import requests, roster
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.identity import Identity
from lit_fed.federation.transport.grid import MemoryGrid
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


def assert_same_states(made: FederatedTrainer, folder: Path, index: Mapping[str, Version]) -> None:
    """Nodes in a folder keep the states whose rounds and checksums the index of a simulation holds, to the bit."""
    kept = {name: at for name, (at, _) in made.run.federation.store.state_dict().items()}
    assert {name: at for name, (at, _) in index.items()} == kept
    (run_id,) = (one.run_id for one in made.callbacks if isinstance(one, Identity))
    for name, (at, sum_of_bytes) in index.items():
        if not name.isdecimal():  # the server's own
            assert made.run.federation.store.state_dict()[name] == (at, sum_of_bytes)
            continue
        (pack,) = folder.glob(f"node_*/states/{run_id}/{name}.r{at}.states")
        state = read_pack(pack, [name])[name]
        del state["/version"]
        assert checksum(name, state) == sum_of_bytes


def written(message: Message) -> bytes:
    """A message as bytes, whatever it holds: as `lit_fed.federation.messages.wire.encode` without its limits."""
    names = [(group, name) for group, payload in message.tensors.items() for name in payload]
    header = {"word": message.word, "groups": list(message.tensors), "names": names, "fields": dict(message.fields)}
    body = [tensor.contiguous() for payload in message.tensors.values() for tensor in payload.values()]
    return blob_of(header, safetensors.torch.save({str(place): tensor for place, tensor in enumerate(body)}))


def blob_of(header: Any, body: bytes | None = None) -> bytes:
    """A message of a header, as text or as what JSON can hold, and of bytes in the place of its tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<Q", 2) + b"{}" if body is None else body
    return struct.pack("<4sI", b"LFW1", len(text)) + text + body


class Clock:
    """Stands for ``time`` in modules of the server: every rest takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (ends, requests, roster):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1.0


class KeyedGrid(MemoryGrid):
    """Nodes in this process that have shown their keys.

    Args:
        handlers: What answers, by node.
        keys: The public key of each.
    """

    def __init__(self, handlers: Mapping[int, Callable[[bytes], bytes]], keys: Mapping[int, str]) -> None:
        super().__init__(handlers)
        self.keys = keys

    def nodes(self) -> Mapping[int, str]:
        """Its nodes."""
        return {node: self.keys[node] for node in self.handlers}
