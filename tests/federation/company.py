"""The authority of a company: a root with an RSA key, and an intermediate authority that issues certificates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lit_fed.federation.transport.security import Security

DAY = timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


class Company:
    """An authority whose files lie in a folder: ``root.crt`` and ``both.crt``, with the intermediate authority.

    ``issue`` writes ``<name>.crt``, with the intermediate authority's certificate behind it, and ``<name>.key``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, datetime.now(UTC)
        self.root_key: Any = rsa.generate_private_key(65537, 2048)
        self.key: Any = ec.generate_private_key(ec.SECP256R1())
        self.root = self._signed("root", self.root_key.public_key(), "root", self.root_key, ca=True)
        self.intermediate = self._signed("intermediate", self.key.public_key(), "root", self.root_key, ca=True)
        (folder / "root.crt").write_bytes(_pem(self.root))
        (folder / "both.crt").write_bytes(_pem(self.root) + _pem(self.intermediate))

    def _signed(
        self, name: str, public: Any, issuer: str, key: Any, ca: bool = False, use: Any = None
    ) -> x509.Certificate:
        serial = x509.random_serial_number()
        made = x509.CertificateBuilder(_name(issuer), _name(name), public, serial, self.now - DAY, self.now + 9 * DAY)
        made = made.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        made = made.add_extension(usage, critical=True)
        if use is not None:
            made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            host = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            made = made.add_extension(host, critical=False)
        return made.sign(key, hashes.SHA256())

    def issue(self, name: str, passphrase: str = "", key: Any = None, chain: bool = True) -> Any:
        """Write a certificate and its private key, and return the key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        use = ExtendedKeyUsageOID.SERVER_AUTH if name == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        made = self._signed(name, key.public_key(), "intermediate", self.key, use=use)
        (self.folder / f"{name}.crt").write_bytes(_pem(made) + _pem(self.intermediate) * chain)
        lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)
        (self.folder / f"{name}.key").write_bytes(content)
        return key

    def security(self, name: str, ca: str = "root", passphrase: bytes | None = None) -> Security:
        files = (str(self.folder / file) for file in (f"{ca}.crt", f"{name}.crt", f"{name}.key"))
        return Security(*files, passphrase)

    def revoke(
        self,
        names: Iterable[str],
        end: timedelta = DAY,
        by: str = "intermediate",
        key: Any = None,
        encoding: Encoding = Encoding.PEM,
        partial: bool = False,
        begin: timedelta = -DAY,
    ) -> bytes:
        """A list of revoked certificates, by their names."""
        made = x509.CertificateRevocationListBuilder(_name(by), self.now + begin, self.now + end)
        for name in names:
            serial = x509.load_pem_x509_certificate((self.folder / f"{name}.crt").read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder(serial, self.now - DAY)
            made = made.add_revoked_certificate(entry.build())
        if partial:
            made = made.add_extension(x509.DeltaCRLIndicator(1), critical=True)
        signing = key or (self.root_key if by == "root" else self.key)
        return made.sign(signing, hashes.SHA256()).public_bytes(encoding)
