"""What a server says of itself, and what a node makes of it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.keys.node_keys import key_of
from lit_fed.federation.transport.security import Security
from tests.federation.serving_support import files


def test_what_others_can_hear_is_protected(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.touch()
    with pytest.raises(ConfigError, match=r"--ca is missing, and 192.0.2.7:9092 is not on this machine; see docs/"):
        Security().check("192.0.2.7:9092")
    with pytest.raises(ConfigError, match="--certificate is missing; give certificates and keys together, or neither"):
        Security(ca=str(file)).check("127.0.0.1:9092")
    with pytest.raises(ConfigError, match="--ca nowhere is not a file"):
        Security(ca="nowhere").check("127.0.0.1:9092")
    Security().check("127.0.0.1:9092")
    Security(*[str(file)] * 3).check("192.0.2.7:9092")


@pytest.mark.parametrize(
    ("names", "address", "expected"),
    [
        (("ca.crt", "server.crt", "server.key"), "127.0.0.1:1", ""),
        (
            ("ca.crt", "old.crt", "server.key"),
            "127.0.0.1:1",
            r"an end that trusts .* will reject .*old.crt \(certificate has expired",
        ),
        (
            ("foreign.crt", "server.crt", "server.key"),
            "127.0.0.1:1",
            r"reject .*server.crt \(.*local issuer certificate",
        ),
        (("ca.crt", "server.crt", "server.key"), "127.0.0.2:1", "certificate is not valid for '127.0.0.2'"),
        (("ca.crt", "server.crt", "ca.key"), "127.0.0.1:1", r"ca.key do not match \(key values mismatch"),
        (("ca.crt", "server.crt", "locked.key"), "127.0.0.1:1", "locked.key do not match"),  # asks nobody for it
        (("ca.crt", "san", "server.key"), "127.0.0.1:1", "san and .* do not match"),
        (("server.key", "server.crt", "server.key"), "127.0.0.1:1", "--ca .*server.key is not a certificate"),
    ],
)
def test_a_server_finds_out_what_nodes_would_stumble_over(
    keys: Path, names: tuple[str, str, str], address: str, expected: str
) -> None:
    security = Security(*(str(keys / name) for name in names))
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        security.try_out(address)


@pytest.mark.parametrize(
    ("ca", "certificate", "expected"),
    [
        ("ca.crt", "server.crt", ""),
        ("foreign.crt", "server.crt", r"foreign.crt does not verify the server at .*\(.*local issuer certificate"),
        ("ca.crt", "old.crt", r"does not verify the server at .*\(certificate has expired"),
        ("ca.crt", "", "does not use TLS 1.3"),
        ("ca.crt", "1.2", r"does not use TLS 1.3 \(tlsv1 alert protocol version"),
        ("", "server.crt", "uses TLS; give --ca, --certificate and --key"),
        ("", "", ""),
    ],
)
def test_a_node_looks_at_the_servers_certificate(keys: Path, ca: str, certificate: str, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            line, _ = listener.accept()
            with line, suppress(OSError):
                if not certificate:
                    line.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                if certificate == "1.2":
                    context.maximum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(
                    keys / ("server.crt" if certificate == "1.2" else certificate), keys / "server.key"
                )
                context.wrap_socket(line, server_side=True).close()

        server = threading.Thread(target=answer)
        server.start()
        security = Security(str(keys / ca), str(keys / "node_0.crt"), str(keys / "node_0.key")) if ca else Security()
        with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
            security.greet(f"127.0.0.1:{listener.getsockname()[1]}")
        server.join()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("node_0", ""),
        ("stranger", ""),  # of the authority; the server's --node_keys decides
        ("expired", r"will reject --certificate .*expired.crt \(certificate has expired\); make another"),
        ("foreign_node", r"will reject --certificate .*foreign_node.crt \(.*local issuer certificate\)"),
        ("server", r"will reject --certificate .*server.crt \((unsupported|unsuitable) certificate purpose\)"),
    ],
)
def test_a_node_finds_out_what_the_server_would_stumble_over(keys: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        files(keys, name, {"expired": "node_0", "foreign_node": "node_0"}.get(name)).try_out()


def test_a_key_is_known_by_its_hash_whatever_certificate_it_is_in(keys: Path) -> None:
    words = "openssl pkey -in node_0.key -pubout -outform DER | sha256sum"
    done = subprocess.run(["bash", "-c", words], cwd=keys, capture_output=True, text=True, check=True)
    found = {key_of((keys / f"{name}.crt").read_bytes()) for name in ("node_0", "expired", "foreign_node")}
    assert found == {done.stdout.split()[0]}
