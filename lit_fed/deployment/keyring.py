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
from lit_fed.deployment.security import key_of
from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import ConfigError

AUTHORITY, SERVER, SITES, KEYS = "authority", "server", "sites", "keys"
"""Folders of the authority, the server and the sites, and the server's subfolder of the sites' certificates."""
REVOKED = "revoked.txt"
"""The server's list of revoked keys."""

T = TypeVar("T")
_ELSEWHERE = " (it is not in this folder)"
_OF_REVOKED = "# SHA-256 of the public keys that the server refuses\n"


@dataclass
class Keyring:
    """All keys and certificates of a federation, in one folder.

    An existing private key is overwritten only on request. A private key that was moved to another machine need not be
    here, as long as its certificate is. Whoever makes a key elsewhere puts a certificate signing request in its place.

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
            ConfigError: For a malformed file, or keys that do not match.
        """
        ca_key, ca = _read(self._ca_key, authority.read_key), _read(self._ca, authority.read_certificate)
        if ca_key and ca and ca_key.public_key() != ca.public_key():
            raise ConfigError(f"{self._ca_key} and {self._ca} do not match; restore the original files")
        for name in (SERVER, *sites):
            private, request, certificate = self._files(name)
            asked = _read(request, authority.read_request)
            if asked and name in self.anew:
                raise ConfigError(
                    f"--new_key {name} replaces {request}, and the key is elsewhere; put a new request there"
                )
            if name in self.anew:
                continue
            key, _ = _read(private, authority.read_key), _read(certificate, authority.read_certificate)
            if key and asked and key.public_key() != asked:
                raise ConfigError(f"{private} and {request} do not match; remove the one that is not in use")

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
            if found.not_valid_after_utc >= self.now + authority.END_LIFE:
                return f"{done}, certificate kept until {found.not_valid_after_utc:%Y-%m-%d}"
        made = authority.certify_authority(self._signing_key(), self.now)
        write(self._ca, authority.certificate_bytes(made))
        return f"{done}, new certificate until {made.not_valid_after_utc:%Y-%m-%d}"

    def end(self, name: str) -> str:
        """Create or renew the key and the certificate of the server or a site, and report the changes.

        A key that is replaced is revoked.

        Raises:
            ConfigError: If the authority's key is needed and missing.
        """
        private, request, path = self._files(name)
        ca, old = authority.read_certificate(self._ca), _read(path, authority.read_certificate)
        public, why, names = None, "", self.names if name == SERVER else ()
        if name not in self.anew:
            if request.exists():
                public, done = authority.read_request(request), "key of its request"
            elif private.exists():
                public, done = authority.read_key(private).public_key(), "key kept" + _only_ours(private)
            elif old is not None:
                public, done = _public_of(old, path), f"key kept{_ELSEWHERE}"
        if old is not None and public is not None:
            if key_of(authority.certificate_bytes(old)) in self._revoked() and old.public_key() == public:
                return f"its key is revoked; replace it with --new_key {name}"
            why = authority.unfit(old, ca, public, names, self.now)
            if not why:
                return f"{done}, certificate kept until {old.not_valid_after_utc:%Y-%m-%d}"
        signing = self._signing_key()  # fails before a key is created that nobody can certify
        if public is None:
            made, done = authority.new_key(), "new key"
            public = made.public_key()
            _write_key(private, authority.pem_of(made))
        if old is not None and old.public_key() != public and name != SERVER:
            self.revoke(name)
        signed = authority.certify(signing, ca, public, name, names, self.now)
        write(path, authority.certificate_bytes(signed))
        return f"{done}, new certificate until {signed.not_valid_after_utc:%Y-%m-%d}{': ' * bool(why)}{why}"

    def certificate(self, name: str) -> bytes:
        """Return a site's certificate."""
        return self._files(name)[2].read_bytes()

    def revoke(self, name: str) -> None:
        """Enter a site's key into the list of revoked keys; raise `ConfigError` if the site has no certificate."""
        path = self._files(name)[2]
        if not path.is_file():
            raise ConfigError(f"--revoke {name} has no certificate in {path.parent}; run the command without it first")
        key = key_of(path.read_bytes())
        if key not in (before := self._revoked()):
            write(self.folder / SERVER / REVOKED, f"{before}{key}  # {name}, {self.now:%Y-%m-%d}\n".encode())

    def list_revoked(self) -> None:
        """Create the list of revoked keys, unless it is there."""
        write(self.folder / SERVER / REVOKED, self._revoked().encode())

    def _revoked(self) -> str:
        path = self.folder / SERVER / REVOKED
        return path.read_text(encoding="utf-8") if path.is_file() else _OF_REVOKED

    @property
    def _ca_key(self) -> Path:
        return self.folder / AUTHORITY / "ca.key"

    @property
    def _ca(self) -> Path:
        return self.folder / AUTHORITY / "ca.crt"

    def _files(self, name: str) -> tuple[Path, Path, Path]:
        """Return the private key, the request and the certificate of an end."""
        home = self.folder / SERVER
        if name == SERVER:
            return home / "server.key", home / "server.csr", home / "server.crt"
        site = self.folder / SITES / name
        return site / "node.key", site / "node.csr", home / KEYS / f"{name}.crt"

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
