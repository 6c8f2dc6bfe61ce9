"""Cost of a secure sum over nodes in memory: seconds and uplink bytes of a round, beside the plain sum.

All nodes and the server share one process here; a federation's nodes make their masks at the same time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import machine  # beside this file
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

from lit_fed.federation.secure.coordinator import secure_sum
from lit_fed.federation.secure.messages import Invitation
from lit_fed.federation.secure.party import Party
from lit_fed.federation.secure.shamir import SHARE_BYTES


def size(value: Any) -> int:
    """Bytes of a message's content, without a format's own."""
    if is_dataclass(value):
        return sum(size(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, dict):
        return sum(len(name) + size(one) for name, one in value.items())
    if isinstance(value, np.ndarray):
        return value.nbytes
    return SHARE_BYTES if isinstance(value, int) else len(value)


def measured(nodes: int, length: int, threshold: int, dishonest: int | None) -> tuple[float, float, int]:
    """Seconds of the plain and of the secure sum, and bytes that one node sends."""
    keys = {f"node {node:03}": generate_private_key(SECP384R1()) for node in range(nodes)}
    known = {name: key.public_key() for name, key in keys.items()}
    parties = {name: Party(name, key, known) for name, key in keys.items()}
    drawn = np.random.default_rng(0).integers(0, 2**64, (nodes, length), np.uint64)
    sent = [0]

    def deliver(attempt: int, stage: str, name: str, step: Callable[[], Any]) -> Any:
        answer = step()
        sent[0] += size(answer)
        return answer

    started = time.perf_counter()
    expected = drawn.sum(0, dtype=np.uint64)
    plain = time.perf_counter() - started
    started = time.perf_counter()
    vectors = dict(zip(parties, drawn, strict=True))
    total, _ = secure_sum(parties, vectors, known, threshold, deliver=deliver, dishonest=dishonest)
    seconds = time.perf_counter() - started
    assert total.tobytes() == expected.tobytes()
    return plain, seconds, sent[0] // nodes


def due(near: int, name_bytes: int = len("node 000"), signature_bytes: int = 104) -> int:
    """Bytes that a node sends beside its vector, by the protocol: keys, shares, consent, unmasking, and names.

    Two keys of 32 bytes, a name, and a signature; for each of near - 1 neighbours 148 bytes of sealed shares, and a
    commitment; a signature; of each of near nodes a share of 66 bytes. A signature on P-384 has about 103 bytes.
    """
    others = near - 1
    keys, shares = name_bytes + 64 + signature_bytes, others * (name_bytes + 148) + 32
    return keys + shares + signature_bytes + near * (name_bytes + SHARE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--values", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--lost", type=int, help="n - t; by default t is just above two thirds")
    parser.add_argument("--dishonest", type=int, help="B; by default all pairs of nodes have masks")
    given = parser.parse_args()
    print(
        "| nodes | values | plain, s | secure, s | key stream, GB | sent by a node, bytes | beside the vector | due |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for length in given.values:
        for nodes in given.nodes:
            threshold = 2 * nodes // 3 + 1 if given.lost is None else nodes - given.lost
            names = tuple(map(str, range(nodes)))
            near = len(Invitation("", 0, 0, names, threshold, length, "", given.dishonest).near("0"))
            plain, seconds, sent = measured(nodes, length, threshold, given.dishonest)
            drawn = 8 * length * nodes * (near + 1) / 1e9  # masks of both ends of a pair, and 2 n of nodes' own
            costs = f"{plain:.4f} | {seconds:.3f} | {drawn:.3f} | {sent:,} | {sent - 8 * length:,} | {due(near):,}"
            print(f"| {nodes} | {length:,} | {costs} |", flush=True)
    print(machine.line())


if __name__ == "__main__":
    main()
