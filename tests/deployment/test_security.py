"""What a server says of itself, and what a node makes of it."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from lit_fed.deployment.security import Security
from lit_fed.errors import ConfigError


def test_what_others_can_hear_is_protected(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.touch()
    with pytest.raises(ConfigError, match=r"--ca is missing, and 192.0.2.7:9092 is not on this machine; see docs/"):
        Security().check("192.0.2.7:9092", ("ca", "key"))
    with pytest.raises(ConfigError, match="--key is missing; give TLS and keys together, or neither on loopback"):
        Security(ca=str(file)).check("127.0.0.1:9092", ("ca", "key"))
    with pytest.raises(ConfigError, match="--ca nowhere is not a file"):
        Security(ca="nowhere").check("127.0.0.1:9092", ("ca", "key"))
    Security().check("127.0.0.1:9092", ("ca", "key"))
    Security(ca=str(file), key=str(file)).check("192.0.2.7:9092", ("ca", "key"))


@pytest.mark.parametrize(
    ("files", "address", "expected"),
    [
        (("ca.crt", "server.crt", "server.key"), "127.0.0.1:1", ""),
        (("ca.crt", "old.crt", "server.key"), "127.0.0.1:1", r"nodes .* reject .*old.crt \(certificate has expired"),
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
    keys: Path, files: tuple[str, str, str], address: str, expected: str
) -> None:
    security = Security(*(str(keys / name) for name in files))
    with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
        security.try_out(address)


@pytest.mark.parametrize(
    ("ca", "certificate", "expected"),
    [
        ("ca.crt", "server.crt", ""),
        ("foreign.crt", "server.crt", r"foreign.crt does not verify the server at .*\(.*local issuer certificate"),
        ("ca.crt", "old.crt", r"does not verify the server at .*\(certificate has expired"),
        ("ca.crt", "", "does not use TLS"),
        ("", "server.crt", "uses TLS; give --ca and --key"),
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
                context.load_cert_chain(keys / certificate, keys / "server.key")
                context.wrap_socket(line, server_side=True).close()

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
            Security(str(keys / ca) if ca else None).greet(f"127.0.0.1:{listener.getsockname()[1]}")
        server.join()
