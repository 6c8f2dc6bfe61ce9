"""Certificates and keys, once a session."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, certificates for 127.0.0.1 (one has expired), another authority, and keys of nodes.

    ``node_keys.yaml`` lets the nodes 0 and 1 be clients 0 and 1; the key ``stranger`` stands nowhere.
    """
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no openssl or no ssh-keygen here")
    folder = tmp_path_factory.mktemp("keys")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=folder, capture_output=True)

    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")
    for name in ("ca", "foreign"):
        openssl("genpkey", *curve, "-out", f"{name}.key")
        openssl(
            "req", "-x509", "-new", "-key", f"{name}.key", "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.crt"
        )
    openssl("genpkey", *curve, "-out", "server.key")
    openssl("pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    openssl("req", "-new", "-key", "server.key", "-subj", "/CN=127.0.0.1", "-out", "server.csr")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ("-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san")
    openssl("x509", "-req", *signed, "-days", "2", "-out", "server.crt")
    openssl("x509", "-req", *signed, "-days", "-1", "-out", "old.crt")
    for name, bits in (("node_0", 384), ("node_1", 384), ("stranger", 384), ("small", 256)):
        words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", str(bits), "-N", "", "-f", name]
        subprocess.run(words, check=True, cwd=folder, capture_output=True)
    (folder / "node_keys.yaml").write_text("node_0.pub: [0]\nnode_1.pub: [1]\n")
    return folder
