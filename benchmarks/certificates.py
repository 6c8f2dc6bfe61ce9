"""Certificates and keys for a federation on this machine, as ``benchmarks/federation.py --tls`` uses them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def make_keys(folder: Path, homes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Make an authority, the server's certificate, and a key for each node.

    Args:
        folder: Where they lie, in a folder of their own.
        homes: The clients of each node, as a list of ids.

    Returns:
        The options of the server, and those of each node.
    """
    own = folder / "keys"
    own.mkdir(mode=0o700)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, cwd=own, capture_output=True)

    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384")
    openssl("genpkey", *curve, "-out", "ca.key")
    openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "2", "-subj", "/CN=lit_fed", "-out", "ca.crt")
    openssl("genpkey", *curve, "-out", "server.key")
    openssl("req", "-new", "-key", "server.key", "-subj", "/CN=127.0.0.1", "-out", "server.csr")
    (own / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt")
    for place in range(len(homes)):
        words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node_{place}"]
        subprocess.run(words, check=True, cwd=own, capture_output=True)
    ca = ["--ca", str(own / "ca.crt")]
    own_clients = [f"node_{place}.pub: {clients}\n" for place, clients in enumerate(homes)]
    (own / "node_keys.yaml").write_text("".join(own_clients))
    server = ["--certificate", str(own / "server.crt"), "--key", str(own / "server.key")]
    known = ["--node_keys", str(own / "node_keys.yaml")]
    return [*ca, *server, *known], [[*ca, "--key", str(own / f"node_{place}")] for place in range(len(homes))]
