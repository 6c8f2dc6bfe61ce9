"""A node's audit log, written at its door: by the headers of what comes in and of what goes out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lit_fed.federation.audit import Audit
from lit_fed.federation.messages.body import Bytes
from lit_fed.federation.messages.wire import header_of, shown
from lit_fed.federation.transport.calling import Handler

_MOST_NAMES = 20  # of questions and of causes in a line; further ones count together
_PAUSE_S = 60.0  # between lines without clients' work
_TENSORS = {"train": "update", "ask": "outputs", "secure": "masked sum", "statistics": "statistics"}
_FIELDS = {
    "metrics": "metrics",
    "sums": "sums of metrics",
    "clients": "report of clients",
    "held": "rounds of states",
    "message": "keys, shares or consent",
    "cause": "refusal",
}


class AuditedNode:
    """A node whose log says that it answers a round, before the first answer leaves, and soon after what left.

    Greetings and refusals do not begin a line of their own, so that a server cannot fill the log with them.

    Args:
        node: The node.
        audit: Its log.
    """

    def __init__(self, node: Handler, audit: Audit) -> None:
        self.node, self.audit, self.limit, self.say = node, audit, node.limit, node.say
        self._round: dict[str, Any] = {}
        self._written = -math.inf
        self._epsilon = 0.0
        self._begin()

    def _begin(self) -> None:
        self._asked, self._left, self._refused = Counter[str](), Counter[str](), Counter[str]()
        self._clients = set[int]()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Prepare to handle messages; at the end, write what left."""
        with self.node.at_work():
            try:
                yield
            finally:
                self._write(lasting=True)

    @property
    def done(self) -> bool:
        """Whether the server has said that the run is done."""
        return self.node.done

    def idle(self, connected: bool = True) -> None:
        """Write what has left so far: of clients' work at once, of the rest once a minute."""
        if self._clients or time.monotonic() > self._written + _PAUSE_S:
            self._write(lasting=True)
        self.node.idle(connected)

    def handle(self, blob: Bytes) -> Bytes:
        """Handle a message, and return the answer."""
        answer = self.node.handle(blob)
        said = header_of(answer)
        fields, is_refused = said["fields"], said["word"] == "failure"
        asked: dict[str, Any] = {"word": "unread message", "fields": {}}
        if not is_refused or fields.get("client", -1) >= 0:  # the node has read it, whatever it answers
            asked = header_of(blob)
        if is_refused:
            _count(self._refused, fields["cause"])
        elif asked["word"] in ("train", "ask"):  # of which a node does a bounded amount
            of_round = {name: asked["fields"][name] for name in ("run", "round")}
            if of_round != self._round:
                self._write()
                if of_round["run"] != self._round.get("run"):
                    self._epsilon = 0.0  # which another run had spent
                self._round = of_round
                self.audit.write("asked", lasting=False, asked=[_name(asked)], **of_round)
            self._clients.add(asked["fields"]["client"])
        kinds = {kind for name, kind in _FIELDS.items() if fields.get(name)}
        kinds |= {_TENSORS[asked["word"]]} if said["names"] else set()
        _count(self._asked, _name(asked))
        _count(self._left, " + ".join(sorted(kinds)) or "that it is done", len(answer))
        self._epsilon = max(self._epsilon, fields.get("metrics", {}).get("epsilon", 0.0))
        return answer

    def _write(self, lasting: bool = False) -> None:
        if self._asked:
            self.audit.write(
                "answered", lasting, **self._round, asked=self._asked, clients=sorted(self._clients), left=self._left,
                refused=self._refused, epsilon=f"{self._epsilon:.6g}" if self._epsilon else None,
            )  # fmt: skip
            self._begin()
            self._written = time.monotonic()


def _name(asked: Mapping[str, Any]) -> str:
    """A request in words, with its protocol, subset, or stage of a secure sum."""
    about = (asked["fields"].get(name) for name in ("protocol", "subset", "stage"))
    return shown(" ".join([asked["word"], *(word for word in about if isinstance(word, str))]), 100)


def _count(counter: Counter[str], name: str, more: int = 1) -> None:
    counter[name if name in counter or len(counter) < _MOST_NAMES else "others"] += more
