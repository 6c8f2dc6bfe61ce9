"""SHA-256 of public keys, by which nodes are known."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from lit_fed.errors import ConfigError

_HASH = re.compile("[0-9a-f]{64}")


def key_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's public key, as ``openssl pkey -pubin -outform DER | sha256sum`` does.

    Raises:
        ValueError: If it is not a certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_hashes(path: str | Path, option: str) -> frozenset[str]:
    """Read the file of an option that lists keys, one a line, with comments after ``#``; raise `ConfigError`."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {Path(path)} cannot be read ({type(error).__name__}); correct the path") from error
    if odd := next((line for line in lines if line and not _HASH.fullmatch(line)), None):
        raise ConfigError(f"{option} {path} has {odd[:40]!r}; write the SHA-256 of a public key, in 64 hex digits")
    return frozenset(line for line in lines if line)
