"""Nodes' keys (ECDSA over P-384, as ``ssh-keygen -t ecdsa -b 384`` makes them) and signatures of requests."""

from __future__ import annotations

import base64
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lit_fed.deployment import fleet
from lit_fed.errors import ConfigError

_MAKE = "make one by ssh-keygen -t ecdsa -b 384 -N '' -f FILE"


def read_public_key(path: Path, option: str) -> bytes:
    """Read a public key in OpenSSH format from a file that ``option`` gave, and convert it to Flower's wire format.

    Raises:
        ConfigError: If the file is not a public key on P-384.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        return sent(serialization.load_ssh_public_key(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except Exception as error:  # cryptography raises many exceptions for malformed keys
        raise ConfigError(f"{option} {path} is not a public ECDSA key with 384 bits; {_MAKE}") from error


def sent(public: Any) -> bytes:
    """Serialise a public key in Flower's wire format; raise `ValueError` if the key is not on P-384."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
        raise ValueError("not a key on P-384")  # noqa: TRY004  # the content of a file, not an argument's type
    found: bytes = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def loaded(key: bytes) -> Any:
    """Parse a public key in Flower's wire format; raise `ValueError` if the key is malformed or not on P-384."""
    from cryptography.hazmat.primitives import serialization

    try:
        public = serialization.load_pem_public_key(key)
        sent(public)
    except Exception as error:  # cryptography raises many exceptions for malformed keys
        raise ValueError("not a key") from error
    return public


def is_signed(public: Any, stamp: bytes, signature: bytes) -> bool:
    """Whether a time stamp's signature is by the owner of a public key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public.verify(signature, stamp, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


class Signer:
    """Signs requests' time stamps, as Flower's nodes do.

    Args:
        path: The private key; without it, a new key, which only shows that requests come from one node.

    Raises:
        ConfigError: If the file is not a private key on P-384, or has a password.
    """

    def __init__(self, path: str | None) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if path is None:
            self._private: Any = ec.generate_private_key(ec.SECP384R1())
        else:
            try:
                self._private = serialization.load_ssh_private_key(Path(path).read_bytes(), None)
                sent(self._private.public_key())
            except OSError as error:
                raise ConfigError(f"--key {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
            except Exception as error:  # cryptography raises many exceptions for malformed keys
                raise ConfigError(
                    f"--key {path} is not a private ECDSA key with 384 bits and without a password; {_MAKE}"
                ) from error
        self.public = sent(self._private.public_key())
        self._last = datetime.fromtimestamp(0, UTC)
        self._lock = threading.Lock()

    def headers(self) -> dict[str, str]:
        """Return the headers of one request, with a time stamp that was never used before."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        with self._lock:
            self._last = max(datetime.now(UTC), self._last + timedelta(microseconds=1))
            stamp = self._last.isoformat()
        signature = self._private.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            fleet.KEY: base64.b64encode(self.public).decode(),
            fleet.TIMESTAMP: stamp,
            fleet.SIGNATURE: base64.b64encode(signature).decode(),
        }
