"""Signatures as OpenSSL verifies them, and whose certificates are believed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from lit_fed.errors import ConfigError
from lit_fed.federation.keys.statements import Certificates, SigningKey, read_certificates
from tests.federation.company import Company

CONTENT = {"run": "ab", "weight": 0.1, "clients": [3, 4]}


def key(keys: Path, name: str) -> SigningKey:
    return SigningKey.read(str(keys / "ca.crt"), str(keys / f"{name}.crt"), str(keys / f"{name}.key"), None)


def test_openssl_verifies_a_signature_over_these_bytes(keys: Path, tmp_path: Path) -> None:
    statement = key(keys, "node_0").signed("update", CONTENT)
    name = statement["key"]
    text = f'lit_fed update\n{{"clients":[3,4],"key":"{name}","run":"ab","weight":0.1}}'
    (tmp_path / "bytes").write_text(text)
    (tmp_path / "signature").write_bytes(bytes.fromhex(statement["signature"]))

    def openssl(*words: str) -> bytes:
        return subprocess.run(["openssl", *words], check=True, cwd=tmp_path, capture_output=True).stdout

    openssl("x509", "-in", str(keys / "node_0.crt"), "-pubkey", "-noout", "-out", "public")
    assert b"OK" in openssl("dgst", "-sha384", "-verify", "public", "-signature", "signature", "bytes")
    der = openssl("pkey", "-pubin", "-in", "public", "-outform", "DER")
    (tmp_path / "der").write_bytes(der)
    assert openssl("dgst", "-sha256", "-r", "der").split()[0].decode() == name


@pytest.mark.parametrize("change", [{"run": "ac"}, {"weight": 0.2}, {"clients": [3]}, {"more": 1}, {"signature": "00"}])
def test_any_change_of_a_statement_breaks_its_signature(keys: Path, change: dict[str, Any]) -> None:
    signing, certificates = key(keys, "node_0"), Certificates()
    statement = signing.signed("update", CONTENT)
    assert certificates.objection("update", statement) == "lacks the certificate of its key"
    certificates.add(signing.certificates)
    assert certificates.objection("update", statement) == ""
    assert certificates.objection("update", statement | change) == "has a wrong signature"
    assert certificates.objection("receipt", statement) == "has a wrong signature"


def test_another_key_has_not_signed_it(keys: Path) -> None:
    one, other, certificates = key(keys, "node_0"), key(keys, "node_1"), Certificates()
    certificates.add(one.certificates)
    certificates.add(other.certificates)
    forged = other.signed("update", CONTENT) | {"key": one.name}
    assert certificates.objection("update", forged) == "has a wrong signature"


def test_a_certificate_is_of_its_authority_and_its_end(keys: Path) -> None:
    certificates, authorities = Certificates(), read_certificates("--ca", keys / "ca.crt")
    node, server = (certificates.add(key(keys, name).certificates) for name in ("node_0", "server"))
    assert certificates.distrust(node, "node", authorities) == ""
    assert certificates.distrust(server, "server", authorities) == ""
    assert certificates.distrust(node, "server", authorities) == "is not a server's"
    assert certificates.distrust(server, "node", authorities) == "is not a node's"
    foreign = certificates.add([(keys / "foreign_node.crt").read_text()])
    assert certificates.distrust(foreign, "node", authorities) == "is not issued by the authority"


def test_intermediate_authorities_are_followed_and_a_node_is_none(tmp_path: Path) -> None:
    """The root's file is enough; what a node's own key certifies is not its authority's."""
    company = Company(tmp_path)
    curve = ec.SECP384R1()
    company.issue("node", key=ec.generate_private_key(curve))
    files = [str(tmp_path / name) for name in ("root.crt", "node.crt", "node.key")]
    node = SigningKey.read(files[0], files[1], files[2], None)
    assert len(node.certificates) == 2
    certificates, root = Certificates(), node.authorities
    assert certificates.distrust(certificates.add(node.certificates), "node", root) == ""
    assert (
        certificates.distrust(certificates.add(node.certificates[:1]), "node", root) == "is not issued by the authority"
    )
    company.intermediate, company.key = read_certificates("", files[1])[0], node.private
    made = company._signed(
        "server", ec.generate_private_key(curve).public_key(), "node", node.private, use=ExtendedKeyUsageOID.SERVER_AUTH
    )
    (tmp_path / "posing.crt").write_bytes(made.public_bytes(Encoding.PEM))
    posing = [(tmp_path / "posing.crt").read_text(), *node.certificates]
    assert certificates.distrust(certificates.add(posing), "server", root) == "is not issued by the authority"


def test_a_key_that_cannot_sign_is_named(keys: Path, tmp_path: Path) -> None:
    files = [str(keys / name) for name in ("ca.crt", "node_0.crt", "node_1.key")]
    with pytest.raises(ConfigError, match=r"--certificate .*node_0.crt and --key .*node_1.key do not match"):
        SigningKey.read(files[0], files[1], files[2], None)
    company = Company(tmp_path)
    company.issue("node")  # on P-256
    with pytest.raises(ConfigError, match=r"node.key is not for an ECDSA key on P-384"):
        SigningKey.read(None, str(tmp_path / "node.crt"), str(tmp_path / "node.key"), None)
    with pytest.raises(ConfigError, match=r"--ca .*node.key is not a certificate; correct the path"):
        read_certificates("--ca", tmp_path / "node.key")
