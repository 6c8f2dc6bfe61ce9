"""The server's map from clients to nodes as they connect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import named
from lit_fed.data.population.census import ClientReport
from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.ends import Alert, Wait
from lit_fed.federation.messages.frozen import Hashes
from lit_fed.federation.messages.schema import Hello
from lit_fed.federation.messages.wire import MOST_BYTES, PROTOCOL, Bodies, Message, encode, encode_shared
from lit_fed.federation.server.answers import LONGEST_GREETING, Greeting, greeting
from lit_fed.federation.server.identity import Identity
from lit_fed.federation.server.requests import Envelope, NoAnswer, Requests
from lit_fed.federation.transport.grid import Grid

if TYPE_CHECKING:
    from lit_fed.federation.keys.node_keys import Grant


T = TypeVar("T")

_AGAIN_S = (5.0, 300.0)  # first and longest pause before a refused node is asked again
_MOST_SAID = 5  # maximum number of printed refusals per node


@dataclass(frozen=True)
class Gathering:
    """The start of a run.

    Args:
        wait_s: Seconds within which all clients must connect.
        least: Start after ``wait_s`` with this many clients, if the checkpoint to resume from knows the others; null
            for all.
    """

    wait_s: float = 300.0
    least: int | None = None

    def __post_init__(self) -> None:
        check_range("--gathering.wait_s", self.wait_s, least=0, infinite=True, why=" s")
        check_range("--gathering.least", self.least, least=1, null="for all clients")


@dataclass(slots=True)
class KnownNode:
    """A registered node.

    The key is empty without authentication, ``boot`` is the id of the node's process, ``frozen`` has the hashes of its
    frozen tensors, ``smallest`` is the least number of nodes with clients in a secure sum to which it consents,
    ``most_bytes`` the size of the largest message that it reads, and ``certificate`` that of its connection, in PEM.
    """

    node: int
    key: str
    boot: str
    clients: Mapping[int, ClientReport]
    sums: bool = False
    frozen: Hashes = field(default_factory=dict)
    smallest: int = 0
    most_bytes: int = MOST_BYTES
    certificate: bytes = b""

    def objection(self, blob: Sized) -> str | None:
        """Return why the node does not read a message; None if it does."""
        if len(blob) <= self.most_bytes:
            return None
        return f"its message has {len(blob):,} bytes, and its node reads {self.most_bytes:,}; raise --most_bytes there"


class _Refusal(NamedTuple):
    why: str
    again: float
    pause: float
    times_said: int


@dataclass
class Roster:
    """The registered nodes.

    Args:
        settings: The settings that must match, see `lit_fed.federation.messages.settings`.
        limit: Maximum size of a message, bytes.
        num_classes: Classes of the data; None without classes.
        node_clients: The clients that a node may claim, by the node's public key; None without keys.
        config: SHA-256 of the run's configuration file; empty if it is not one file.
    """

    grid: Grid
    identity: Identity
    settings: Mapping[str, str]
    num_clients: int
    say: Callable[[str], object] = print
    limit: int = MOST_BYTES
    num_classes: int | None = None
    node_clients: Mapping[str, Grant] | None = None
    config: str = ""
    homes: dict[int, KnownNode] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    """Processes of nodes that missed this round's deadline; they are asked nothing more in it."""
    _owner: dict[int, int] = field(default_factory=dict)
    _greetings: Requests[int] = field(init=False)  # about nodes
    _keys: dict[int, str] = field(default_factory=dict)
    _refused: dict[int, _Refusal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._greetings = Requests(self.grid, self.limit)

    def home(self, client_id: int) -> KnownNode | None:
        """Return a client's node; None if it is not connected."""
        node = self._owner.get(client_id)
        return None if node is None else self.homes[node]

    def present(self) -> dict[int, ClientReport]:
        """Return the reports of the connected clients."""
        return {client_id: report for home in self.homes.values() for client_id, report in home.clients.items()}

    def advice(self, clients: Iterable[int], usual: str) -> str:
        """Return what to do about absent clients: what is usual, or a new key where no accepted key is for them."""
        if self.node_clients is None:
            return usual
        without = set(clients).difference(*(grant.clients for grant in self.node_clients.values()))
        new_key = f"the key for {named(without)} is revoked, or not in --node_keys: see lit-fed provision --new_key"
        return ", and ".join([usual] * (without < set(clients)) + [new_key] * bool(without))

    def is_connected(self, node: int) -> bool:
        """Whether a node was connected at the last refresh, registered or not."""
        return node in self._keys

    def gather(self, gathering: Gathering, done: bool = False) -> None:
        """Wait until every client is connected; print the missing clients after 5 s, then at growing intervals.

        Args:
            gathering: How long, and for how many.
            done: The run is done, and has no work for nodes: go on with those that are here.
        """
        begun, wait = time.monotonic(), Wait(self.say, gathering.wait_s)
        self.refresh()
        while missing := [client_id for client_id in range(self.num_clients) if client_id not in self._owner]:
            if time.monotonic() >= begun + gathering.wait_s:
                break
            wait.go_on(named(missing))
            self._greetings.rest()
            self.refresh()
        if missing and done:
            return
        if missing:
            why = "".join(
                f"; refused: {cause}" for cause in dict.fromkeys(refusal.why for refusal in self._refused.values())
            )
            unknown = [client_id for client_id in missing if client_id not in self.identity.reports]
            who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            if gathering.least is None or len(self._owner) < gathering.least or unknown:
                raise ConfigError(
                    f"no node connected for client {who} within {gathering.wait_s:g} s; "
                    f"{self.advice(missing, 'start it with lit-fed node')}{why}"
                )
            here = f"{len(self._owner)} of {self.num_clients} clients"
            self.say(Alert(f"the run goes on without client {who}, {here}{why}"))
            return
        samples = {client_id: report.samples for client_id, report in self.present().items()}
        most = max(samples, key=lambda client_id: (samples[client_id], -client_id))
        told = f", with {sum(samples.values()):,} training samples; client {most} has the most, {samples[most]:,}"
        here = f"all {self.num_clients} clients are connected, on {len(self.homes)} nodes"
        self.say(here + (told if samples[most] else ""))
        if together := [client_id for home in self.homes.values() if home.sums for client_id in home.clients]:
            self.say(
                f"the nodes of {named(together)} report metrics in sums only: clients.csv lacks these clients, and "
                "metrics over clients have a mean and no other statistic"
            )

    def refresh(self) -> None:
        """Drop disconnected nodes, greet new nodes and register the nodes that answered, without waiting."""
        self._keys = dict(self.grid.nodes())
        for node in [node for node in self.homes if node not in self._keys]:
            self.say(Alert(f"node {node} left with {named(self.homes[node].clients)}"))
            self.forget(node)
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in self._keys}
        self._greetings.drop(lambda node: node not in self._keys)
        known, now = {*self.homes, *self._greetings.pending()}, time.monotonic()
        read = partial(greeting, num_clients=self.num_clients, num_classes=self.num_classes)
        for node in self._keys:
            if node not in known and (node not in self._refused or now > self._refused[node].again):
                self._greetings.send(Envelope(node, node, encode(self._hello()), read))
        for node, said in self._greetings.arrived():
            if (why := self._take_in(node, said)) is not None:
                self._put_off(node, why, aloud=not isinstance(said, NoAnswer))

    def forget(self, node: int) -> None:
        """Unregister a node."""
        home = self.homes.pop(node, None)
        for client_id in home.clients if home is not None else ():
            self._owner.pop(client_id, None)

    def ask(
        self,
        messages: Mapping[int, Message],
        seconds: float,
        read: Callable[[int, Message], T],
        most: int = LONGEST_GREETING,
        strict: bool = False,
        idle: Callable[[Iterator[int]], object] = lambda nodes: None,
    ) -> dict[int, T]:
        """Send messages to nodes, wait for the answers, and print which answers are invalid.

        Args:
            messages: The messages by node.
            seconds: Time-out.
            read: Converts a node and its answer; a `WireError` skips the node.
            most: Maximum size of an answer, bytes.
            strict: Ask the nodes that missed the time-out nothing more in this round.
            idle: Gets, between two looks for answers, the nodes that have not answered; cheap to call at any rate.
        """
        requests, end = Requests[int](self.grid, self.limit), time.monotonic() + seconds
        bodies = Bodies()
        for node, message in messages.items():
            blob = encode_shared(message, bodies)
            if (objection := self.homes[node].objection(blob)) is not None:
                self.say(Alert(f"node {node} is not asked: {objection}"))
                continue
            requests.send(Envelope(node, node, blob, partial(read, node), end, most))
        answers = dict[int, T]()
        for node, outcome in requests.outcomes(lambda: idle(requests.pending())):
            if not isinstance(outcome, WireError):
                answers[node] = outcome
            elif not isinstance(outcome, NoAnswer):
                self.say(Alert(f"the answer of node {node} is dropped: {outcome}"))
        if strict and time.monotonic() > end:
            self.late |= {self.homes[node].boot for node in messages.keys() - answers.keys()}
        return answers

    def _hello(self) -> Message:
        from lit_fed import __version__

        return Message.pack(Hello(PROTOCOL, __version__, self.settings, self.config))

    def _take_in(self, node: int, said: Greeting | WireError) -> str | None:
        """Register a node; return why it is refused."""
        if isinstance(said, WireError):
            return "it did not answer the greeting" if isinstance(said, NoAnswer) else str(said)
        key = self._keys[node]
        if (why := self._objection(node, key, said.clients)) is not None:
            return why
        for other in {self._owner[client_id] for client_id in said.clients if client_id in self._owner}:  # the same key
            self.forget(other)
            if other != node:  # the node restarted before its old session timed out
                self._put_off(other, f"node {node} replaces it, with the same key", aloud=False)
        self._refused.pop(node, None)
        self.homes[node] = KnownNode(
            node, key, said.boot, said.clients, said.sums, said.frozen, said.smallest, said.most_bytes,
            self.grid.certificate(node),
        )  # fmt: skip
        self._owner |= dict.fromkeys(said.clients, node)
        self.identity.accept(said.clients)
        self.say(
            f"node {node} connected with {named(said.clients)}: {len(self._owner)} of {self.num_clients} clients are "
            "connected"
        )
        return None

    def _objection(self, node: int, key: str, clients: Mapping[int, ClientReport]) -> str | None:
        """Return why a node cannot have some clients; None if there is no objection."""
        if self.node_clients is not None:
            grant = self.node_clients.get(key) if key else None
            if grant is None:
                return f"the key of node {node} is unknown; enter it in the file of --node_keys"
            if others := clients.keys() - grant.clients:
                return (
                    f"node {node} claims {named(others)}, and its key is for {named(grant.clients)}; correct its "
                    "--client, or the file of --node_keys"
                )
            for client_id, report in clients.items():
                if grant.most_samples is not None and report.samples > grant.most_samples:
                    return (
                        f"client {client_id} reports {report.samples:,} training samples, and its key may report "
                        f"{grant.most_samples:,}; correct its data, or most_samples in the file of --node_keys"
                    )
        for client_id, report in clients.items():
            other = self._owner.get(client_id)
            if other is not None and other != node and not (key and key == self.homes[other].key):
                return f"nodes {other} and {node} both claim client {client_id}; stop one of them"
            if (why := self.identity.check(client_id, report)) is not None:
                return why
        return None

    def _put_off(self, node: int, why: str, aloud: bool = True) -> None:
        """Refuse a node for a while; it may restart with corrected options under the same key."""
        before = self._refused.get(node)
        pause = _AGAIN_S[0] if before is None else min(2 * before.pause, _AGAIN_S[1])
        said = 0 if before is None else before.times_said
        if aloud and said < _MOST_SAID and (before is None or before.why != why):
            self.say(Alert(f"refused node {node}: {why}"))
            said += 1
        self._refused[node] = _Refusal(why, time.monotonic() + pause, pause, said)
