"""Certificates and keys, once a session."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lit_fed.federation.keys.node_keys import OPERATOR_USE


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, certificates for 127.0.0.1 (one has expired), another authority, and those of nodes.

    ``node_keys.yaml`` lets the nodes 0 and 1 be clients 0 and 1; ``stranger`` stands nowhere, ``expired`` is node 0's
    own key in a certificate that has expired, and ``foreign_node`` is node 0's key certified by the other authority.
    ``operator_keys.yaml`` also lets ``operator`` operate; ``plain`` is the operator's key in a certificate of a node.
    """
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path_factory.mktemp("keys")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=folder, capture_output=True)

    def certified(key: str, name: str, authority: str, days: int, extensions: str) -> None:
        openssl("req", "-new", "-key", f"{key}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
        signed = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", extensions)
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-days", str(days), "-out", f"{name}.crt")

    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")
    for name in ("ca", "foreign", "server", "node_0", "node_1", "stranger", "operator"):
        openssl("genpkey", *curve, "-out", f"{name}.key")
    for name in ("ca", "foreign"):
        openssl(
            "req", "-x509", "-new", "-key", f"{name}.key", "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.crt"
        )
    openssl("pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n")
    (folder / "client").write_text("extendedKeyUsage=clientAuth\n")
    (folder / "operates").write_text(f"extendedKeyUsage=clientAuth,{OPERATOR_USE}\n")
    certified("server", "server", "ca", 2, "san")
    certified("server", "old", "ca", -1, "san")
    for name in ("node_0", "node_1", "stranger"):
        certified(name, name, "ca", 2, "client")
    certified("operator", "operator", "ca", 2, "operates")
    certified("operator", "plain", "ca", 2, "client")
    certified("node_0", "expired", "ca", -1, "client")
    certified("node_0", "foreign_node", "foreign", 2, "client")
    (folder / "node_keys.yaml").write_text("node_0.crt: [0]\nnode_1.crt: [1]\n")
    (folder / "operator_keys.yaml").write_text("node_0.crt: [0]\nnode_1.crt: [1]\noperator.crt: operator\n")
    return folder
