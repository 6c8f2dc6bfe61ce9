"""A node's half of the protocol: what it sends, and what it refuses.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, Figure 4 with the steps against an active server.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256

from lit_fed.federation.secure.masks import KEY_BYTES, Words, agree, derive, stream
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
    ToServer,
    Unmasking,
    digest,
    names_of,
)
from lit_fed.federation.secure.shamir import PRIME, SHARE_BYTES, split
from lit_fed.federation.secure.sum_log import LoggedRound, SumLog

Identities = Mapping[str, EllipticCurvePublicKey]
"""Public keys of the nodes' certificates by name: they must not come from the server of the sum."""

_MOST_ROUNDS = 2**17


def is_signed(identity: EllipticCurvePublicKey, signature: bytes, content: bytes) -> bool:
    """Whether a node signed a content."""
    try:
        identity.verify(signature, content, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def are_keys(keys: SignedKeys, call: Invitation, identities: Identities) -> bool:
    """Whether a message holds a node's keys, signed for this attempt."""
    return keys.name in call.roster and is_signed(identities[keys.name], keys.signature, keys.signed(call))


def commitment_of(call: Invitation, name: str, seed: bytes) -> bytes:
    """The hash by which the server recognises a node's seed."""
    return digest("seed", call.context, name, seed)


def consented(
    call: Invitation, keys: Mapping[str, SignedKeys], sharing: frozenset[str], survivors: frozenset[str]
) -> bytes:
    """What a consent signs: the attempt, all keys and numbers of clients, the nodes that shared, and the survivors."""
    seen = [[name, keys[name].masking, keys[name].sealing, keys[name].clients] for name in sorted(keys)]
    return digest("survivors", call.context, seen, sorted(sharing), sorted(survivors))


def need(names: Collection[str], call: Invitation, what: str, keys: Mapping[str, SignedKeys], smallest: int) -> None:
    """Refuse fewer nodes than the threshold, or fewer with clients than a sum must have."""
    if len(names) < call.threshold:
        raise TooFew(f"{len(names)} of {len(call.roster)} nodes are left for {what}, and {call.threshold} are needed")
    if (count := sum(keys[name].clients > 0 for name in names)) < smallest:
        raise TooSmall(f"{count} of {len(names)} nodes that are left for {what} have clients, and {smallest} must")


@dataclass
class _Attempt:
    """A node's secrets of one attempt."""

    call: Invitation
    words: Words
    request: bytes
    logged: LoggedRound
    next: type = AllKeys
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    sealing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    keys: dict[str, SignedKeys] = field(default_factory=dict)
    shares: dict[str, tuple[int, int]] = field(default_factory=dict)  # of masking key and seed, by neighbour
    sharing: frozenset[str] = frozenset()
    survivors: frozenset[str] = frozenset()


class Party:
    """A node in secure sums; a refusal ends the attempt, and its keys are forgotten.

    Args:
        name: Its name.
        key: Its certificate's private key.
        identities: All nodes that it knows, itself included.
        smallest: Least number of nodes with clients in a sum; 0 where noise hides each node's vector.
        given: Its memory of rounds; None for one of this object.
        clients: Number of its clients in the vector of the attempt that begins next.

    Note:
        Two sums of one round over different survivors, or of different vectors, differ by single nodes' vectors. A node
        that has consented to a sum of a round does so again for the same survivors and request alone, as a server asks
        that was killed before it kept the sum, and with the vector that it gave before, whatever its own is now.
    """

    def __init__(
        self,
        name: str,
        key: EllipticCurvePrivateKey,
        identities: Identities,
        smallest: int = 3,
        given: SumLog | None = None,
        clients: int = 1,
    ) -> None:
        self.name, self.smallest, self.clients = name, smallest, clients
        self.identities = identities
        self._key, self._given = key, given or SumLog()
        self._attempt: _Attempt | None = None
        self._rounds = self._given.rounds

    def earlier_vector(self, call: Invitation, request: bytes) -> Words | None:
        """The vector that this node gave to the round; None if it gave none.

        Args:
            call: The server's.
            request: Digest of what the server asks for.

        Raises:
            Refusal: If the vector was for another request, or is not here any more.
        """
        known = self._rounds.get((call.run, call.round_idx), LoggedRound())
        if known.request is None:
            return None
        if known.request != request:
            raise Refusal(
                f"round {call.round_idx} got this node's vector before, for another model, clients or metrics; a "
                "second sum would tell of single nodes"
            )
        if (words := self._given.words(call.run, call.round_idx, request)) is None:
            raise Refusal(f"this node no longer has the vector that it gave to round {call.round_idx}; begin a new run")
        return words

    def begin(self, call: Invitation, words: Words, request: bytes = b"") -> SignedKeys:
        """Answer a call with fresh, signed keys.

        Args:
            call: The server's; untrusted.
            words: This node's vector.
            request: Digest of what the server asks for.
        """
        self._attempt = None
        call.check()
        roster = names_of(call.roster, "roster", self.identities)
        if self.name not in roster:
            raise Refusal(f"the roster of the secure sum lacks node {self.name}, which it is sent to")
        if len(roster) < self.smallest:
            raise Refusal(f"the roster has {len(roster)} nodes, and this node's sums are over at least {self.smallest}")
        if len(words) != call.length:
            raise Refusal(f"the call has vectors of {call.length} words, and this node has {len(words)}")
        before, earlier = self._enter(call), self.earlier_vector(call, request)
        self._attempt = own = _Attempt(call, words if earlier is None else earlier, request, before)
        masking, sealing = (one.public_key().public_bytes_raw() for one in (own.masking, own.sealing))
        unsigned = SignedKeys(self.name, masking, sealing, self.clients, b"")
        own.keys[self.name] = keys = replace(unsigned, signature=self._sign(unsigned.signed(call)))
        return keys

    def _enter(self, call: Invitation) -> LoggedRound:
        """Refuse an attempt that is not later than the last."""
        key = (call.run, call.round_idx)
        if key not in self._rounds and len(self._rounds) >= _MOST_ROUNDS:
            raise Refusal(
                f"this node took part in {_MOST_ROUNDS} secure sums; restart it, or give it a new --state_dir, for more"
            )
        known = self._rounds.setdefault(key, LoggedRound())
        if known.attempt >= call.attempt:
            raise Refusal(f"attempt {call.attempt} of round {call.round_idx} is not later than the last one")
        known.attempt = call.attempt
        return known

    def forget(self) -> None:
        """End the attempt."""
        self._attempt = None

    def answer(self, message: Any) -> ToServer:
        """Answer the server's next message; any other ends the attempt.

        Raises:
            Refusal: If the server broke the protocol, or too few nodes are left.
        """
        own, self._attempt = self._attempt, None
        if own is None:
            raise Refusal("no attempt of a secure sum is under way on this node")
        if type(message) is not own.next:
            raise Refusal(f"{type(message).__name__} came out of turn; the next message is {own.next.__name__}")
        steps: dict[type, tuple[Callable[[_Attempt, Any], ToServer], type | None]] = {
            AllKeys: (self._share, Relayed),
            Relayed: (self._mask, Survivors),
            Survivors: (self._consent, Consents),
            Consents: (self._unmask, None),
        }
        step, following = steps[own.next]
        answer = step(own, message)
        if following is not None:
            own.next, self._attempt = following, own
        return answer

    def _share(self, own: _Attempt, message: AllKeys) -> Sealed:
        """Seal shares of this node's secrets for every neighbour whose keys are signed."""
        call = own.call
        names_of(tuple(keys.name for keys in message.keys), "list of keys", call.roster)
        if odd := [keys.name for keys in message.keys if not are_keys(keys, call, self.identities)]:
            raise Refusal(f"the keys of node {odd[0]} are not signed by it for this attempt")
        given = {keys.name: keys for keys in message.keys}
        if given.get(self.name) != own.keys[self.name]:
            raise Refusal(f"the keys of node {self.name} are not those that it sent")
        public = [key for keys in message.keys for key in (keys.masking, keys.sealing)]
        if len(set(public)) < len(public):
            raise Refusal("two nodes have one key in this attempt")
        need(given, call, "sharing", given, self.smallest)
        own.keys = given
        points = {name: call.roster.index(name) + 1 for name in call.near(self.name).intersection(given)}
        of_key = split(int.from_bytes(own.masking.private_bytes_raw()), call.least_shares, points.values())
        of_seed = split(int.from_bytes(own.seed), call.least_shares, points.values())
        own.shares[self.name] = (of_key[points[self.name]], of_seed[points[self.name]])
        sealed = {
            name: self._cipher(own, name, self.name, name).encrypt(
                bytes(12), of_key[point].to_bytes(SHARE_BYTES) + of_seed[point].to_bytes(SHARE_BYTES), None
            )
            for name, point in points.items()
            if name != self.name
        }
        return Sealed(sealed, commitment_of(call, self.name, own.seed))

    def _cipher(self, own: _Attempt, other: str, sender: str, receiver: str) -> ChaCha20Poly1305:
        """The cipher of one message between two nodes; its key is used once, with nonce 0."""
        secret = _agree(own.sealing, own.keys[other].sealing, other)
        return ChaCha20Poly1305(derive(secret, own.call.context, "seal", sender, receiver))

    def _mask(self, own: _Attempt, message: Relayed) -> Masked:
        """Open the shares of others, and send the vector under all masks."""
        call = own.call
        relayed = message.shares
        names_of(tuple(relayed), "shares", own.keys.keys() - {self.name})
        own.sharing = names_of(message.sharing, "list of nodes that shared", own.keys)
        if relayed.keys() | {self.name} != own.sharing & call.near(self.name):
            raise Refusal("the shares of the secure sum are not those of the neighbours that shared")
        need(own.sharing, call, "masking", own.keys, self.smallest)
        for name, content in relayed.items():
            try:
                plain = self._cipher(own, name, name, self.name).decrypt(bytes(12), content, None)
            except InvalidTag:
                raise Refusal(f"the shares of node {name} are not sealed by it for this attempt") from None
            parts = [int.from_bytes(plain[:SHARE_BYTES]), int.from_bytes(plain[SHARE_BYTES:])]
            if len(plain) != 2 * SHARE_BYTES or max(parts) >= PRIME:
                raise Refusal(f"the shares of node {name} are malformed")
            own.shares[name] = (parts[0], parts[1])
        total = own.words + stream(derive(own.seed, call.context, "self", self.name), call.length)
        for name in relayed:
            mask = pair_mask(call, own.masking, self.name, own.keys[name])
            total = total + mask if name > self.name else total - mask
        return Masked(total)

    def _consent(self, own: _Attempt, message: Survivors) -> Consent:
        """Sign the list of survivors, and remember it before the signature leaves."""
        survivors = names_of(message.names, "list of survivors", own.sharing)
        if self.name not in survivors:
            raise Refusal(f"the list of survivors lacks node {self.name}, which sent its vector")
        need(survivors, own.call, "the sum", own.keys, self.smallest)
        call, known, content = own.call, own.logged, digest("survivors", sorted(survivors))
        if known.survivors not in (b"", content):
            raise Refusal(
                f"this node consented to a sum of round {call.round_idx} over other nodes; a second sum would tell of "
                "single nodes"
            )
        if not known.survivors:
            self._given.note(call.run, call.round_idx, own.request, content, own.words)
        own.survivors = survivors
        return Consent(self._sign(consented(own.call, own.keys, own.sharing, survivors)))

    def _unmask(self, own: _Attempt, message: Consents) -> Unmasking:
        """Give a share of each neighbour: of its seed if it survived, else of its masking key."""
        signatures = message.signatures
        names_of(tuple(signatures), "consents", own.survivors)
        content = consented(own.call, own.keys, own.sharing, own.survivors)
        for name, signature in signatures.items():
            if not is_signed(self.identities[name], signature, content):
                raise Refusal(f"node {name} did not sign this list of survivors")
        need(signatures, own.call, "consent", own.keys, 0)
        return Unmasking(
            seeds={name: seed.to_bytes(SHARE_BYTES) for name, (_, seed) in own.shares.items() if name in own.survivors},
            keys={
                name: key.to_bytes(SHARE_BYTES) for name, (key, _) in own.shares.items() if name not in own.survivors
            },
        )

    def _sign(self, content: bytes) -> bytes:
        return self._key.sign(content, ECDSA(SHA256()))


def pair_mask(call: Invitation, private: X25519PrivateKey, name: str, other: SignedKeys) -> Words:
    """The mask that two nodes have in common: the one with the lower name adds it, the other subtracts it."""
    secret = _agree(private, other.masking, other.name)
    return stream(derive(secret, call.context, "mask", *sorted((name, other.name))), call.length)


def _agree(private: X25519PrivateKey, public: bytes, name: str) -> bytes:
    try:
        return agree(private, public)
    except ValueError:
        raise Refusal(f"the key of node {name} is a point of small order") from None
