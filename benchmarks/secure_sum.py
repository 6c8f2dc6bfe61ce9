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

from lit_fed.secure.coordinator import secure_sum
from lit_fed.secure.party import Party
from lit_fed.secure.shamir import SHARE_BYTES


def size(value: Any) -> int:
    """Bytes of a message's content, without a format's own."""
    if is_dataclass(value):
        return sum(size(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, dict):
        return sum(len(name) + size(one) for name, one in value.items())
    if isinstance(value, np.ndarray):
        return value.nbytes
    return SHARE_BYTES if isinstance(value, int) else len(value)


def measured(nodes: int, length: int) -> tuple[float, float, int]:
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
    due = drawn.sum(0, dtype=np.uint64)
    plain = time.perf_counter() - started
    started = time.perf_counter()
    total, _ = secure_sum(parties, dict(zip(parties, drawn, strict=True)), known, 2 * nodes // 3 + 1, deliver=deliver)
    seconds = time.perf_counter() - started
    assert total.tobytes() == due.tobytes()
    return plain, seconds, sent[0] // nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--values", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    given = parser.parse_args()
    print("| nodes | values | plain, s | secure, s | sent by a node, bytes | of these beside the vector |")
    print("|---|---|---|---|---|---|")
    for length in given.values:
        for nodes in given.nodes:
            plain, seconds, sent = measured(nodes, length)
            print(
                f"| {nodes} | {length:,} | {plain:.4f} | {seconds:.3f} | {sent:,} | {sent - 8 * length:,} |", flush=True
            )
    print(machine.line())


if __name__ == "__main__":
    main()
