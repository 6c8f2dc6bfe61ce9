"""Signed statements: what a node sent, a server's receipt of it, and a page about a run, by the keys of certificates.

A signature is ECDSA with SHA-384 over the statement's kind and its canonical JSON: sorted keys, no spaces, numbers as
Python's ``repr`` writes them, without ``signature``. A statement names its key by the SHA-256 of the public key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from lit_fed.errors import ConfigError
from lit_fed.federation.keys.authority import read_key
from lit_fed.federation.keys.node_keys import key_of

Kind = Literal["update", "receipt", "card"]
End = Literal["server", "node"]
_USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "node": ExtendedKeyUsageOID.CLIENT_AUTH}
_ALGORITHM = ECDSA(SHA384())


@dataclass(frozen=True)
class SigningKey:
    """The private key of an end's certificate.

    Args:
        private: The key.
        certificates: The certificate in PEM, and those of intermediate authorities behind it.
        authorities: The certificates of ``--ca``.
    """

    private: EllipticCurvePrivateKey
    certificates: list[str]
    authorities: list[x509.Certificate]

    @classmethod
    def read(cls, ca: str | None, certificate: str, key: str, passphrase: bytes | None) -> SigningKey:
        """Read the files of an end; raise `ConfigError` if the key is not on P-384, or not the certificate's."""
        private, own = read_key(Path(key), passphrase), read_certificates("--certificate", certificate)
        if own[0].public_key() != private.public_key():
            raise ConfigError(f"--certificate {certificate} and --key {key} do not match; correct one of them")
        texts = [one.public_bytes(Encoding.PEM).decode() for one in own]
        return cls(private, texts, [] if ca is None else read_certificates("--ca", ca))

    @property
    def name(self) -> str:
        """SHA-256 of the public key."""
        return key_of(self.certificates[0].encode())

    def signed(self, kind: Kind, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a statement with the key's name and the signature, in hexadecimal digits."""
        named = {**content, "key": self.name}
        return named | {"signature": self.private.sign(_covered(kind, named), _ALGORITHM).hex()}


class Certificates(dict[str, list[x509.Certificate]]):
    """Certificates, each with those of intermediate authorities behind it, by the names of their keys."""

    def add(self, texts: Sequence[str]) -> str:
        """Add a certificate in PEM; return the name of its key; raise `ValueError` if it is not one."""
        name = key_of(texts[0].encode())
        self[name] = [x509.load_pem_x509_certificate(text.encode()) for text in texts]
        return name

    def objection(self, kind: Kind, statement: Mapping[str, Any]) -> str:
        """Return why a statement's signature does not hold; empty if it does."""
        if statement["key"] not in self:
            return "lacks the certificate of its key"
        public: Any = self[statement["key"]][0].public_key()
        try:
            public.verify(bytes.fromhex(statement["signature"]), _covered(kind, statement), _ALGORITHM)
        except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):  # TypeError: a key of another kind
            return "has a wrong signature"
        return ""

    def receipt_objection(self, receipt: Mapping[str, Any], server: str, node: str) -> str:
        """Return why a receipt is not a server's for a node's statement, by the names of their keys; empty if it is."""
        if receipt["key"] != server or self.objection("receipt", receipt):
            return "is not signed by the server"
        if receipt["statement"]["key"] != node or self.objection("update", receipt["statement"]):
            return "is of a statement that the node has not signed"
        return ""

    def distrust(self, name: str, end: End, authorities: Sequence[x509.Certificate]) -> str:
        """Return why a key's certificate is not an end's by some authorities; empty if it is.

        Note:
            The end of its validity is not looked at: a signature outlives it.
        """
        own, *between = self[name]
        trusted = list(authorities)
        for one in reversed(between):
            constraints = _extension(one, x509.BasicConstraints)
            trusted += [one] if constraints is not None and constraints.ca and _is_issued(one, trusted) else []
        if not _is_issued(own, trusted):
            return "is not issued by the authority"
        return "" if _USES[end] in (_extension(own, x509.ExtendedKeyUsage) or ()) else f"is not a {end}'s"


def read_certificates(option: str, path: str | Path) -> list[x509.Certificate]:
    """Read the certificates of an option's file; raise `ConfigError`."""
    try:
        return x509.load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} is not a certificate; correct the path") from error


def _covered(kind: Kind, statement: Mapping[str, Any]) -> bytes:
    unsigned = {name: value for name, value in statement.items() if name != "signature"}
    return f"lit_fed {kind}\n{json.dumps(unsigned, sort_keys=True, separators=(',', ':'), allow_nan=False)}".encode()


def _is_issued(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> bool:
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
            continue
        return True
    return False


def _extension(certificate: x509.Certificate, kind: Any) -> Any:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):
        return None
