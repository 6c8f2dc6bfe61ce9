"""Keys of pairs of nodes, and masks modulo 2^64 from them."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from lit_fed.seeding import key_stream

Words = NDArray[np.uint64]
"""A vector modulo 2^64."""

KEY_BYTES = 32


def derive(secret: bytes, context: bytes, use: str, *names: str) -> bytes:
    """Derive a key of 32 bytes for one use by HKDF-SHA256.

    Args:
        secret: The key material.
        context: Hash of the attempt that the key is for; see `lit_fed.federation.secure.messages.Invitation.context`.
        use: The key's use.
        names: The nodes that the key is for.
    """
    info = b"\0".join([b"lit_fed secure sum 1", use.encode(), *(name.encode() for name in names)])
    return HKDF(SHA256(), KEY_BYTES, salt=context, info=info).derive(secret)


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret that two keys have in common; raise `ValueError` for a point of small order."""
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def stream(key: bytes, length: int) -> Words:
    """Return a mask: the first words of a key's stream."""
    return key_stream(key)(length)
