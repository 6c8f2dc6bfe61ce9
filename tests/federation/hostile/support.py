"""What an attacker has: sockets, HTTP/2's frames, and what a node's certificate opens."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.federation.transport.frames import METHOD, SERVICE, divide, options
from lit_fed.federation.transport.security import Security
from tests.federation.serving_support import files

import grpc  # isort: skip

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9


def http2(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame of HTTP/2, by RFC 9113, section 4.1."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def header(name: str, value: str) -> bytes:
    """A literal header without indexing, by RFC 7541, section 6.2.2."""
    return b"\0" + b"".join(_text(word.encode()) for word in (name, value))


def _text(word: bytes) -> bytes:
    if len(word) < 127:
        return bytes([len(word)]) + word
    rest, length = len(word) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + word


def request(boot: str = "", path: str = f"/{SERVICE}/{METHOD}") -> bytes:
    """The headers that open a stream."""
    found = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "x"}
    found |= {"content-type": "application/grpc", "boot": boot or secrets.token_hex(16)}
    return b"".join(header(name, value) for name, value in found.items())


def connected(keys: Path, address: str, name: str = "node_0", key: str | None = None) -> ssl.SSLSocket:
    """A connection with TLS, and with a certificate unless the name is empty."""
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    context.set_alpn_protocols(["h2"])
    if name:
        context.load_cert_chain(keys / f"{name}.crt", keys / f"{key or name}.key")
    host, port = address.split(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=10), server_hostname=host)


def sent_until_closed(line: ssl.SSLSocket, frame: Callable[[int], bytes], most: int) -> int:
    """How many bytes of frames, made by their place, a peer takes before it closes the connection."""
    sent, place = 0, 0
    with suppress(OSError):
        while sent < most:
            block = b""
            while len(block) < 2**14:
                block += frame(place)
                place += 1
            line.settimeout(2.0)
            line.sendall(block)
            sent += len(block)
            line.setblocking(False)
            with suppress(ssl.SSLWantReadError):
                while True:
                    if not line.recv(2**16):
                        return sent
    return sent


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Keyed:
    """Who has a certificate, and follows no rule.

    Args:
        keys: The folder of keys; None without TLS.
        address: Of the server.
        name: Of the certificate.
    """

    def __init__(self, keys: Path | None, address: str, name: str = "node_0", key: str | None = None) -> None:
        security = Security() if keys is None else files(keys, name, key)
        if security.is_on:
            own = [*options(), ("grpc.use_local_subchannel_pool", 1)]
            self.channel = grpc.secure_channel(address, security.of_node(), own)
        else:
            self.channel = grpc.insecure_channel(address, options())
        self.boot = secrets.token_hex(16)

    def attend(self, **metadata: Any) -> Stream:
        """A stream."""
        return Stream(self.channel, {"boot": self.boot} | metadata)


class Stream:
    """A stream on which anything is said."""

    def __init__(self, channel: grpc.Channel, metadata: dict[str, Any], method: str = f"/{SERVICE}/{METHOD}") -> None:
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        said = tuple(metadata.items())
        self.call = channel.stream_stream(method)(iter(self.out.get, None), metadata=said, timeout=30)

    def send(self, message_id: int, blob: bytes) -> None:
        for frame in divide(message_id, blob):
            self.out.put(frame)

    def is_open(self) -> bool:
        return bool(dict(self.call.initial_metadata() or ()).get("session"))

    def end(self) -> tuple[grpc.StatusCode, str]:
        """How the server ends it."""
        with suppress(grpc.RpcError):
            for _ in self.call:
                pass
        self.out.put(None)
        return self.call.code(), self.call.details()


def listening(process: int | str) -> set[str]:
    """The sockets, of all families, at which a process listens."""
    own = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(path))
    return {line for line in _listening() if f"socket:[{line.split()[-1]}]" in own}


def _listening() -> Iterator[str]:
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                yield f"{family} {words[1]} {words[9]}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[5] == "01" and words[3] == "00010000":  # __SO_ACCEPTCON
            yield f"unix {words[7] if len(words) > 7 else ''} {words[6]}"


@contextmanager
def many() -> Iterator[list[socket.socket]]:
    """A list of sockets that are closed in the end."""
    found: list[socket.socket] = []
    try:
        yield found
    finally:
        for one in found:
            one.close()
