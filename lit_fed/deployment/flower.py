"""Flower's SuperLink and SuperNodes carry the messages; a stub on either side hands them to us.

Public interfaces of flwr only. The stubs are all that crosses as code, and all that they do is to pass blobs on.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fed.deployment.grid import Reply
from lit_fed.deployment.node import Node
from lit_fed.deployment.processes import (
    Program,
    check_free,
    ending_by_signal,
    environment,
    program,
    running,
    split_address,
    wait_for,
)
from lit_fed.deployment.security import Security, connection_file, in_one_line, register
from lit_fed.deployment.stub.pipe import receive, send
from lit_fed.deployment.wire import join, split
from lit_fed.errors import ConfigError, ProcessLost, WireError

_STUB = Path(__file__).parent / "stub"
_APP = "lit_fed_stub"
_LONGEST_ANSWER = 2**20  # of the stub, blobs aside
_LARGEST = 2**36  # of a blob that Flower has already taken
_PARCEL_BYTES = (
    2**26
)  # messages to a node travel together up to this size: a process of Flower's takes seconds to start
_MOST_IN_PARCEL = 2**16
_AGAIN_S = 3.0
_LOOK_S = 0.5  # between two looks whether the SuperLink is there
_SETTLED_S = 30.0  # a SuperNode that has run so long was let in
_START_S = 120.0  # for a SuperLink to listen, and for its stub to come


# ---------------------------------------------------------------------- the server's end


class RelayGrid:
    """Flower's grid, in the process of a run of its own that does what it is told over a socket.

    Args:
        connection: To the stub.
        programs: What must be running meanwhile.
        limit: The size of the largest message that is taken.
        ttl: Seconds after which Flower drops a message.
        keys: Whether nodes have shown that their keys are theirs.
        silent_s: Seconds without an answer after which the SuperLink is taken for lost.
    """

    def __init__(
        self,
        connection: socket.socket,
        programs: Sequence[Program],
        limit: int,
        ttl: float,
        keys: bool,
        silent_s: float = 300.0,
    ) -> None:
        self.silent_s = silent_s
        self.keys = keys
        self.connection = connection
        self.programs = programs
        self.limit = limit
        self.ttl = ttl
        self.num_bytes = 0
        self._count = 0
        self._kept: dict[int, list[tuple[str, bytes]]] = {}
        self._sent: dict[str, list[str]] = {}

    def nodes(self) -> Mapping[int, str]:
        """The nodes that Flower takes to be online, each with its public key where keys are looked at.

        Note:
            Without authentication a SuperNode makes itself a key with every start, which proves nothing.
        """
        found: dict[str, str] = self._ask({"do": "nodes"})
        return {int(node): key if self.keys else "" for node, key in found.items()}

    def push(self, node: int, blob: bytes) -> str:
        """Keep a message for the next `pull`; its id."""
        self._count += 1
        self._kept.setdefault(node, []).append((str(self._count), blob))
        return str(self._count)

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        """Send what was kept, several messages to a node as one; the answers that have come."""
        wanted = set(message_ids)
        for node, kept in self._kept.items():
            for parcel in _parcels(kept):
                yield from (reply for reply in self._send(node, parcel) if reply.message_id in wanted)
        self._kept = {}
        asked = [parcel for parcel, inside in self._sent.items() if not wanted.isdisjoint(inside)]
        found = []
        for _ in range(self._ask({"do": "pull", "ids": asked}) if asked else 0):
            said = json.loads(self._receive(_LONGEST_ANSWER))
            blob = self._receive(_LARGEST)  # the stub has it already; what is too large is refused by name
            self.num_bytes += len(blob)
            found.append((str(said["id"]), blob, str(said["error"])))
        for sent, blob, error in found:
            for reply in _opened(self._sent.pop(sent, []), blob, error):
                if reply.message_id in wanted:
                    yield reply

    def _send(self, node: int, parcel: Sequence[tuple[str, bytes]]) -> Iterator[Reply]:
        inside, blob = [message_id for message_id, _ in parcel], join([blob for _, blob in parcel])
        self.num_bytes += len(blob)
        if sent := self._ask({"do": "push", "node": node, "ttl": self.ttl}, blob):
            self._sent[sent] = inside
        else:
            yield from _opened(inside, b"", "it has left")

    def close(self) -> None:
        """Let the stub end its run."""
        with suppress(OSError):
            send(self.connection, json.dumps({"do": "end"}).encode())

    def _ask(self, what: Mapping[str, object], *blobs: bytes) -> Any:
        try:
            send(self.connection, json.dumps(what).encode(), *blobs)
        except OSError as error:
            raise self._lost() from error
        return json.loads(self._receive(_LONGEST_ANSWER))

    def _receive(self, limit: int) -> bytes:
        begun = time.monotonic()
        while not select.select([self.connection], [], [], _LOOK_S)[0]:  # Flower's grid tries for ever
            self._check_programs()
            if time.monotonic() > begun + self.silent_s:
                raise ProcessLost(
                    f"the SuperLink has not answered for {self.silent_s:g} s; look whether it runs, and go on with "
                    "--ckpt_path last"
                )
        try:
            return receive(self.connection, limit)
        except OSError as error:
            raise self._lost() from error

    def _check_programs(self) -> None:
        for one in self.programs:
            try:
                one.check()
            except ProcessLost as error:
                raise ProcessLost(f"{error}; go on with --ckpt_path last") from error

    def _lost(self) -> ProcessLost:
        self._check_programs()
        last = self.programs[0].last_words() if self.programs else "nothing is known of it"
        return ProcessLost(f"the SuperLink's run has ended: {last}; go on with --ckpt_path last")


def _parcels(kept: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Messages together, as long as they are not too large together."""
    parcel: list[tuple[str, bytes]] = []
    for message_id, blob in kept:
        if parcel and sum(len(one) for _, one in parcel) + len(blob) > _PARCEL_BYTES:
            yield parcel
            parcel = []
        parcel.append((message_id, blob))
    yield parcel


def _opened(inside: Sequence[str], blob: bytes, error: str) -> Iterator[Reply]:
    """The answers to the messages of a parcel."""
    answers: Sequence[bytes] = [b""] * len(inside)
    if not error:
        try:
            answers = split(blob, len(inside))
            if len(answers) != len(inside):
                error = f"it gave {len(answers)} answers to {len(inside)} messages"
        except WireError as odd:
            error = str(odd)
    for place, message_id in enumerate(inside):
        yield Reply(message_id, b"" if error else answers[place], error)


@contextmanager
def superlink_grid(
    address: str,
    security: Security,
    home: Path,
    limit: int,
    ttl: float,
    own: bool = True,
    node_keys: Sequence[str] = (),
) -> Iterator[RelayGrid]:
    """A grid over a SuperLink.

    Args:
        address: Where it listens.
        security: Its certificate.
        home: Flower's folder.
        limit: The size of the largest message that is taken.
        ttl: Seconds after which Flower drops a message.
        own: Start a SuperLink for the while; else there is one already.
        node_keys: Files of the public keys by which nodes are known.

    Raises:
        ConfigError: If there is no such SuperLink, or flwr is not installed.
    """
    security.check(address, ("ca", "certificate", "key") if own else ("ca",))
    if own:
        check_free(address)
        security.try_out(address)
    else:
        security.greet(address)
    with ExitStack() as stack:
        stack.enter_context(ending_by_signal())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lit_fed_")))
        programs = [stack.enter_context(running(superlink_words(address, security), home))] if own else []
        wait_for(address, _START_S if own else 10.0, programs[0] if own else None)
        register(address, security, home, node_keys)
        listener = stack.enter_context(_listen(folder / "server"))
        _start_run(address, security, home, folder)
        connection = stack.enter_context(_accept(listener, programs))
        grid = RelayGrid(connection, programs, limit, ttl, keys=security.is_on)
        stack.callback(grid.close)
        yield grid


def superlink_words(address: str, security: Security) -> list[str]:
    """The command of a SuperLink."""
    host, port = split_address(address)
    words = ["flower-superlink", "--host", host, "--port", str(port), "--disable-runtime-dependency-installation"]
    if not security.is_on:
        return [*words, "--insecure"]
    files = (
        f"--ssl-ca-certfile={security.ca}",
        f"--ssl-certfile={security.certificate}",
        f"--ssl-keyfile={security.key}",
    )
    return [*words, *files, "--enable-supernode-auth"]


def _start_run(address: str, security: Security, home: Path, folder: Path) -> None:
    name, app = connection_file(address, security, home), folder / "app"
    shutil.copytree(_STUB, app / _APP, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    shutil.copy(_STUB / "pyproject.toml", app)
    words = [
        program("flwr"),
        "run",
        str(app),
        name,
        "--run-config",
        f'socket="{folder / "server"}"',
        "--format",
        "json",
    ]
    done = subprocess.run(words, env=environment(home), capture_output=True, text=True, check=False, timeout=_START_S)
    try:
        content = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        content = {"success": False, "error-message": done.stderr or done.stdout}
    if not content.get("success"):
        why = str(content.get("error-message") or content.get("error_message") or content)
        raise ConfigError(f"the SuperLink at {address} takes no run: {in_one_line(why)}")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def _accept(listener: socket.socket, programs: Sequence[Program]) -> socket.socket:
    end = time.monotonic() + _START_S
    listener.settimeout(0.2)
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            return connection
        for one in programs:
            one.check()
        if time.monotonic() > end:
            raise ConfigError(f"the SuperLink has not begun its run within {_START_S:g} s; look at its log")


# ---------------------------------------------------------------------- a node's end


def serve(node: Node, address: str, security: Security, home: Path) -> None:
    """Be a node until this program is ended.

    Args:
        node: Handles messages.
        address: Of the server's SuperLink.
        security: The authority's certificate, and the node's key.
        home: Flower's folder.

    Raises:
        ConfigError: If the SuperLink is not there, or flwr is not installed.
        ProcessLost: If the SuperNode ends.
    """
    security.check(address, ("ca", "key"))
    with ExitStack() as stack:
        stack.enter_context(ending_by_signal())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lit_fed_")))
        listener = stack.enter_context(_listen(folder / "node"))
        listener.settimeout(0.5)
        stack.enter_context(node.at_work())
        wait_for(address, _START_S)
        security.greet(address)
        words = _supernode(address, security, folder / "node")
        supernode = stack.enter_context(running(words, home))
        begun = failing = time.monotonic()
        while True:
            if supernode.has_ended:  # it was killed, or its SuperLink was started again and does not know it
                now = time.monotonic()
                failing = now if now > begun + _SETTLED_S else failing
                if now > failing + _START_S:  # its key may be about to be registered, but not for ever
                    if security.is_on and "Failed to activate" in supernode.last_words():
                        raise ConfigError(
                            f"the server at {address} does not let this node in: give the public key of {security.key} "
                            "to lit-fed federate, with --node_keys"
                        )
                    supernode.check()
                time.sleep(_AGAIN_S)
                supernode, begun = stack.enter_context(running(words, home)), time.monotonic()
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection, suppress(OSError):  # whoever asked was ended: the server notices
                    connection.settimeout(None)
                    send(connection, _handle_all(node, receive(connection, _LARGEST)))


def _handle_all(node: Node, parcel: bytes) -> bytes:
    try:
        return join([node.handle(blob) for blob in split(parcel, _MOST_IN_PARCEL)])
    except WireError as error:
        node.say(str(error))
        return b""


def _supernode(address: str, security: Security, path: Path) -> list[str]:
    port = _free_port()
    words = ["flower-supernode", "--superlink", address, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--node-config", f'socket="{path}"']
    if not security.is_on:
        return [*words, "--insecure"]
    return [*words, "--root-certificates", str(security.ca), "--auth-supernode-private-key", str(security.key)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
