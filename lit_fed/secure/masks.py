"""Keys of pairs of nodes, and masks modulo 2^64 from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""A vector modulo 2^64."""

KEY_BYTES = 32


def derive(secret: bytes, context: bytes, use: str, *names: str) -> bytes:
    """Derive a key of 32 bytes for one use by HKDF-SHA256.

    Args:
        secret: The key material.
        context: Hash of the attempt that the key is for; see `lit_fed.secure.messages.Invitation.context`.
        use: The key's use.
        names: The nodes that the key is for.
    """
    info = b"\0".join([b"lit_fed secure sum 1", use.encode(), *(name.encode() for name in names)])
    return HKDF(SHA256(), KEY_BYTES, salt=context, info=info).derive(secret)


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret that two keys have in common; raise `ValueError` for a point of small order."""
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def words_of(key: bytes) -> Callable[[int], Words]:
    """Return the key stream of ChaCha20 (RFC 8439) from block 0, as a function that gives the next words of 64 bits.

    The nonce is 0: no key is used twice.
    """
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda count: np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def stream(key: bytes, length: int) -> Words:
    """Return a mask: the first words of a key's stream."""
    return words_of(key)(length)
