"""Who has no certificate that the server accepts gets no further than the handshake, and keeps nobody else out."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lit_fed.federation.keys import node_keys
from lit_fed.federation.keys.node_keys import NodeKeys, key_of
from lit_fed.federation.transport import calling, frames
from tests.federation.hostile.support import PREFACE, SETTINGS, Keyed, connected, http2, listening, many, resident
from tests.federation.serving_support import Echo, answer_of, free_address, of_node, served, until, working

import grpc  # isort: skip


def said_to(keys: Path, address: str, name: str, key: str | None = None) -> bytes:
    """What the server says to a client of HTTP/2 with a certificate, beyond the handshake."""
    with suppress(OSError), connected(keys, address, name, key) as line:
        line.sendall(PREFACE + http2(SETTINGS, 0, 0))
        return line.recv(2**10)
    return b""


def test_without_a_certificate_of_the_authority_nothing_is_answered(keys: Path) -> None:
    """Not a byte of HTTP/2, and no handler runs; a certificate for servers is none for nodes."""
    address = free_address()
    with served(keys, address) as grid:
        assert said_to(keys, address, "node_0")
        outsiders = (("", None), ("foreign_node", "node_0"), ("expired", "node_0"), ("server", None))
        assert [said_to(keys, address, *one) for one in outsiders] == [b""] * 4
        for name, key in outsiders[1:]:
            code, _ = Keyed(keys, address, name, key).attend().end()
            assert code is grpc.StatusCode.UNAVAILABLE, name
        assert grid.nodes() == {}


def test_what_is_no_tls_is_not_answered(keys: Path) -> None:
    address = free_address()
    with served(keys, address), socket.create_connection(address.split(":"), timeout=20) as line:  # type: ignore[arg-type]
        line.sendall(PREFACE + http2(SETTINGS, 0, 0))
        with suppress(ConnectionError):
            assert line.recv(2**10) == b""


def test_tls_is_1_3_on_both_ends(keys: Path) -> None:
    """No setting of gRPC asks for it, see `lit_fed.federation.transport.frames`."""
    address = free_address()
    host, port = address.split(":")
    with served(keys, address):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
            context.load_cert_chain(keys / "node_0.crt", keys / "node_0.key")
            context.set_alpn_protocols(["h2"])
            context.maximum_version = version
            with socket.create_connection((host, int(port)), timeout=10) as line:
                if version is ssl.TLSVersion.TLSv1_3:
                    assert context.wrap_socket(line, server_hostname=host).version() == "TLSv1.3"
                    continue
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    context.wrap_socket(line, server_hostname=host)
    with socket.create_server((host, 0)) as door:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_cert_chain(keys / "server.crt", keys / "server.key")
        old.set_alpn_protocols(["h2"])
        node = Keyed(keys, f"{host}:{door.getsockname()[1]}").attend()
        line, _ = door.accept()
        with line, pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(line, server_side=True)
        node.call.cancel()


def test_a_certificate_whose_key_is_not_registered_opens_nothing(keys: Path) -> None:
    address = free_address()
    with served(keys, address) as grid:
        code, why = Keyed(keys, address, "stranger").attend().end()
        assert (code, why[:31]) == (
            grid_refuses := grpc.StatusCode.PERMISSION_DENIED,
            "the server does not know its ke",
        )
        assert grid_refuses is code
        assert grid.nodes() == {}


def test_a_revoked_key_loses_its_stream_and_gets_no_other(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the server runs, and the other node goes on."""
    monkeypatch.setattr(node_keys, "_LOOK_S", 0.1)
    monkeypatch.setattr(calling, "_LET_IN_S", 0.5)
    address, revoked = free_address(), tmp_path / "revoked.txt"
    revoked.touch()
    bound, thief = (
        NodeKeys(keys / "node_keys.yaml", revoked, lambda line: None),
        Echo(lambda blob: time.sleep(9) or blob),
    )
    with served(keys, address, node_keys=bound) as grid, working(Echo(), address, of_node(keys, "node_1")):
        (honest,) = until(grid.nodes)
        with working(thief, address, of_node(keys)):
            until(lambda: len(grid.nodes()) == 2)
            message_id = grid.push(next(one for one in grid.nodes() if one != honest), b"x", 2**31)
            revoked.write_text(key_of((keys / "node_0.crt").read_bytes()))
            (reply,) = until(lambda: list(grid.pull([message_id])), 5)
            assert reply.error == "its key is revoked; get another one from the server's operator"
            assert list(grid.nodes()) == [honest]
            until(lambda: "rejects this node" in thief.said[-1], 20)
        assert answer_of(grid, honest, b"x").blob == b"x"


def test_there_is_nothing_but_attend(keys: Path) -> None:
    """Of gRPC's own services, too: reflection, health and channelz."""
    address = free_address()
    with served(keys, address):
        node = Keyed(keys, address)
        for method in (
            "/", "/lit_fed.Federation/Other", "/lit_fed.Federation/attend", "/lit_fed.Federation/Attend/",
            "/x.Y/Attend", "/grpc.health.v1.Health/Check", "/grpc.channelz.v1.Channelz/GetServers",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ):  # fmt: skip
            stream = node.attend()
            stream.call.cancel()
            with pytest.raises(grpc.RpcError) as told:
                node.channel.unary_unary(method)(b"", timeout=10)
            assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED, method


def test_one_port_is_open_and_nothing_else(keys: Path) -> None:
    address, before = free_address(), listening("self")
    with served(keys, address), working(Echo(), address, of_node(keys)):
        (one,) = listening("self") - before
        assert one.split()[1].endswith(f":{int(address.split(':')[1]):04X}")


def test_who_says_nothing_or_little_keeps_nobody_out_and_is_hung_up_on(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 who connect and wait, one who sends a byte now and then, and one who never ends its first message."""
    monkeypatch.setattr(frames, "HANDSHAKE_S", 4.0)
    address = free_address()
    host, port = address.split(":")
    with served(keys, address) as grid, working(Echo(), address, of_node(keys)), many() as lines:
        (found,) = until(grid.nodes)
        before = resident()
        for _ in range(2_000):
            lines.append(socket.create_connection((host, int(port)), timeout=20))
        assert answer_of(grid, found, b"x").blob == b"x"
        with working(Echo(), address, of_node(keys, "node_1")):
            until(lambda: len(grid.nodes()) == 2)
        drip, flood = (socket.create_connection((host, int(port)), timeout=20) for _ in range(2))
        begun = time.monotonic()
        with drip, suppress(OSError):
            while time.monotonic() < begun + 20:
                drip.sendall(b"\x16")
                time.sleep(0.2)
        assert time.monotonic() < begun + 10
        sent = 0
        with flood, suppress(OSError):  # records of a ClientHello that says that it has 16 MB
            flood.sendall(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(2**14 - 4))
            while sent < 2**27:
                flood.sendall(b"\x16\x03\x01\x40\x00" + bytes(2**14))
                sent += 2**14
        assert sent < 2**25
        assert resident() - before < 300 * 2**20
        for one in lines:
            one.settimeout(20)
            with suppress(ConnectionError):
                assert one.recv(1) == b""
        assert answer_of(grid, found, b"x").blob == b"x"
