"""A node that stands: it starts the approved configuration that a server names, run after run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

from lit_fed.errors import WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.body import Bytes
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.approval import NotApproved
from lit_fed.federation.node.node import Node


class Standing:
    """A node that starts the configurations that its server names.

    A server names a configuration by its hash alone; the text is a file of the site.

    Args:
        folder: The site's configuration files.
        start: Makes the node of a file; raises `NotApproved` if the site has not approved it.
        limit: Maximum size of a message, bytes.
        say: Prints a line.
    """

    def __init__(
        self, folder: Path, start: Callable[[Path], Node], limit: int, say: Callable[[str], object] = print
    ) -> None:
        self.folder, self.start, self.limit, self.say = folder, start, limit, say
        self._node: Node | None = None
        self._hash = ""
        self._given: dict[str, Counter[tuple[object, ...]]] = {}  # another configuration resets no count of requests
        self._stack = ExitStack()

    @contextmanager
    def at_work(self) -> Iterator[Standing]:
        """Prepare to handle messages."""
        with ExitStack() as self._stack:
            yield self

    def idle(self, connected: bool = True) -> None:
        """Report a silent server during a run."""
        if self._node is not None:
            self._node.idle(connected)

    @property
    def done(self) -> bool:
        """Whether the server has said that the run at hand is done."""
        return self._node is not None and self._node.done

    def handle(self, blob: Bytes) -> Bytes:
        """Start the configuration that a greeting names; let its node handle everything else."""
        named, cause = "", "the node stands, and has started no configuration"
        try:
            message = decode(blob, self.limit)
            if message.word == "hello" and (named := message.read(schema.Hello).config) != self._hash:
                self._choose(named)
            if self._node is not None:
                return self._node.handle(blob)
        except WireError as error:
            cause = str(error)
        except (
            Exception,
            SystemExit,
        ) as error:  # of the site's own files and classes, of which the server hears nothing
            self.say(Alert(f"refused configuration {named[:16]}: {error}"))
            why = "has not approved" if isinstance(error, NotApproved) else "cannot start"
            cause = f"the node {why} configuration {named[:16]}; its log says why"
        return encode(Message.pack(schema.WorkFailure(cause, -1, -1, False, {})))

    def _choose(self, named: str) -> None:
        self._node, self._hash = None, ""
        self._stack.close()
        found = sorted(path for path in self.folder.glob("*.y*ml") if path.is_file())
        files = {sha256(path.read_bytes()).hexdigest(): path for path in found}
        if named not in files:
            raise NotApproved(f"no file in --standing {self.folder} has this SHA-256")
        node = self.start(files[named])
        node.given = self._given
        self.say(f"started {files[named]}")
        self._node, self._hash = self._stack.enter_context(node.at_work()), named
