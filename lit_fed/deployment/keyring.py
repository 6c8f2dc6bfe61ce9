"""The keys of a federation on disk: made where there is none, kept where there is one, made anew on request."""

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
"""Folders of the authority, the server, the sites, and in the server's of the sites' public keys."""

T = TypeVar("T")
_ELSEWHERE = " (it is not in this folder)"


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

    def check(self, sites: Iterable[str]) -> None:
        """Read all that is there, so that nothing is written beside a file that is not what it should be.

        Args:
            sites: Their names.

        Raises:
            ConfigError: For such a file, or for two halves that do not go together.
        """
        ca_key, ca = _read(self._ca_key, authority.read_key), _read(self._ca, authority.read_certificate)
        if ca_key and ca and ca_key.public_key() != ca.public_key():
            raise ConfigError(f"{self._ca_key} and {self._ca} do not go together; put back the one that is lost")
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
                    f"{private} and {public} do not go together; put back the one that is lost, or make others with "
                    f"--new_key {name}"
                )

    def authority(self) -> str:
        """Make what is missing of the authority; what was done, in words.

        Raises:
            ConfigError: If the authority's key is needed and not here.
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
        """Make what is missing of the server's key and certificate, or near its end; what was done, in words.

        Raises:
            ConfigError: If the authority's key is needed and not here.
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
        signing = self._signing_key()  # before a key is made that it could not vouch for
        if public is None:
            made, done = authority.new_key(), "new key"
            public = made.public_key()
            _write_key(self._server_key, authority.pem_of(made))
        signed = authority.certify_server(signing, ca, public, self.names, self.now)
        write(self._server, authority.certificate_bytes(signed))
        return f"{done}, new certificate until {signed.not_valid_after_utc:%Y-%m-%d}{': ' * bool(why)}{why}"

    def site(self, name: str) -> str:
        """Make a site's key if it has none; what was done, in words."""
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
                f"{self._ca_key} is needed to sign a certificate, and not there; bring it back for this command"
            )
        return authority.read_key(self._ca_key)


def _read(path: Path, read: Callable[[Path], T]) -> T | None:
    """What a file holds; None where there is none. A link that leads nowhere is no file that is not there."""
    return read(path) if path.exists() or path.is_symlink() else None


def _public_of(certificate: Certificate, path: Path) -> EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(f"{path} is for a key of another kind; make a new one with --new_key {SERVER}")
    return key


def _only_ours(path: Path) -> str:
    """Close a private key to others, where it is open to them; what was done, in words."""
    if not path.exists():
        return _ELSEWHERE
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
