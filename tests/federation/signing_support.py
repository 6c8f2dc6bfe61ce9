"""Federations in this process whose ends have certificates, and sign."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lit_fed import FederatedTrainer
from lit_fed.federation.keys.authority import Keyring
from lit_fed.federation.keys.node_keys import Grant
from lit_fed.federation.keys.statements import SigningKey
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.signer import Signer
from lit_fed.federation.server.federate import federate
from tests.federation.support import KeyedGrid, Make

HOMES = [[0], [1, 2], [3]]


class Keys(NamedTuple):
    """The keys of a server and of three sites, and the file of their authority."""

    server: SigningKey
    sites: list[SigningKey]
    ca: Path


def made_keys(folder: Path) -> Keys:
    """Certificates as `lit-fed provision` makes them."""
    ring = Keyring(folder, ("127.0.0.1",), datetime.now(UTC))
    for make in (ring.authority, lambda: ring.end("server"), *(lambda i=i: ring.end(f"site_{i}") for i in range(3))):
        make()
    ca, server = folder / "authority/ca.crt", folder / "server"
    sites = [(server / f"keys/site_{i}.crt", folder / f"sites/site_{i}/node.key") for i in range(3)]
    ends = [(server / "server.crt", server / "server.key"), *sites]
    first, *others = (SigningKey.read(str(ca), str(certificate), str(key), None) for certificate, key in ends)
    return Keys(first, others, ca)


class SignedGrid(KeyedGrid):
    """Nodes in this process that have shown their certificates."""

    def __init__(self, handlers: Mapping[int, Callable[[bytes], Any]], keys: Keys) -> None:
        super().__init__(handlers, {place + 1: key.name for place, key in enumerate(keys.sites)})
        self.certificates = {place + 1: key.certificates[0].encode() for place, key in enumerate(keys.sites)}

    def certificate(self, node: int) -> bytes:
        return self.certificates[node]


Handlers = Callable[[list[Node]], Mapping[int, Callable[[bytes], Any]]]


def themselves(nodes: Sequence[Node]) -> dict[int, Callable[[bytes], Any]]:
    return {place + 1: node.handle for place, node in enumerate(nodes)}


def nodes_with(make: Make, keys: Keys, folder: Path, say: Callable[[str], object] = lambda line: None) -> list[Node]:
    peers = frozenset(key.name for key in keys.sites)
    return [
        Node(
            *make(folder / f"node_{place}"), clients=clients, folder=folder / f"node_{place}" / "states", say=say,
            key=keys.sites[place], signer=Signer(keys.sites[place].private, peers),
        )
        for place, clients in enumerate(HOMES)
    ]  # fmt: skip


def signed_run(
    make: Make,
    keys: Keys,
    folder: Path,
    handlers: Handlers = themselves,
    ckpt_path: str | None = None,
    nodes: Sequence[Node] | None = None,
    grid: Callable[[Mapping[int, Callable[[bytes], Any]], Keys], SignedGrid] = SignedGrid,
    **kwargs: Any,
) -> FederatedTrainer:
    """Train over three nodes whose certificates the server knows."""
    nodes = list(nodes or nodes_with(make, keys, folder))
    made, *parts = make(folder)
    grants = {key.name: Grant(frozenset(HOMES[i]), None, f"site_{i}") for i, key in enumerate(keys.sites)}
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        there = grid(handlers(nodes), keys)
        federate(there, made, *parts, ckpt_path, node_clients=grants, key=keys.server, **kwargs)
    return made
