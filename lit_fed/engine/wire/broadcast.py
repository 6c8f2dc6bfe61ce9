"""What the server sends in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lit_fed.engine.wire.payload import Payload

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class Broadcast:
    """What the server sends in a round, after the wire: all that a client needs besides its data and its state.

    Args:
        round_idx: The round, counted from 0.
        payloads: What clients receive, by kind.
        frozen: The parameters that neither train nor travel in this round, as the server has them, by kind.
        num_bytes: Bytes one client downloads, by kind.
        wire: What clients receive as it travels, before it is decoded, by kind.
    """

    round_idx: int
    payloads: Mapping[str, Payload]
    frozen: Mapping[str, Payload] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    wire: Mapping[str, Payload] = field(default_factory=dict)
