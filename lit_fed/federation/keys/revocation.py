"""Lists of revoked certificates, which authorities sign (RFC 5280): ``--crl``."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from lit_fed.errors import ConfigError

_PEM = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


class RevocationLists:
    """Authorities' lists of revoked certificates: one in DER, or any number in PEM.

    Args:
        path: The file of the lists.
        ca: The file of the authorities' certificates.

    Raises:
        ConfigError: If a list is malformed, partial, not signed by an authority, or has ended.
    """

    def __init__(self, path: Path, ca: Path) -> None:
        self.by_issuer: dict[bytes, x509.CertificateRevocationList] = {}
        try:
            content, authorities = path.read_bytes(), x509.load_pem_x509_certificates(ca.read_bytes())
            pems = _PEM.findall(content)
            for one in map(x509.load_pem_x509_crl, pems) if pems else [x509.load_der_x509_crl(content)]:
                if why := _fault(one, authorities, ca):
                    raise ConfigError(f"--crl {path}: the list of {one.issuer.rfc4514_string()} {why}")
                if self.by_issuer.setdefault(one.issuer.public_bytes(), one) is not one:
                    raise ConfigError(f"--crl {path} has two lists of {one.issuer.rfc4514_string()}; keep the newer")
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            why = f"({type(error).__name__}); correct the path"
            raise ConfigError(f"--crl {path} is not a readable list of revoked certificates {why}") from error
        self.serials = {(name, entry.serial_number) for name, one in self.by_issuer.items() for entry in one}
        self.end = min(_end(one) for one in self.by_issuer.values())
        """When the first of the lists ends."""

    def has(self, certificate: bytes) -> bool:
        """Whether a certificate in PEM is revoked."""
        return _issue(certificate) in self.serials

    def cover(self, certificate: bytes) -> bool:
        """Whether a list of the authority of a certificate in PEM is valid now."""
        one = self.by_issuer.get(_issue(certificate)[0])
        return one is not None and one.last_update_utc <= datetime.now(UTC) <= _end(one)


@lru_cache(maxsize=2**14)  # above the number of nodes that a server accepts
def _issue(certificate: bytes) -> tuple[bytes, int]:
    """Return the issuer's name in DER, and the serial number."""
    read = x509.load_pem_x509_certificate(certificate)
    return read.issuer.public_bytes(), read.serial_number


def _end(one: x509.CertificateRevocationList) -> datetime:
    return one.next_update_utc or one.last_update_utc  # RFC 5280 requires the first


def _fault(one: x509.CertificateRevocationList, authorities: list[x509.Certificate], ca: Path) -> str:
    """Return why a list does not count; empty if it does."""
    keys = [authority.public_key() for authority in authorities if authority.subject == one.issuer]
    if not any(one.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]  # a TypeError for other keys
        return f"is not signed by an authority of {ca}; add the authority's certificate there"
    if any(extension.critical for extension in one.extensions):
        return "is a part of a list; give the whole list"
    return f"ended on {_end(one):%Y-%m-%d %H:%M} UTC; fetch a new one" if _end(one) < datetime.now(UTC) else ""
