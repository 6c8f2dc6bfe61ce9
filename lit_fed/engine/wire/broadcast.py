"""The server's message to the clients of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lit_fed.engine.wire.payload import Payload


@dataclass(slots=True)
class Broadcast:
    """A round's message after the wire: everything that a client needs besides its data and state.

    Args:
        round_idx: The round, counted from 0.
        payloads: Payloads as clients receive them, by kind.
        frozen: Parameters that neither train nor travel in this round, with the server's values, by kind.
        num_bytes: Bytes that one client downloads, by kind.
        wire: Payloads as they travel, by kind.
    """

    round_idx: int
    payloads: Mapping[str, Payload]
    frozen: Mapping[str, Payload] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    wire: Mapping[str, Payload] = field(default_factory=dict)
