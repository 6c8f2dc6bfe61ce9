"""The keys of a federation on disk: created if missing, kept if present, replaced on request."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509 import Certificate

from lit_fed.deployment import authority
from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import ConfigError

AUTHORITY, SERVER, SITES, KEYS = "authority", "server", "sites", "keys"
"""Folders of the authority, the server and the sites, and the server's subfolder of the sites' public keys."""

T = TypeVar("T")
_ELSEWHERE = " (it is not in this folder)"


@dataclass
class Keyring:
    """All keys and certificates of a federation, in one folder.

    An existing private key is overwritten only on request. A private key that was moved to another machine need not be
    here, as long as its public key or certificate is.

    Args:
        names: Host names and addresses of the server.
        anew: Sites, and `SERVER`, whose keys are replaced.
    """

    folder: Path
    names: tuple[str, ...]
    now: datetime
    anew: Collection[str] = ()

    def check(self, sites: Iterable[str]) -> None:
        """Read all existing files before anything is written.

        Raises:
            ConfigError: For a malformed file, or a private key and a public key that do not match.
        """
        ca_key, ca = _read(self._ca_key, authority.read_key), _read(self._ca, authority.read_certificate)
        if ca_key and ca and ca_key.public_key() != ca.public_key():
            raise ConfigError(f"{self._ca_key} and {self._ca} do not match; restore the original files")
        if SERVER not in self.anew:
            for path, read in ((self._server_key, authority.read_key), (self._server, authority.read_certificate)):
                _read(path, read)
        for name in sites:
            if name in self.anew:
                continue
            private, public = self._site(name)
            key, known = _read(private, authority.read_key), _read(public, authority.read_public)
            if key and known and key.public_key() != known:
                raise ConfigError(
                    f"{private} and {public} do not match; restore the original files, or replace both with "
                    f"--new_key {name}"
                )

    def authority(self) -> str:
        """Create the authority's missing files, and report the changes.

        Raises:
            ConfigError: If the authority's key is needed and missing.
        """
        done = "key kept" + _only_ours(self._ca_key)
        if not (self._ca_key.exists() or self._ca.exists()):
            done = "new key"
            _write_key(self._ca_key, authority.pem_of(authority.new_key()))
        if self._ca.exists():
            found = authority.read_certificate(self._ca)
            if found.not_valid_after_utc >= self.now + authority.SERVER_LIFE:
                return f"{done}, certificate kept until {found.not_valid_after_utc:%Y-%m-%d}"
        made = authority.certify_authority(self._signing_key(), self.now)
        write(self._ca, authority.certificate_bytes(made))
        return f"{done}, new certificate until {made.not_valid_after_utc:%Y-%m-%d}"

    def server(self) -> str:
        """Create or renew the server's key and certificate, and report the changes.

        Raises:
            ConfigError: If the authority's key is needed and missing.
        """
        ca, public, why = authority.read_certificate(self._ca), None, ""
        if SERVER not in self.anew and self._server_key.exists():
            public, done = authority.read_key(self._server_key).public_key(), "key kept" + _only_ours(self._server_key)
        elif SERVER not in self.anew and self._server.exists():
            public, done = _public_of(authority.read_certificate(self._server), self._server), f"key kept{_ELSEWHERE}"
        if public is not None and self._server.exists():
            found = authority.read_certificate(self._server)
            why = authority.unfit(found, ca, public, self.names, self.now)
            if not why:
                return f"{done}, certificate kept until {found.not_valid_after_utc:%Y-%m-%d}"
        signing = self._signing_key()  # fails before a key is created that nobody can certify
        if public is None:
            made, done = authority.new_key(), "new key"
            public = made.public_key()
            _write_key(self._server_key, authority.pem_of(made))
        signed = authority.certify_server(signing, ca, public, self.names, self.now)
        write(self._server, authority.certificate_bytes(signed))
        return f"{done}, new certificate until {signed.not_valid_after_utc:%Y-%m-%d}{': ' * bool(why)}{why}"

    def site(self, name: str) -> str:
        """Create a site's missing key, and report the changes."""
        private, public = self._site(name)
        if name in self.anew or not (private.exists() or public.exists()):
            made, done = authority.new_key(), "new key"
            _write_key(private, authority.openssh_of(made))
            write(public, authority.public_line(made.public_key(), name))
            return done
        done = "key kept" + _only_ours(private)
        if not public.exists():
            write(public, authority.public_line(authority.read_key(private).public_key(), name))
        return done

    @property
    def _ca_key(self) -> Path:
        return self.folder / AUTHORITY / "ca.key"

    @property
    def _ca(self) -> Path:
        return self.folder / AUTHORITY / "ca.crt"

    @property
    def _server_key(self) -> Path:
        return self.folder / SERVER / "server.key"

    @property
    def _server(self) -> Path:
        return self.folder / SERVER / "server.crt"

    def _site(self, name: str) -> tuple[Path, Path]:
        return self.folder / SITES / name / "node.key", self.folder / SERVER / KEYS / f"{name}.pub"

    def _signing_key(self) -> EllipticCurvePrivateKey:
        if not self._ca_key.exists():
            raise ConfigError(
                f"{self._ca_key} does not exist, and signing a certificate needs it; restore it for this command"
            )
        return authority.read_key(self._ca_key)


def _read(path: Path, read: Callable[[Path], T]) -> T | None:
    """Read a file; None if it does not exist. A dangling link is an error."""
    return read(path) if path.exists() or path.is_symlink() else None


def _public_of(certificate: Certificate, path: Path) -> EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(f"the key of {path} is not an elliptic-curve key; make a new one with --new_key {SERVER}")
    return key


def _only_ours(path: Path) -> str:
    """Restrict a private key's permissions to its owner, and report the changes."""
    if not path.exists():
        return _ELSEWHERE
    if not stat.S_IMODE(path.stat().st_mode) & 0o077:
        return ""
    path.chmod(0o600)
    return " (others could read it; now only its owner can)"


def _write_key(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, content, 0o600)


def write(path: Path, content: bytes, mode: int = 0o644) -> bool:
    """Write a file atomically, with its permissions from the first byte on; return whether the file changed.

    The process's umask further restricts the permissions.

    Raises:
        CheckpointError: If it cannot be written; an existing file stays intact.
    """
    if path.is_file() and path.read_bytes() == content:
        return False
    with in_place_of(path) as temporary:
        temporary.unlink(missing_ok=True)  # left by an earlier process with the same id
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return True
