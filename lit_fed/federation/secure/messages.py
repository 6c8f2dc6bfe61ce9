"""Messages of the protocol as plain objects, and the checks of those that came from elsewhere.

A node knows a *name* for each other node, and the public key of its certificate. What a server sends beyond that is
untrusted; so is what a node sends to the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from typing_extensions import override

from lit_fed.errors import LitFedError
from lit_fed.federation.secure.masks import Words

MOST_NODES = 1000
MOST_LENGTH = 2**32
"""Words of a vector; ChaCha20's counter of 32 bits reaches eight times further."""


class Refusal(LitFedError):
    """A step that a node or the server does not take, because the other end broke the protocol."""

    status = 1

    @override
    def remote_text(self) -> str:
        return str(self)  # stages, and names of nodes


class TooFew(Refusal):
    """Fewer nodes than the threshold are left; the sum of this attempt is lost."""


class TooSmall(TooFew):
    """Fewer nodes with clients are left than a sum must have."""


@dataclass(frozen=True)
class Invitation:
    """What an attempt is about; the server sends it first.

    Args:
        run: The run's id.
        round_idx: The round.
        attempt: Above those of all earlier attempts of the round.
        roster: Names of the nodes, sorted.
        threshold: t, the number of nodes without which nothing is unmasked.
        length: Words of a vector.
        about: What is summed: a hash of the model that clients worked with, and of the coordinates' names.
        dishonest: B, the number of nodes on the server's side that the sum bears; None for 2t - n - 1.
    """

    run: str
    round_idx: int
    attempt: int
    roster: tuple[str, ...]
    threshold: int
    length: int
    about: str = ""
    dishonest: int | None = None

    @property
    def context(self) -> bytes:
        """Hash over all fields, in every signature and every derived key."""
        return digest("call", *astuple(self))

    def near(self, name: str) -> frozenset[str]:
        """A node and its neighbours, among whom it shares its secrets, and with each of whom it has a mask.

        On the ring of the roster they are the max(2 (n - t), n - t + 1) + B next ones, as many on either side, so that
        a neighbourhood has more than B nodes beside two sets of n - t lost ones, and a ring without n - t + B nodes is
        connected (Harary 1962): both hold wherever these nodes are. With B = 2t - n - 1 they are all nodes.
        """
        nodes, lost = len(self.roster), len(self.roster) - self.threshold
        degree = nodes if self.dishonest is None else max(2 * lost, lost + 1) + self.dishonest
        side, place = min(-(-degree // 2), nodes // 2), self.roster.index(name)
        return frozenset(self.roster[(place + step) % nodes] for step in range(-side, side + 1))

    @property
    def least_shares(self) -> int:
        """Shares that give a secret back: all of a neighbourhood but n - t."""
        return len(self.near(self.roster[0])) - len(self.roster) + self.threshold

    def check(self) -> None:
        """Refuse fields of another type, and a roster or a threshold that protects nobody."""
        numbers = (self.round_idx, self.attempt, self.threshold, self.length)
        if (
            type(self.run) is not str
            or type(self.about) is not str
            or any(type(one) is not int or one < 0 for one in numbers)
            or type(self.dishonest) not in (int, type(None))
        ):
            raise Refusal("the call of the secure sum is malformed")
        names_of(self.roster, "roster")
        if not 0 < self.length <= MOST_LENGTH:
            raise Refusal(f"the call of the secure sum has vectors of {self.length} words")
        if list(self.roster) != sorted(self.roster):
            raise Refusal("the roster of the secure sum is not sorted")
        if not 2 * len(self.roster) < 3 * self.threshold <= 3 * len(self.roster):
            raise Refusal(
                f"the threshold is {self.threshold} of {len(self.roster)} nodes; against an active server it must be "
                "above two thirds of them"
            )
        if self.dishonest is not None and not 0 <= self.dishonest < 2 * self.threshold - len(self.roster):
            raise Refusal(f"{self.dishonest} dishonest nodes are more than {self.threshold} of {len(self.roster)} bear")


@dataclass(frozen=True)
class SignedKeys:
    """A node's keys of one attempt, signed with its certificate's key.

    Args:
        name: The node.
        masking: X25519 public key, from which masks follow.
        sealing: X25519 public key, with which shares are sealed.
        clients: Number of the node's clients in its vector.
        signature: Over all of them and the call.
    """

    name: str
    masking: bytes
    sealing: bytes
    clients: int
    signature: bytes

    def signed(self, call: Invitation) -> bytes:
        """What the signature covers."""
        return digest("keys", call.context, self.name, self.masking, self.sealing, self.clients)


@dataclass(frozen=True)
class AllKeys:
    """The keys of all nodes that answered the call."""

    keys: tuple[SignedKeys, ...]


@dataclass(frozen=True)
class Sealed:
    """A node's shares, sealed for each neighbour by name, and the commitment to its own mask's seed."""

    shares: Mapping[str, bytes]
    commitment: bytes


@dataclass(frozen=True)
class Relayed:
    """Shares sealed for one node, by the neighbour that they are of, and all nodes that shared."""

    shares: Mapping[str, bytes]
    sharing: tuple[str, ...]


@dataclass(frozen=True)
class Masked:
    """A node's vector under its masks."""

    words: Words


@dataclass(frozen=True)
class Survivors:
    """The nodes whose vectors arrived."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Consent:
    """A node's signature over the survivors, and over all that it has seen of the attempt before."""

    signature: bytes


@dataclass(frozen=True)
class Consents:
    """Signatures of survivors by name."""

    signatures: Mapping[str, bytes]


@dataclass(frozen=True)
class Unmasking:
    """Shares that a node gives: of survivors' seeds, and of lost nodes' masking keys; never both of one node."""

    seeds: Mapping[str, int]
    keys: Mapping[str, int]


ToServer = SignedKeys | Sealed | Masked | Consent | Unmasking


def digest(*parts: Any) -> bytes:
    """SHA-256 of texts, numbers, bytes and lists of them, no two lists of which run together."""
    text = json.dumps(parts, default=bytes.hex, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def names_of(names: Any, what: str, among: Collection[str] | None = None) -> frozenset[str]:
    """Return a list of nodes as a set; refuse other types, a name that stands twice, and names beyond some."""
    if type(names) is not tuple or len(names) > MOST_NODES or any(type(name) is not str for name in names):
        raise Refusal(f"the {what} of the secure sum is malformed")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Refusal(f"the {what} of the secure sum names node {twice} twice")
    if among is not None and (odd := sorted(set(names) - set(among))):
        raise Refusal(f"the {what} of the secure sum names node {odd[0]}, which does not belong there")
    return frozenset(names)


def is_bytes(value: Any, length: int | None = None) -> bool:
    """Whether a value is bytes, of one length or of at most a kilobyte."""
    return type(value) is bytes and (len(value) <= 1024 if length is None else len(value) == length)


def entries(value: Any, what: str, of: type, among: Collection[str]) -> dict[str, Any]:
    """Return a mapping from nodes; refuse other types of keys or values, and nodes beyond some."""
    if not isinstance(value, Mapping) or any(type(one) is not of for one in value.values()):
        raise Refusal(f"the {what} of the secure sum are malformed")
    names_of(tuple(value), what, among)
    return dict(value)
