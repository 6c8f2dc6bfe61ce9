"""Certificates and keys of a federation: an authority's, the server's and each site's, made and kept on disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509 import Certificate
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lit_fed.engine.storage.files import in_place_of
from lit_fed.errors import ConfigError
from lit_fed.federation.keys.node_keys import OPERATOR_USE, is_operator, key_of, read_hashes

AUTHORITY, SERVER, SITES, OPERATORS, KEYS = "authority", "server", "sites", "operators", "keys"
"""Folders of the authority, the server, the sites and the operators, and the server's subfolder of certificates."""
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
        anew: Sites, operators, and `SERVER`, whose keys are replaced.
        operators: The operators, whose certificates say so.
    """

    folder: Path
    names: tuple[str, ...]
    now: datetime
    anew: Collection[str] = ()
    operators: Collection[str] = ()

    def check(self, sites: Iterable[str]) -> None:
        """Read all existing files before anything is written."""
        ca_key, ca = _read(self._ca_key, read_key), _read(self._ca, read_certificate)
        if ca_key and ca and ca_key.public_key() != ca.public_key():
            raise ConfigError(f"{self._ca_key} and {self._ca} do not match; restore the original files")
        for name in (SERVER, *sites):
            private, request, certificate = self._files(name)
            asked = _read(request, read_request)
            if asked and name in self.anew:
                raise ConfigError(
                    f"--new_key {name} replaces {request}, and the key is elsewhere; put a new request there"
                )
            if name in self.anew:
                continue
            key, _ = _read(private, read_key), _read(certificate, read_certificate)
            if key and asked and key.public_key() != asked:
                raise ConfigError(f"{private} and {request} do not match; remove the one that is not in use")

    def authority(self) -> str:
        """Create the authority's missing files, and report the changes."""
        done = "key kept" + _only_ours(self._ca_key)
        if not (self._ca_key.exists() or self._ca.exists()):
            done = "new key"
            _write_key(self._ca_key, pem_of(new_key()))
        if self._ca.exists():
            certificate = read_certificate(self._ca)
            if certificate.not_valid_after_utc >= self.now + END_LIFE:
                return f"{done}, certificate kept until {certificate.not_valid_after_utc:%Y-%m-%d}"
        made = certify_authority(self._signing_key(), self.now)
        write(self._ca, certificate_bytes(made))
        return f"{done}, new certificate until {made.not_valid_after_utc:%Y-%m-%d}"

    def end(self, name: str) -> str:
        """Create or renew the key and the certificate of the server, a site or an operator, and report the changes.

        A key that is replaced is revoked.
        """
        private, request, path = self._files(name)
        ca, old = read_certificate(self._ca), _read(path, read_certificate)
        public, why, names = None, "", self.names if name == SERVER else ()
        operates = name in self.operators
        of_other_role = old is not None and is_operator(certificate_bytes(old)) != operates
        if name not in self.anew:
            if request.exists():
                public, done = read_request(request), "key of its request"
            elif private.exists():
                public, done = read_key(private).public_key(), "key kept" + _only_ours(private)
            elif old is not None and not of_other_role:
                public, done = _public_of(old, path), f"key kept{_ELSEWHERE}"
        if old is not None and public is not None:
            if key_of(certificate_bytes(old)) in self._revoked_keys() and old.public_key() == public:
                return f"its key is revoked; replace it with --new_key {name}"
            why = "the old one has another role" if of_other_role else unfit(old, ca, public, names, self.now)
            if not why:
                return f"{done}, certificate kept until {old.not_valid_after_utc:%Y-%m-%d}"
        signing = self._signing_key()  # fails before a key is created that nobody can certify
        if public is None:
            made, done = new_key(), "new key"
            public = made.public_key()
            _write_key(private, pem_of(made))
        if old is not None and old.public_key() != public and name != SERVER:
            self.revoke(name)
        signed = certify(signing, ca, public, name, names, self.now, operates)
        write(path, certificate_bytes(signed))
        return f"{done}, new certificate until {signed.not_valid_after_utc:%Y-%m-%d}{': ' * bool(why)}{why}"

    def certificate(self, name: str) -> bytes:
        """Return the certificate of a site or an operator."""
        return self._files(name)[2].read_bytes()

    def revoke(self, name: str) -> None:
        """Enter the key of a site or an operator into the list of revoked keys; raise `ConfigError` without one."""
        path = self._files(name)[2]
        if not path.is_file():
            raise ConfigError(f"--revoke {name} has no certificate in {path.parent}; run the command without it first")
        key = key_of(certificate_bytes(read_certificate(path)))
        if key not in self._revoked_keys():
            before = self._revoked().rstrip()  # somebody's last line may have no end
            write(self.folder / SERVER / REVOKED, f"{before}\n{key}  # {name}, {self.now:%Y-%m-%d}\n".encode())

    def list_revoked(self) -> None:
        """Create the list of revoked keys, unless it is there."""
        write(self.folder / SERVER / REVOKED, self._revoked().encode())

    def _revoked_keys(self) -> frozenset[str]:
        path = self.folder / SERVER / REVOKED
        return read_hashes(path, "--revoked") if path.is_file() else frozenset()

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
        site, file = (OPERATORS, "operator") if name in self.operators else (SITES, "node")
        own = self.folder / site / name
        return own / f"{file}.key", own / f"{file}.csr", home / KEYS / f"{name}.crt"

    def _signing_key(self) -> EllipticCurvePrivateKey:
        if not self._ca_key.exists():
            raise ConfigError(
                f"{self._ca_key} does not exist, and signing a certificate needs it; restore it for this command"
            )
        return read_key(self._ca_key)


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


AUTHORITY_LIFE = timedelta(days=3652)
END_LIFE = timedelta(days=365)
RENEWED_BEFORE = timedelta(days=30)
"""Remaining validity below which the certificate of the server or a site is renewed."""

_REQUEST = "make one with openssl req -new, see docs/deployment.md"
_NOT_ON_P384 = "is not for an ECDSA key on P-384; make one with openssl genpkey, see docs/deployment.md"
_CLOCKS = timedelta(days=1)  # backdates certificates, for nodes whose clock is behind


# ---------------------------------------------------------------------- keys


def new_key() -> EllipticCurvePrivateKey:
    """Generate a key on P-384."""
    return generate_private_key(SECP384R1())


def pem_of(key: EllipticCurvePrivateKey) -> bytes:
    """Serialise a private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key(path: Path, passphrase: bytes | None = None) -> EllipticCurvePrivateKey:
    """Read a private key in PEM; raise `ConfigError` if the file is not a private key on P-384."""
    content = _content(path)
    try:
        key = load_pem_private_key(content, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        locked = isinstance(error, TypeError)  # before cryptography 45, any ValueError names passwords
        why = "has a passphrase; give or remove it" if locked else "is not a private key; restore the original file"
        raise ConfigError(f"{path} {why}") from error
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP384R1):
        raise ConfigError(f"{path} {_NOT_ON_P384}")
    return key


# ---------------------------------------------------------------------- certificates


def certify_authority(key: EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    """Issue the authority's self-signed certificate, valid from ``now``."""
    name = _named("lit_fed authority")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    made = _begun(name, name, key.public_key(), now, now + AUTHORITY_LIFE)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return made.add_extension(usage, critical=True).sign(key, hashes.SHA384())


def certify(
    authority_key: EllipticCurvePrivateKey,
    authority: x509.Certificate,
    key: EllipticCurvePublicKey,
    name: str,
    names: tuple[str, ...],
    now: datetime,
    operates: bool = False,
) -> x509.Certificate:
    """Issue a certificate for the server, a site or an operator, valid for a year from ``now``.

    Args:
        authority_key: The authority's private key.
        authority: The authority's certificate.
        key: The public key.
        name: Name of the end.
        names: Host names and addresses by which nodes reach the server; empty for the others.
        now: Start of the validity.
        operates: Whether the end is an operator.
    """
    end = min(now + END_LIFE, authority.not_valid_after_utc)
    made = _begun(_named(f"lit_fed {name}"), authority.subject, key, now, end)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    made = made.add_extension(issuer, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(digital_signature=True), critical=True)
    use = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    uses = [use, *([x509.ObjectIdentifier(OPERATOR_USE)] if operates else [])]
    made = made.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if names:
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        made = made.add_extension(alternatives, critical=False)
    return made.sign(authority_key, hashes.SHA384())


def read_request(path: Path) -> EllipticCurvePublicKey:
    """Return the key of a certificate signing request; raise `ConfigError` if the file is not one for P-384.

    Note:
        The name and the extensions that it asks for are ignored: the federation's file decides on them.
    """
    content = _content(path)
    try:
        request = x509.load_pem_x509_csr(content)
        good = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a certificate signing request; {_REQUEST}") from error
    key = request.public_key()
    if not good or not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise ConfigError(f"{path} {_NOT_ON_P384 if good else f'has a wrong signature; {_REQUEST}'}")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate; raise `ConfigError` if the file is not a certificate."""
    content = _content(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate; restore the file, or remove it to get a new one") from error


def unfit(
    certificate: x509.Certificate,
    authority: x509.Certificate,
    key: EllipticCurvePublicKey,
    names: tuple[str, ...],
    now: datetime,
) -> str:
    """Return why an end's certificate must be renewed; empty if it is still good."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return "the old one is from another authority"
    if certificate.public_key() != key:
        return "the old one is for another key"
    if names_of(certificate) != names:
        return f"the old one was for {', '.join(names_of(certificate))}"
    if certificate.not_valid_after_utc < now + RENEWED_BEFORE:
        return f"the old one ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    return ""


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host names and addresses for which a certificate is valid."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def certificate_bytes(certificate: x509.Certificate) -> bytes:
    """Serialise a certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    name: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    """Begin a certificate with the fields that all certificates share."""
    made = x509.CertificateBuilder(issuer, name, key, x509.random_serial_number(), now - _CLOCKS, end)
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(digital_signature, False, False, False, False, key_cert_sign, crl_sign, False, False)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
