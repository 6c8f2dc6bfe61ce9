"""Messages of the protocol as plain objects, and the checks of those that came from elsewhere.

A node knows a *name* for each other node, and the public key of its certificate. What a server sends beyond that is
untrusted; so is what a node sends to the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any

from msgspec import Meta
from typing_extensions import override

from lit_fed.errors import LitFedError
from lit_fed.federation.secure.masks import KEY_BYTES, Words
from lit_fed.federation.secure.shamir import SHARE_BYTES

MOST_NODES = 1000
MOST_LENGTH = 2**32
"""Words of a vector; ChaCha20's counter of 32 bits reaches eight times further."""
_MOST = Meta(max_length=MOST_NODES)
Whole = Annotated[int, Meta(ge=0)]
Names = Annotated[tuple[str, ...], _MOST]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Brief = Annotated[bytes, Meta(max_length=1024)]
"""A signature, or sealed shares."""
Shares = Annotated[Mapping[str, Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]], _MOST]
ByName = Annotated[Mapping[str, Brief], _MOST]


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
    round_idx: Whole
    attempt: Whole
    roster: Names
    threshold: Whole
    length: Whole
    about: str
    dishonest: int | None

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
        """Refuse a roster or a threshold that protects nobody."""
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
    masking: Key
    sealing: Key
    clients: Annotated[int, Meta(ge=0, lt=2**31)]
    signature: Brief

    def signed(self, call: Invitation) -> bytes:
        """What the signature covers."""
        return digest("keys", call.context, self.name, self.masking, self.sealing, self.clients)


@dataclass(frozen=True)
class AllKeys:
    """The keys of all nodes that answered the call."""

    keys: Annotated[tuple[SignedKeys, ...], _MOST]


@dataclass(frozen=True)
class Sealed:
    """A node's shares, sealed for each neighbour by name, and the commitment to its own mask's seed."""

    shares: ByName
    commitment: Key


@dataclass(frozen=True)
class Relayed:
    """Shares sealed for one node, by the neighbour that they are of, and all nodes that shared."""

    shares: ByName
    sharing: Names


@dataclass(frozen=True)
class Masked:
    """A node's vector under its masks."""

    words: Words


@dataclass(frozen=True)
class Survivors:
    """The nodes whose vectors arrived."""

    names: Names


@dataclass(frozen=True)
class Consent:
    """A node's signature over the survivors, and over all that it has seen of the attempt before."""

    signature: Brief


@dataclass(frozen=True)
class Consents:
    """Signatures of survivors by name."""

    signatures: ByName


@dataclass(frozen=True)
class Unmasking:
    """Shares that a node gives: of survivors' seeds, and of lost nodes' masking keys; never both of one node."""

    seeds: Shares
    keys: Shares


ToServer = SignedKeys | Sealed | Masked | Consent | Unmasking


def digest(*parts: Any) -> bytes:
    """SHA-256 of texts, numbers, bytes and lists of them, no two lists of which run together."""
    text = json.dumps(parts, default=bytes.hex, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def names_of(names: Sequence[str], what: str, among: Collection[str] | None = None) -> frozenset[str]:
    """Return a list of nodes as a set; refuse a name that stands twice, and names beyond some."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Refusal(f"the {what} of the secure sum names node {twice} twice")
    if among is not None and (odd := sorted(set(names) - set(among))):
        raise Refusal(f"the {what} of the secure sum names node {odd[0]}, which does not belong there")
    return frozenset(names)
