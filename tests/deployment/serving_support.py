"""A server's door and nodes that give back what they are sent, in one process, over sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.deployment.calling import Line, attend
from lit_fed.deployment.grid import Reply
from lit_fed.deployment.node_keys import read_node_keys
from lit_fed.deployment.security import Security
from lit_fed.deployment.serving import FleetGrid, fleet_grid


class Echo:
    """Gives back what it is sent.

    Args:
        does: What else it does with it.
    """

    limit = 2**31

    def __init__(self, does: Callable[[bytes], bytes] = bytes) -> None:
        self.does = does
        self.said: list[str] = []
        self.say = self.said.append

    def handle(self, blob: bytes) -> bytes:
        return self.does(blob)

    def idle(self) -> None:
        """Nothing."""


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def of_server(keys: Path) -> Security:
    return Security(str(keys / "ca.crt"), str(keys / "server.crt"), str(keys / "server.key"))


def of_node(keys: Path, name: str = "node_0") -> Security:
    return Security(ca=str(keys / "ca.crt"), key=str(keys / name))


@contextmanager
def served(keys: Path | None, address: str, limit: int = 2**31, ttl: float = 60.0) -> Iterator[FleetGrid]:
    """A server with TLS and keys, or with neither."""
    if keys is None:
        with fleet_grid(address, Security(), limit, ttl) as grid:
            yield grid
    else:
        with fleet_grid(address, of_server(keys), limit, ttl, None, read_node_keys(keys / "node_keys.yaml")) as grid:
            yield grid


@contextmanager
def working(node: Echo, address: str, security: Security) -> Iterator[Line]:
    """A node at work in a thread."""
    line = Line(address, security, node.say)

    def work() -> None:
        with suppress(RuntimeError):  # its client is closed
            attend(node, line)  # type: ignore[arg-type]  # all of a node that is asked for

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.close()
        thread.join(20)


def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
    return found


def answer_of(grid: FleetGrid, node: int, blob: bytes, seconds: float = 20.0) -> Reply:
    """What a node says to a message."""
    message_id = grid.push(node, blob)
    (reply,) = until(lambda: list(grid.pull([message_id])), seconds)
    return reply
