"""Certificates and keys for a federation on this machine, as ``benchmarks/federation.py --tls`` uses them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from lit_fed.federation.keys.authority import Keyring
from lit_fed.federation.keys.node_keys import key_of


def make_keys(folder: Path, homes: Sequence[str], summed: bool = False) -> tuple[list[str], list[list[str]]]:
    """Make an authority, the server's certificate, and a key and certificate for each node.

    Args:
        folder: Where they lie, in a folder of their own.
        homes: The clients of each node, as a list of ids.
        summed: Give each node the list of all keys, for `trainer.secure_sum`.

    Returns:
        The options of the server, and those of each node.
    """
    own = folder / "keys"
    keyring = Keyring(own, ("127.0.0.1", "localhost"), datetime.now(UTC))
    keyring.authority()
    keyring.end("server")
    server, lines, nodes = own / "server", list[str](), list[list[str]]()
    ca = ["--ca", str(own / "authority" / "ca.crt")]
    for place, clients in enumerate(homes):
        keyring.end(f"node_{place}")
        lines.append(f"keys/node_{place}.crt: {clients}\n")
        certificate = ["--certificate", str(server / "keys" / f"node_{place}.crt")]
        nodes.append([*ca, *certificate, "--key", str(own / "sites" / f"node_{place}" / "node.key")])
    peers = [key_of(keyring.certificate(f"node_{place}")) for place in range(len(homes))]
    (own / "peers.txt").write_text("\n".join(peers), encoding="utf-8")
    if summed:
        nodes = [[*words, "--peers", str(own / "peers.txt")] for words in nodes]
    (server / "node_keys.yaml").write_text("".join(lines), encoding="utf-8")
    files = {"certificate": "server.crt", "key": "server.key", "node_keys": "node_keys.yaml"}
    return [*ca, *(word for name, file in files.items() for word in (f"--{name}", str(server / file)))], nodes
