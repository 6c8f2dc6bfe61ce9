"""The request of a server to a node: all that an answer may depend on, beside noised and masked values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import WireError
from lit_fed.tensors import hash_of_groups

_LONGEST = 100  # letters of a name


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

    @classmethod
    def read(cls, fields: Mapping[str, Any], tensors: Mapping[str, Payload] | None = None) -> Request:
        """Read a request from an untrusted message.

        Args:
            fields: The message's, with ``work``; ``clients`` may be missing.
            tensors: The message's groups of tensors, if it is for clients' work.
        """
        texts = [fields.get(name, "") for name in ("run", "work", "protocol", "subset")]
        round_idx, clients = fields.get("round"), fields.get("clients", [])
        named = all(type(text) is str and "/" not in text and len(text) <= _LONGEST for text in texts)
        if not named or type(round_idx) is not int:
            raise WireError("the work that is asked for is malformed; run the same lit_fed on both ends")
        whole = type(clients) is list and all(type(one) is int for one in clients)
        if not whole or len(set(clients)) < len(clients):
            raise WireError("the list of clients of a request is malformed; run the same lit_fed on both ends")
        groups = {group: (tensors or {}).get(group, {}) for group in ("payload", "frozen")}
        model = "" if tensors is None else hash_of_groups(groups)
        run, work, *question = texts
        protocol, subset = ("", "") if work == "train" else question  # no second name for a training
        return cls(run, work, protocol, subset, round_idx, model, tuple(sorted(clients)))
