"""Keys with which nodes sign in secure sums, and their names, which are hashes of the public keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from lit_fed.errors import ConfigError
from lit_fed.federation.secure.messages import Refusal

_HASH = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 2**20


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
        """SHA-256 of the public key, as of a certificate's in `lit_fed.federation.transport.security.key_of`."""
        return hashlib.sha256(self.public).hexdigest()

    def known(self, told: Mapping[str, str]) -> dict[str, EllipticCurvePublicKey]:
        """Return the public keys that a server tells, by name.

        Raises:
            Refusal: If one is malformed, has another name, or is of none of the peers.
        """
        found = {}
        for name, content in told.items():
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


def read_peers(path: str) -> frozenset[str]:
    """Read the names of a node's peers, one a line, with comments after ``#``; raise `ConfigError`."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file.read(_MOST_BYTES).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--peers {Path(path)} cannot be read ({type(error).__name__}); correct the path") from error
    if odd := next((line for line in lines if line and not _HASH.fullmatch(line)), None):
        raise ConfigError(f"--peers {path} has {odd[:40]!r}; write the SHA-256 of a public key, in 64 hex digits")
    return frozenset(line for line in lines if line)
