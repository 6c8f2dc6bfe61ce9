"""Certificates and keys of a federation: a certificate authority, and a certificate for the server and each site."""

from __future__ import annotations

from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lit_fed.errors import ConfigError

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
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """Read a private key in PEM; raise `ConfigError` if the file is not a private key on P-384."""
    content = _content(path)
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        locked = "password" in str(error).lower()
        why = "has a password; remove it" if locked else "is not a private key; restore the original file"
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
) -> x509.Certificate:
    """Issue a certificate for the server or a site, valid for a year from ``now``.

    Args:
        authority_key: The authority's private key.
        authority: The authority's certificate.
        key: The public key.
        name: Name of the end.
        names: Host names and addresses by which nodes reach the server; empty for a site.
        now: Start of the validity.
    """
    end = min(now + END_LIFE, authority.not_valid_after_utc)
    made = _begun(_named(f"lit_fed {name}"), authority.subject, key, now, end)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    made = made.add_extension(issuer, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(digital_signature=True), critical=True)
    use = ExtendedKeyUsageOID.SERVER_AUTH if names else ExtendedKeyUsageOID.CLIENT_AUTH
    made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    if names:
        alternatives = x509.SubjectAlternativeName([_alternative(one) for one in names])
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
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(one.value) for one in found)


def certificate_bytes(certificate: x509.Certificate) -> bytes:
    """Serialise a certificate as PEM."""
    content: bytes = certificate.public_bytes(Encoding.PEM)
    return content


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
