"""What an attacker has: sockets, what a node's key signs, and Flower's messages."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.deployment import fleet
from lit_fed.deployment.keys import Signer


def connected(keys: Path, address: str) -> ssl.SSLSocket:
    """A connection with TLS; ``ca.crt`` is everybody's."""
    context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    host, port = address.split(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=20), server_hostname=host)


def asked(keys: Path, address: str, head: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """The answer to a request, written as it is given: its status, and what it says."""
    with connected(keys, address) as line:
        return said_on(line, head, headers, body)


def said_on(line: socket.socket, head: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """The same, on a connection; the status is 0 where it is closed without an answer."""
    lines = [head, "Host: x", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with suppress(OSError):
        line.sendall("\r\n".join(lines).encode("latin-1") + body)
    answer = http.client.HTTPResponse(line)
    try:
        answer.begin()
    except (http.client.HTTPException, OSError):
        return 0, b""
    return answer.status, answer.read()


def post(keys: Path, address: str, word: str, request: Any, signer: Signer | None) -> tuple[int, bytes]:
    """One request of the Fleet API, signed or not."""
    body = request.SerializeToString()
    headers = {"content-length": str(len(body)), **(signer.headers() if signer else {})}
    return asked(keys, address, f"POST {fleet.PREFIX}{word} HTTP/1.1", headers, body)


class Keyed:
    """Who has a key, and follows no rule.

    Args:
        keys: The folder of keys.
        address: Of the server.
        name: Of the key.
    """

    def __init__(self, keys: Path, address: str, name: str) -> None:
        self.keys, self.address = keys, address
        self.signer = Signer(str(keys / name))
        self.pb = fleet.proto()
        request = self.pb.ActivateNodeRequest(public_key=self.signer.public, heartbeat_interval=10)
        status, content = self.post("activate-node", request)
        assert status == 200, content
        answer = self.pb.ActivateNodeResponse()
        answer.ParseFromString(content)
        self.node = answer.node_id

    def post(self, word: str, request: Any) -> tuple[int, bytes]:
        return post(self.keys, self.address, word, request, self.signer)

    def me(self, node: int | None = None) -> Any:
        return self.pb.Node(node_id=self.node if node is None else node)

    def pulled(self) -> Any:
        status, content = self.post("pull-messages", self.pb.PullMessagesRequest(node=self.me()))
        assert status == 200
        answer = self.pb.PullMessagesResponse()
        answer.ParseFromString(content)
        return answer

    def pushed(self, parcel: fleet.Parcel, node: int | None = None) -> tuple[int, bytes]:
        request = self.pb.PushMessagesRequest(
            node=self.me(node), messages_list=[parcel.message], message_object_trees=[parcel.tree]
        )
        return self.post("push-messages", request)

    def reply(self, said: Any, blob: bytes = b"x", source: int | None = None, to: str | None = None) -> fleet.Parcel:
        sender = self.node if source is None else source
        about = fleet.about(said.run_id, sender, fleet.SERVER_ID, 60.0, said.message_id if to is None else to)
        return fleet.pack(blob, about)


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
def many(count: int) -> Iterator[list[socket.socket]]:
    """A list of sockets that are closed in the end."""
    found: list[socket.socket] = []
    try:
        yield found
    finally:
        for one in found:
            one.close()
