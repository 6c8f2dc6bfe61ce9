"""A server's door and nodes that give back what they are sent, in one process, over sockets."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.transport.calling import Line, attend
from lit_fed.federation.transport.grid import Reply
from lit_fed.federation.transport.security import Security
from lit_fed.federation.transport.serving import RpcGrid, rpc_grid


class Echo:
    """Gives back what it is sent.

    Args:
        does: What else it does with it.
    """

    limit, done = 2**31, False

    def __init__(self, does: Callable[[bytes], bytes] = bytes) -> None:
        self.does = does
        self.said: list[str] = []
        self.say = self.said.append

    def handle(self, blob: bytes) -> bytes:
        return self.does(blob)

    def idle(self, connected: bool = True) -> None:
        """Nothing."""


class Link:
    """A link to an address that can be cut: what was connected stays so, and nothing comes through any more.

    As a proxy, it first answers ``CONNECT``, and writes down what it was asked.
    """

    def __init__(self, address: str, proxy: bool = False) -> None:
        host, port = address.split(":")
        self.to, self.cut, self.proxy = (host, int(port)), False, proxy
        self.asked: list[bytes] = []
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.door.accept()
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            if self.proxy:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += near.recv(1)
                self.asked.append(asked)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            while self.cut:
                time.sleep(0.05)
            with socket.create_connection(self.to) as far:
                other = {near: far, far: near}
                while True:
                    for one in select.select([near, far], [], [], 0.1)[0]:
                        while self.cut:
                            time.sleep(0.05)
                        if not (data := one.recv(2**16)):
                            return
                        other[one].sendall(data)


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def files(keys: Path, name: str, key: str | None = None) -> Security:
    return Security(str(keys / "ca.crt"), str(keys / f"{name}.crt"), str(keys / f"{key or name}.key"))


def of_node(keys: Path, name: str = "node_0") -> Security:
    return files(keys, name)


@contextmanager
def served(keys: Path | None, address: str, limit: int = 2**31, node_keys: NodeKeys | None = None) -> Iterator[RpcGrid]:
    """A server with TLS and keys, or with neither."""
    if keys is None:
        with rpc_grid(address, Security(), limit) as grid:
            yield grid
    else:
        bound = node_keys or NodeKeys(keys / "node_keys.yaml")
        with rpc_grid(address, files(keys, "server"), limit, None, bound) as grid:
            yield grid


@contextmanager
def working(node: Echo, address: str, security: Security, **kwargs: Any) -> Iterator[Line]:
    """A node at work in a thread."""
    line = Line(address, security, node.say, node.limit, **kwargs)
    stop = RuntimeError()

    def work() -> None:
        try:
            attend(node, line)  # type: ignore[arg-type]  # all of a node that is asked for
        except Exception as error:
            if error is not stop:
                node.said.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    with line:
        thread.start()
        try:
            yield line
        finally:
            line.inbox.put(stop)
    thread.join(20)


def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
    return found


def answer_of(grid: RpcGrid, node: int, blob: bytes, seconds: float = 20.0) -> Reply:
    """What a node says to a message."""
    message_id = grid.push(node, blob, 2**31)
    (reply,) = until(lambda: list(grid.pull([message_id])), seconds)
    return reply
