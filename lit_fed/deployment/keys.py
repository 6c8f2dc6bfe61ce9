"""Nodes' keys: ECDSA over P-384, as ``ssh-keygen -t ecdsa -b 384`` makes them, and what each signs."""

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
    """A public key, as Flower sends it.

    Args:
        path: In OpenSSH's format.
        option: Where it was given.

    Raises:
        ConfigError: If it is none, or of another kind.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        return sent(serialization.load_ssh_public_key(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except Exception as error:  # cryptography has many for what is no key
        raise ConfigError(f"{option} {path} is no public key of ECDSA with 384 bits; {_MAKE}") from error


def sent(public: Any) -> bytes:
    """A public key as Flower sends it.

    Raises:
        ValueError: If it is of another kind.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
        raise ValueError("another kind of key")  # noqa: TRY004  # what is read is no argument of a wrong type
    found: bytes = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def loaded(key: bytes) -> Any:
    """A public key of those that Flower sends.

    Raises:
        ValueError: If it is none.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        public = serialization.load_pem_public_key(key)
        sent(public)
    except Exception as error:  # cryptography has many for what is no key
        raise ValueError("no key") from error
    return public


def is_signed(public: Any, stamp: bytes, signature: bytes) -> bool:
    """Whether a time was signed by who has a key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        public.verify(signature, stamp, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


class Signer:
    """Signs the time of a request, as Flower's nodes do.

    Args:
        path: The private key; a new one without it, which proves nothing but that requests come from one node.

    Raises:
        ConfigError: If there is no key in it, or it needs a password.
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
            except Exception as error:  # cryptography has many for what is no key
                raise ConfigError(
                    f"--key {path} is no private key of ECDSA with 384 bits and without a password; {_MAKE}"
                ) from error
        self.public = sent(self._private.public_key())
        self._last = datetime.fromtimestamp(0, UTC)
        self._lock = threading.Lock()

    def headers(self) -> dict[str, str]:
        """Of one request: the server takes no time twice."""
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
