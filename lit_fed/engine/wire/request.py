"""The request of a server to a node: all that an answer may depend on, beside noised and masked values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request for clients' work, or for the sum of it.

    By requests, its settings and public data a node decides what it refuses, how it names noise and states, and what it
    gives once; never by its clients' data, and so never by what clients make of a request.

    Args:
        run: The run's id.
        work: ``train`` or ``ask``.
        protocol: Name of the protocol that asks; empty for training.
        subset: The data in question; empty for training.
        round_idx: The round.
        model: Hash of the tensors that clients are to work with, the broadcast's and the frozen ones.
        clients: This node's clients that the request is for.
    """

    run: str
    work: str
    protocol: str
    subset: str
    round_idx: int
    model: str = ""
    clients: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A name of the request, the same in all rounds."""
        return "/".join((self.run, self.work, self.protocol, self.subset))

    def digest(self, *more: Any) -> bytes:
        """SHA-256 of the request, and of further words of the server."""
        return hashlib.sha256(json.dumps([*astuple(self), *more]).encode()).digest()
