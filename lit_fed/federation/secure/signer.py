"""Keys with which nodes sign in secure sums, and their names, which are hashes of the public keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from lit_fed.federation.secure.messages import Refusal


@dataclass(frozen=True)
class Signer:
    """A node's key, and the nodes that it sums with.

    Args:
        key: The private key of the node's certificate; without TLS, one that is made at the start.
        peers: Names of the nodes that it sums with, itself included; None for any, whose keys the server tells.
    """

    key: EllipticCurvePrivateKey = field(default_factory=lambda: generate_private_key(SECP384R1()))
    peers: frozenset[str] | None = None

    @property
    def public(self) -> bytes:
        """The public key in DER."""
        return _der(self.key.public_key())

    @property
    def name(self) -> str:
        """SHA-256 of the public key, as of a certificate's in `lit_fed.federation.keys.node_keys.key_of`."""
        return hashlib.sha256(self.public).hexdigest()

    def peer_keys(self, keys: Mapping[str, str]) -> dict[str, EllipticCurvePublicKey]:
        """Return the public keys that a server tells, by name.

        Raises:
            Refusal: If one is malformed, has another name, or is of none of the peers.
        """
        found = {}
        for name, content in keys.items():
            other, key = public_key(content)
            if other != name:
                raise Refusal(f"the key of node {name} is another node's")
            if self.peers is not None and name not in self.peers:
                raise Refusal(f"node {name} is not in --peers of this node")
            found[name] = key
        return found


def public_key(content: str) -> tuple[str, EllipticCurvePublicKey]:
    """Return the name and the key of an untrusted public key in DER, as hexadecimal digits."""
    try:
        key = load_der_public_key(bytes.fromhex(content))
    except (ValueError, UnsupportedAlgorithm):
        raise Refusal("a node's public key is malformed") from None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise Refusal("a node's public key is not on P-384")
    return hashlib.sha256(_der(key)).hexdigest(), key


def _der(key: EllipticCurvePublicKey) -> bytes:
    content: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return content
