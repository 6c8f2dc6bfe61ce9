"""Nodes in memory, with keys of certificates, for tests of the secure sum."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key

from lit_fed.federation.secure.coordinator import Coordinator
from lit_fed.federation.secure.masks import Words
from lit_fed.federation.secure.messages import Invitation
from lit_fed.federation.secure.party import Identities, Party

KEYS: list[EllipticCurvePrivateKey] = [generate_private_key(SECP384R1()) for _ in range(10)]


def names(count: int) -> list[str]:
    return [f"n{position}" for position in range(count)]


def identities(count: int) -> Identities:
    return {name: key.public_key() for name, key in zip(names(count), KEYS, strict=False)}


def nodes(count: int, smallest: int = 3) -> dict[str, Party]:
    known = identities(count)
    return {name: Party(name, key, known, smallest) for name, key in zip(names(count), KEYS, strict=False)}


def vectors(count: int, length: int = 5) -> dict[str, Words]:
    drawn = np.random.default_rng(count).integers(0, 2**64, (count, length), np.uint64)
    return dict(zip(names(count), drawn, strict=True))


def plain(given: dict[str, Words], among: object = None) -> Words:
    kept = [vector for name, vector in given.items() if among is None or name in among]  # type: ignore[operator]
    return np.sum(kept, axis=0, dtype=np.uint64)  # type: ignore[no-any-return]


def call_of(count: int, threshold: int, **more: object) -> Invitation:
    given: dict[str, object] = {"run": "r", "round_idx": 0, "attempt": 0, "roster": tuple(names(count)), "length": 5}
    given |= {"about": "", "dishonest": None}
    return Invitation(**{**given, "threshold": threshold, **more})  # type: ignore[arg-type]


class Attempt:
    """An attempt that stops before a stage, with the messages that the server would send next."""

    def __init__(
        self,
        count: int,
        threshold: int,
        upto: str,
        lost: object = (),
        parties: dict[str, Party] | None = None,
        **more: object,
    ) -> None:
        self.call, self.nodes = call_of(count, threshold, **more), parties or nodes(count)
        self.given = vectors(count)
        self.server = Coordinator(self.call, identities(count))
        self.answers: dict[str, object] = {n: p.begin(self.call, self.given[n]) for n, p in self.nodes.items()}
        for stage in ("keys", "shares", "vectors", "consents"):
            self.messages: dict[str, object] = dict(getattr(self.server, stage)(self.answers))
            if stage == upto:
                return
            following = {"keys": "shares", "shares": "vectors", "vectors": "consents"}[stage]
            self.answers = {
                name: self.nodes[name].answer(message)
                for name, message in self.messages.items()
                if not (following == "vectors" and name in lost)  # type: ignore[operator]
            }
