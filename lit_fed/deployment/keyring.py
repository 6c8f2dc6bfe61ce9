"""The keys of a federation on disk: made where there is none, kept where there is one, made anew on request."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509 import Certificate

from lit_fed.deployment import authority
from lit_fed.engine.files import in_place_of
from lit_fed.errors import ConfigError

AUTHORITY, SERVER, SITES, KEYS = "authority", "server", "sites", "keys"
"""Folders of the authority, the server, the sites, and in the server's of the sites' public keys."""


@dataclass
class Keyring:
    """All keys and certificates below one folder.

    A private key that is there is never written over unasked. One that is not, because it was moved to where it is
    used, is not missed as long as its public key, or its certificate, is there.

    Args:
        folder: Of all of them.
        names: Host names and addresses of the server.
        now: The time.
        anew: Whose keys are made anew: sites, and the server.
    """

    folder: Path
    names: tuple[str, ...]
    now: datetime
    anew: Collection[str] = ()

    def authority(self) -> str:
        """Make what is missing of the authority; what was done, in words.

        Raises:
            ConfigError: If a file is not what it should be, or the authority's key is needed and not here.
        """
        key, certificate = self.folder / AUTHORITY / "ca.key", self._ca
        if not key.exists() and not certificate.exists():
            made = authority.new_key()
            _write_key(key, authority.pem_of(made))
            done = "new key"
        else:
            done = "key kept" + _only_ours(key)
        if certificate.exists():
            found = authority.read_certificate(certificate)
            if key.exists() and authority.read_key(key).public_key() != found.public_key():
                raise ConfigError(f"{key} and {certificate} do not go together; put back the one that is lost")
            if found.not_valid_after_utc >= self.now + authority.SERVER_LIFE:
                return f"{done}, certificate kept until {found.not_valid_after_utc:%Y-%m-%d}"
        made = authority.certify_authority(self._authority_key(), self.now)
        write(certificate, authority.certificate_bytes(made))
        return f"{done}, new certificate until {made.not_valid_after_utc:%Y-%m-%d}"

    def server(self) -> str:
        """Make what is missing of the server's key and certificate, or near its end; what was done, in words.

        Raises:
            ConfigError: If a file is not what it should be, or the authority's key is needed and not here.
        """
        key, path = self.folder / SERVER / "server.key", self.folder / SERVER / "server.crt"
        found = authority.read_certificate(path) if path.exists() else None
        public: EllipticCurvePublicKey
        if SERVER in self.anew or (found is None and not key.exists()):
            made = authority.new_key()
            _write_key(key, authority.pem_of(made))
            done, public = "new key", made.public_key()
        elif key.exists():
            done, public = "key kept" + _only_ours(key), authority.read_key(key).public_key()
        else:
            assert found is not None
            done, public = "key kept (it is not in this folder)", _public_of(found, path)
        ca = authority.read_certificate(self._ca)
        why = authority.unfit(found, ca, public, self.names, self.now) if found is not None else "there was none"
        if found is not None and not why:
            return f"{done}, certificate kept until {found.not_valid_after_utc:%Y-%m-%d}"
        signed = authority.certify_server(self._authority_key(), ca, public, self.names, self.now)
        write(path, authority.certificate_bytes(signed))
        return f"{done}, new certificate until {signed.not_valid_after_utc:%Y-%m-%d}: {why}"

    def site(self, name: str) -> str:
        """Make a site's key if it has none; what was done, in words.

        Raises:
            ConfigError: If a file is not what it should be, or the two halves do not go together.
        """
        private, public = self.folder / SITES / name / "node.key", self.folder / SERVER / KEYS / f"{name}.pub"
        if name in self.anew or not (private.exists() or public.exists()):
            made = authority.new_key()
            _write_key(private, authority.openssh_of(made))
            write(public, authority.public_line(made.public_key(), name))
            return "new key"
        if not private.exists():
            authority.read_public(public)
            return "key kept (it is not in this folder)"
        done, key = "key kept" + _only_ours(private), authority.read_key(private).public_key()
        if public.exists() and authority.read_public(public) != key:
            raise ConfigError(
                f"{private} and {public} do not go together; put back the one that is lost, or make others with "
                f"--new_key {name}"
            )
        if not public.exists():
            write(public, authority.public_line(key, name))
        return done

    @property
    def _ca(self) -> Path:
        return self.folder / AUTHORITY / "ca.crt"

    def _authority_key(self) -> EllipticCurvePrivateKey:
        path = self.folder / AUTHORITY / "ca.key"
        if not path.exists():
            raise ConfigError(f"{path} is needed to sign a certificate, and not there; bring it back for this command")
        return authority.read_key(path)


def _public_of(certificate: Certificate, path: Path) -> EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(f"{path} is for a key of another kind; make a new one with --new_key {SERVER}")
    return key


def _only_ours(path: Path) -> str:
    """Close a private key to others, where it is open to them; what was done, in words."""
    if not path.exists():
        return " (it is not in this folder)"
    if not stat.S_IMODE(path.stat().st_mode) & 0o077:
        return ""
    path.chmod(0o600)
    return " (others could read it; now its owner alone can)"


def _write_key(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, content, 0o600)


def write(path: Path, content: bytes, mode: int = 0o644) -> bool:
    """Write a file that is whole or not there, with its permissions from the first byte on.

    Args:
        path: The final name.
        content: All of it.
        mode: Its permissions, but for what the process's mask forbids.

    Returns:
        Whether anything has changed.

    Raises:
        CheckpointError: If it cannot be written; what was there is intact.
    """
    if path.is_file() and path.read_bytes() == content:
        return False
    with in_place_of(path) as temporary:
        temporary.unlink(missing_ok=True)  # of an earlier process with the same number
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return True
