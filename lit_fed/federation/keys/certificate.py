"""The hash of a certificate's public key, by which the server knows a node."""

from __future__ import annotations

import hashlib


def key_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's public key, as ``openssl pkey -pubin -outform DER | sha256sum`` does.

    Raises:
        ValueError: If it is not a certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
