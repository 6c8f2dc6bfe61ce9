"""Masks: the published key stream, and keys that no two uses have in common."""

from __future__ import annotations

from itertools import product

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lit_fed.federation.secure.masks import agree, derive, stream

# RFC 8439, A.1, test vector 1: the key stream of key 0 and nonce 0 at block 0.
KEY_STREAM = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
)


def test_a_mask_is_the_key_stream_of_rfc_8439_in_little_endian_words() -> None:
    mask = stream(bytes(32), 8)
    assert mask.astype("<u8").tobytes() == KEY_STREAM
    assert stream(bytes(32), 3).tolist() == mask[:3].tolist()


def test_no_two_uses_have_one_key() -> None:
    secret, contexts = b"s" * 32, (b"a" * 32, b"b" * 32)
    uses = [("mask", "n0", "n1"), ("mask", "n0", "n2"), ("seal", "n0", "n1"), ("seal", "n1", "n0"), ("self", "n0")]
    keys = {derive(secret, context, use, *names) for context, (use, *names) in product(contexts, uses)}
    assert len(keys) == len(contexts) * len(uses)


def test_the_two_of_a_pair_have_one_secret() -> None:
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    public = [key.public_key().public_bytes_raw() for key in (one, other)]
    assert agree(one, public[1]) == agree(other, public[0])
