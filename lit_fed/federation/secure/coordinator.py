"""The server's half of the protocol: it relays, drops nodes that break it, and learns the survivors' sum."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import combinations, islice
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lit_fed.federation.messages.schema import Stage
from lit_fed.federation.secure.masks import KEY_BYTES, Words, derive, stream
from lit_fed.federation.secure.messages import (
    AllKeys,
    Consent,
    Consents,
    Invitation,
    Masked,
    Refusal,
    Relayed,
    Sealed,
    SignedKeys,
    Survivors,
    TooFew,
    TooSmall,
    Unmasking,
)
from lit_fed.federation.secure.party import (
    Identities,
    Party,
    are_keys,
    commitment_of,
    consented,
    is_signed,
    need,
    pair_mask,
)
from lit_fed.federation.secure.shamir import PRIME, combine

_MOST_SUBSETS = 500  # of shares that are tried where a node gave a wrong one


class Coordinator:
    """One attempt; its methods are called in their order, each with the answers that arrived in time.

    A node whose answer is missing or malformed is lost. Every method raises `TooFew` below the threshold.

    Args:
        call: The attempt.
        identities: Public keys of the nodes' certificates by name.
        smallest: Least number of nodes with clients in the sum.
    """

    def __init__(self, call: Invitation, identities: Identities, smallest: int = 0) -> None:
        call.check()
        self.call, self._identities, self._smallest = call, identities, smallest
        self._keys: dict[str, SignedKeys] = {}
        self._sealed: dict[str, Sealed] = {}
        self._masked: dict[str, Words] = {}
        self.survivors: frozenset[str] = frozenset()

    def run(self, ask: Callable[[Stage, Mapping[str, Any]], Mapping[str, Any]]) -> Words:
        """Run the attempt, and return the survivors' sum.

        Args:
            ask: Sends a stage's messages by node, and returns the answers that arrived in time.
        """
        found: Any = dict.fromkeys(self.call.roster, self.call)
        for stage in STAGES:  # a stage's answers are the argument of the method of its name
            found = getattr(self, stage)(ask(stage, found))
        total: Words = found
        return total

    def keys(self, answers: Mapping[str, Any]) -> dict[str, AllKeys]:
        """Take `SignedKeys`, and return all of them for each node."""
        self._keys = {
            name: keys
            for name, keys in answers.items()
            if type(keys) is SignedKeys and keys.name == name and are_keys(keys, self.call, self._identities)
        }
        self._need(self._keys, "sharing")
        every = AllKeys(tuple(self._keys[name] for name in sorted(self._keys)))
        return dict.fromkeys(self._keys, every)

    def shares(self, answers: Mapping[str, Any]) -> dict[str, Relayed]:
        """Take `Sealed`, and return for each node what the others sealed for it."""
        self._sealed = {name: one for name, one in answers.items() if self._is_sealed(name, one)}
        self._need(self._sealed, "masking")
        every = tuple(sorted(self._sealed))
        return {
            name: Relayed({other: self._sealed[other].shares[name] for other in sorted(self._near(name, every))}, every)
            for name in every
        }

    def _need(self, names: Collection[str], what: str) -> None:
        need(names, self.call, what, self._keys, self._smallest)

    def _near(self, name: str, among: Collection[str]) -> frozenset[str]:
        """Neighbours of a node."""
        return self.call.near(name).intersection(among) - {name}

    def _is_sealed(self, name: str, answer: Any) -> bool:
        return type(answer) is Sealed and name in self._keys and answer.shares.keys() == self._near(name, self._keys)

    def vectors(self, answers: Mapping[str, Any]) -> dict[str, Survivors]:
        """Take `Masked`, and return the list of survivors for each of them."""
        self._masked = {
            name: one.words
            for name, one in answers.items()
            if name in self._sealed and type(one) is Masked and len(one.words) == self.call.length
        }
        self._need(self._masked, "the sum")
        self.survivors = frozenset(self._masked)
        return dict.fromkeys(self._masked, Survivors(tuple(sorted(self.survivors))))

    def consents(self, answers: Mapping[str, Any]) -> dict[str, Consents]:
        """Take `Consent`, and return all signatures for each node that gave one."""
        content = consented(self.call, self._keys, frozenset(self._sealed), self.survivors)
        given = {
            name: one.signature
            for name, one in answers.items()
            if name in self.survivors
            and type(one) is Consent
            and is_signed(self._identities[name], one.signature, content)
        }
        need(given, self.call, "consent", self._keys, 0)
        return dict.fromkeys(given, Consents(given))

    def total(self, answers: Mapping[str, Any]) -> Words:
        """Take `Unmasking`, and return the survivors' sum modulo 2^64.

        Raises:
            Refusal: If a secret does not match its commitment or its public key: a node gave a wrong share.
        """
        lost = self._sealed.keys() - self.survivors
        given = {name: one for name, one in answers.items() if name in self.survivors and self._unmasks(name, one)}
        need(given, self.call, "unmasking", self._keys, 0)
        call, total = self.call, np.zeros(self.call.length, np.uint64)
        points = {name: call.roster.index(name) + 1 for name in given}
        held = {name: [one for one in given if one in call.near(name)] for name in self._sealed}
        for name in sorted(self.survivors):
            seed = self._recover(
                {points[one]: given[one].seeds[name] for one in held[name]},
                partial(commitment_of, call, name),
                self._sealed[name].commitment,
                f"the seed of node {name}",
            )
            total += self._masked[name] - stream(derive(seed, call.context, "self", name), call.length)
        for name in sorted(lost):
            private = X25519PrivateKey.from_private_bytes(
                self._recover(
                    {points[one]: given[one].keys[name] for one in held[name]},
                    _public,
                    self._keys[name].masking,
                    f"the key of node {name}",
                )
            )
            for other in self._near(name, self.survivors):
                mask = pair_mask(call, private, name, self._keys[other])
                total = total - mask if name > other else total + mask
        return total

    def _unmasks(self, name: str, answer: Any) -> bool:
        if type(answer) is not Unmasking:
            return False
        near = self.call.near(name) & self._sealed.keys()
        alive, lost = near & self.survivors, near - self.survivors
        inside = all(int.from_bytes(one) < PRIME for one in (*answer.seeds.values(), *answer.keys.values()))
        return inside and answer.seeds.keys() == alive and answer.keys.keys() == lost

    def _recover(self, shares: dict[int, bytes], seal: Callable[[bytes], bytes], sealed: bytes, what: str) -> bytes:
        """A secret from the first shares that give one whose seal, such as a public key, is as known."""
        for some in islice(combinations(sorted(shares.items()), self.call.least_shares), _MOST_SUBSETS):
            secret = combine({point: int.from_bytes(share) for point, share in some})
            if secret < 2 ** (8 * KEY_BYTES) and seal(found := secret.to_bytes(KEY_BYTES)) == sealed:
                return found
        raise Refusal(f"{what} does not follow from its shares: a node gave a wrong one, and this sum is lost")


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


STAGES: tuple[Stage, ...] = ("keys", "shares", "vectors", "consents", "total")
"""Methods of a `Coordinator` in their order; a node may be lost before each takes its answer."""

Deliver = Callable[[int, str, str, Callable[[], Any]], Any]
"""Calls a node's step and returns its answer, None where the node is lost: by attempt, stage and name."""


def deliver_all(attempt: int, stage: str, name: str, step: Callable[[], Any]) -> Any:
    """Deliver without losses."""
    return step()


def run_attempt(
    call: Invitation,
    parties: Mapping[str, Party],
    vectors: Mapping[str, Words],
    identities: Identities,
    deliver: Deliver,
) -> tuple[Words, frozenset[str]]:
    """Run one attempt over nodes in memory; returns the sum and the survivors."""
    server = Coordinator(call, identities)

    def step(name: str, message: Any) -> Any:
        return parties[name].begin(call, vectors[name]) if message is call else parties[name].answer(message)

    def ask(stage: Stage, messages: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: deliver(call.attempt, stage, name, partial(step, name, one)) for name, one in messages.items()}
        return {name: answer for name, answer in found.items() if answer is not None}

    return server.run(ask), server.survivors


def secure_sum(
    parties: Mapping[str, Party],
    vectors: Mapping[str, Words],
    identities: Identities,
    threshold: int,
    round_idx: int = 0,
    run: str = "",
    most_attempts: int = 3,
    deliver: Deliver = deliver_all,
    dishonest: int | None = None,
) -> tuple[Words, frozenset[str]]:
    """Sum the vectors of nodes in memory; a failed attempt is repeated with fresh keys.

    Args:
        parties: The nodes by name.
        vectors: Their vectors.
        identities: Public keys of their certificates.
        threshold: t, above two thirds of the nodes.
        round_idx: The round.
        run: The run's id; empty for a new one.
        most_attempts: Number of attempts before the sum is given up.
        deliver: Calls a node's step, and may lose its answer.
        dishonest: B, see `lit_fed.federation.secure.messages.Invitation`.

    Returns:
        The sum modulo 2^64, and the nodes whose vectors are in it.

    Raises:
        TooFew: If too few nodes were left in every attempt; `TooSmall` in the first one where too few have clients.
        Refusal: If a node refused, as it does where it has consented to a sum over other nodes.
    """
    run, roster = run or secrets.token_hex(8), tuple(sorted(parties))
    length = len(next(iter(vectors.values())))
    for attempt in range(most_attempts):
        call = Invitation(run, round_idx, attempt, roster, threshold, length, "", dishonest)
        try:
            return run_attempt(call, parties, vectors, identities, deliver)
        except TooSmall:
            raise
        except TooFew as error:
            last = error
    raise TooFew(f"round {round_idx} has no secure sum after {most_attempts} attempts: {last}")
