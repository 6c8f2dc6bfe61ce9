"""Two worlds of honest nodes that differ in a neighbour of data, and a comparison of every byte that they send.

Both worlds draw equal randomness: keys, tokens and signatures are functions of a seed. Whatever nodes then send must be
equal byte by byte. Values that noise or masks protect are compared by their pattern: the first value of a coordinate is
0, the next other one is 1, and so on, so that noise which is used twice shows, and the value of a single one does not.
"""

from __future__ import annotations

import json
import random
import secrets
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from torch import Tensor

from lit_fed.federation.messages.wire import Message, decode
from lit_fed.federation.secure import party
from lit_fed.federation.secure.signer import Signer
from tests.federation.support import written

Handle = Callable[[bytes], bytes]
Record = tuple[Any, ...]
"""What the server sees of an answer: its place, its length, its bytes, and patterns of protected values."""


def signers(count: int) -> list[Signer]:
    """Nodes' keys, which know each other."""
    keys = [ec.derive_private_key(1000 + place, ec.SECP384R1()) for place in range(count)]
    peers = frozenset(Signer(key).name for key in keys)
    return [Signer(key, peers) for key in keys]


_TRANSPORT = {f"lit_fed.federation.{name}" for name in ("calling", "serving", "server")}


@contextmanager
def equal_randomness(seed: int) -> Iterator[None]:
    """Draw everything that a node draws from the system from a seed, and sign without randomness (RFC 6979)."""
    drawn, attempt = random.Random(seed), party._Attempt
    ours = SimpleNamespace(
        token_bytes=drawn.randbytes, token_hex=lambda count: drawn.randbytes(count).hex(), randbits=drawn.getrandbits,
        randbelow=drawn.randrange,
    )  # fmt: skip

    def seeded(*args: Any, **kwargs: Any) -> Any:
        own = {name: X25519PrivateKey.from_private_bytes(drawn.randbytes(32)) for name in ("masking", "sealing")}
        return attempt(*args, **{**own, "seed": drawn.randbytes(32), **kwargs})

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("lit_fed") and name not in _TRANSPORT and getattr(module, "secrets", None) is secrets:
                stack.enter_context(patch.object(module, "secrets", ours))
        stack.enter_context(patch.object(party, "_Attempt", seeded))
        stack.enter_context(patch.object(party, "ECDSA", lambda _: ec.ECDSA(SHA256(), deterministic_signing=True)))
        yield


# ---------------------------------------------------------------------- what the server sees


Protected = Callable[[Message, str, str], bool]
"""Whether noise or masks protect a tensor of an answer, by the answer, the group and the name."""


class Patterns:
    """Numbers values of protected tensors by their first appearance at a coordinate."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], dict[bytes, int]] = {}

    def of(self, what: str, values: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """The number of each value."""
        found = []
        for place, value in enumerate(np.ascontiguousarray(values).reshape(-1)):
            known = self._known.setdefault((what, place), {})
            found.append(known.setdefault(value.tobytes(), len(known)))
        return tuple(found)


def seen(blob: bytes, protected: Protected, patterns: Patterns) -> Record:
    """All bytes of an answer, with patterns in place of protected values."""
    (length,) = struct.unpack_from("<I", blob, 4)
    header, body = blob[: 8 + length], blob[8 + length :]
    message = decode(blob)
    names = json.loads(header[8:])["names"]
    (size,) = struct.unpack_from("<Q", body)
    index = json.loads(body[8 : 8 + size])
    record: list[Any] = [len(blob), header, body[: 8 + size]]
    for place, (group, name) in enumerate(names):
        start, end = index[str(place)]["data_offsets"]
        raw = body[8 + size + start : 8 + size + end]
        if not protected(message, group, name):
            record.append((group, name, raw))
        elif name != "words":  # under masks, which are fresh in every attempt
            values = message.tensors[group][name].numpy()
            record.append((group, name, patterns.of(f"{message.word} {group} {name}", values)))
    return tuple(record)


@dataclass
class World:
    """Nodes that answer one server.

    Args:
        handles: What answers, by node.
        boots: The processes' ids, which a greeting tells.
        clients: Each node's clients.
        protected: Which tensors noise or masks protect.
        model: The tensors of an honest first broadcast.
        settings: The settings that nodes expect of a server.
        hot: The weights at which the neighbour looks, as (name, position).
        noise: The noise that nodes add to secure sums.
        patterns: Of protected values.
        records: What the server has seen.
        sums: Sums of clipped gradients of which the neighbour may be a part.
    """

    handles: Sequence[Handle]
    boots: Sequence[str]
    clients: Sequence[Sequence[int]]
    protected: Protected
    model: Mapping[str, Tensor]
    settings: Mapping[str, str]
    hot: Sequence[tuple[str, int]]
    noise: Any = None
    patterns: Patterns = field(default_factory=Patterns)
    records: list[Record] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)

    def send(self, place: int, message: Message) -> Message:
        """Send a node a message, whatever it holds; note what comes back."""
        return self.send_bytes(place, written(message), message.word)

    def send_bytes(self, place: int, blob: bytes, word: str = "") -> Message:
        answer = self.handles[place](blob)
        self.records.append((word, place, *seen(answer, self.protected, self.patterns)))
        return decode(answer)

    def note(self, *record: Any) -> None:
        """Note something else that the server learns."""
        self.records.append((record[0], "", "", b"", *record[1:]))


Hostile = Callable[[World, random.Random], None]
"""A hostile sequence: it draws what it sends, and may look at answers."""


def first_difference(one: Sequence[Record], other: Sequence[Record]) -> str | None:
    """Describe the first record of two worlds that differs; None if all are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            pairs = [(str(a), str(b)) for a, b in zip(left[2:], right[2:], strict=False) if a != b]
            shown = " | ".join(_apart(*pair) for pair in sorted(pairs, key=lambda pair: -len(pair[0]))[:2])
            return f"record {place}, {left[0]} to node {left[1]}: {shown or 'of different lengths'}"
    return None if len(one) == len(other) else f"{len(one)} records against {len(other)}"


def _apart(one: str, other: str) -> str:
    """Two unequal texts, without what they begin and end with alike."""
    at = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    if one.startswith("b'LFW1"):  # the length of the header comes first
        at = next((place for place in range(20, min(map(len, (one, other)))) if one[place] != other[place]), at)
    return f"…{one[max(0, at - 70) : at + 70]} against …{other[max(0, at - 70) : at + 70]}"


Make = Callable[[Path, bool, ExitStack], World]
"""Makes a world in a folder, with a neighbour of data or without, whose nodes are at work until the stack ends."""


def played(make: Make, folder: Path, sequence: Hostile, seeds: Sequence[int], neighbour: bool) -> World:
    """A world after some sequences, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    with equal_randomness(7), ExitStack() as stack:
        world = make(folder, neighbour, stack)
        for seed in seeds:
            sequence(world, random.Random(seed))
    return world


def leak(make: Make, folder: Path, sequence: Hostile, seeds: Sequence[int], most: float | None = None) -> str | None:
    """What differs between a world with a neighbour and one without; None if nothing does."""
    return difference(*(played(make, folder / str(there), sequence, seeds, there) for there in (False, True)), most)


def difference(one: World, other: World, most: float | None = None) -> str | None:
    """What differs between two worlds; None if nothing does.

    Args:
        one: A world.
        other: A world.
        most: Largest distance of two sums of which the neighbour is a part.
    """
    if (found := first_difference(one.records, other.records)) is not None or most is None:
        return found
    far = max((float((a - b).norm()) for a, b in zip(one.sums, other.sums, strict=True)), default=0.0)
    return f"two sums are {far} apart" if far > most else None


def reached(world: World) -> set[str]:
    """Words that nodes have answered and not refused, and what else the server has learnt."""
    noted = ("sum", "step")
    said = [record for record in world.records if record[0] in noted or b'"word":"answer"' in record[3]]
    return {record[0] for record in said}
