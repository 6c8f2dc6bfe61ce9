"""Which node every client lives on, asked anew whenever nodes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from lit_fed.callbacks import Callback
from lit_fed.data.partitions.cut import named
from lit_fed.data.population.client_report import ClientReport
from lit_fed.deployment.grid import Grid, Reply
from lit_fed.deployment.heard import LONGEST_GREETING, greeting, hear
from lit_fed.deployment.wire import MOST_BYTES, PROTOCOL, Message, encode
from lit_fed.engine.loop.run import Run
from lit_fed.errors import ConfigError, WireError

T = TypeVar("T")

_PAUSE_S = 0.05  # between two looks for answers
_SAY_S = 60.0  # between two words about who is missing
_AGAIN_S = (5.0, 300.0)  # until a node that was refused is asked again: at first, and at most
_MOST_SAID = 5  # causes for which one node is refused, until no more of them are printed


class Identity(Callback):
    """Keeps, with the run's checkpoints, what the run is called on its nodes, and by what its clients are known again.

    Args:
        run_id: A name that no other run has.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.known: dict[int, tuple[str, str]] = {}
        """By client: the fingerprint of its data, and its node's key."""
        self.present: Callable[[], Mapping[int, tuple[str, str]]] = dict
        self._begun = False

    def check(self, client_id: int, fingerprint: str, key: str) -> str | None:
        """What speaks against somebody who claims to be a client; None where nothing does."""
        before, before_key = self.known.get(client_id, (fingerprint, key))
        if fingerprint != before:
            return f"client {client_id} has other data than before; give it back its data, or start a new run"
        if key != before_key:
            return f"client {client_id} was known by another key; use the key that it had, or start a new run"
        return None

    def accept(self, clients: Mapping[int, tuple[str, str]]) -> None:
        """Know clients again from here on; until the run has begun, whoever was them may leave, and others be them."""
        if self._begun:
            self.known |= clients

    def on_fit_start(self, run: Run) -> None:
        """Refuse a run that goes on with clients who are not those that it began with.

        Raises:
            ConfigError: For the first of them.
        """
        for client_id, (fingerprint, key) in sorted(self.present().items()):
            if (why := self.check(client_id, fingerprint, key)) is not None:
                raise ConfigError(why)
        self._begun = True
        self.accept(self.present())

    def state_dict(self) -> dict[str, Any]:
        """The run's name, and its clients."""
        return {"run_id": self.run_id, "known": {str(one): list(known) for one, known in self.known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be the run that was saved."""
        self.run_id = str(state["run_id"])
        self.known = {int(one): (str(known[0]), str(known[1])) for one, known in state["known"].items()}


@dataclass(slots=True)
class KnownNode:
    """A node as the server knows it.

    Args:
        node: Its id.
        key: What proves who it is; empty where nothing does.
        boot: The name of its process.
        clients: Who lives there.
        sums: Whether it tells of its clients' metrics in sums only.
    """

    node: int
    key: str
    boot: str
    clients: Mapping[int, ClientReport]
    sums: bool = False


class _Refusal(NamedTuple):
    why: str
    again: float
    pause: float
    said: int


@dataclass
class Roster:
    """The nodes that have said who lives on them.

    Args:
        grid: Reaches them.
        identity: By what clients are known again.
        settings: What nodes must have been told alike, see `lit_fed.deployment.agreed`.
        num_clients: Clients of the population.
        say: Prints a line.
        limit: The size of the largest message that is taken.
        num_classes: Of the data; None where they have none.
        node_clients: By the public key of a node: who may live there. None where there are no keys.
    """

    grid: Grid
    identity: Identity
    settings: Mapping[str, str]
    num_clients: int
    say: Callable[[str], object] = print
    limit: int = MOST_BYTES
    num_classes: int | None = None
    node_clients: Mapping[str, frozenset[int]] | None = None
    homes: dict[int, KnownNode] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    _refused: dict[int, _Refusal] = field(default_factory=dict)
    _learnt: dict[int, ClientReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identity.present = self._present

    def home(self, client_id: int) -> KnownNode | None:
        """Where a client lives; None where its node is not there."""
        node = self._owner.get(client_id)
        return None if node is None else self.homes[node]

    def is_connected(self, node: int) -> bool:
        """Whether a node was there at the last look, whoever lives on it."""
        return node in self._keys

    def reports(self) -> dict[int, ClientReport]:
        """What is known of the clients that are there, and holds from here on: a node that comes back says the same."""
        self._learnt = {one: report for home in self.homes.values() for one, report in home.clients.items()}
        return dict(self._learnt)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every client of the population is there; each minute, say who is missing.

        Raises:
            ConfigError: If one is not, after a time; it says which, and who was refused and why.
        """
        begun = said = time.monotonic()
        self.refresh()
        while (missing := self._missing(range(self.num_clients))) and (now := time.monotonic()) < begun + seconds:
            if now > said + _SAY_S:
                said = now
                self.say(f"waiting for {named(missing)} for {now - begun:.0f} s, of {seconds:g} s at most")
            time.sleep(_PAUSE_S)
            self.refresh()
        if missing:
            why = "".join(f"; refused: {cause}" for cause in dict.fromkeys(one.why for one in self._refused.values()))
            who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise ConfigError(
                f"no node has come for client {who} within {seconds:g} s; start it with lit-fed node{why}"
            )
        samples = {one: report.samples for home in self.homes.values() for one, report in home.clients.items()}
        most = max(samples, key=lambda one: (samples[one], -one))
        self.say(
            f"all {self.num_clients} clients are there, on {len(self.homes)} nodes, with {sum(samples.values()):,} "
            f"training samples; most of them, {samples[most]:,}, has client {most}"
        )
        if together := [one for home in self.homes.values() if home.sums for one in home.clients]:
            self.say(
                f"the nodes of {named(together)} tell their clients' metrics in sums only: clients.csv lacks them, and "
                "metrics over clients have a mean but no _std, _p10 and _min"
            )

    def refresh(self) -> None:
        """Look who has come and gone, ask those who are new, and take in what they have said; it does not wait."""
        self._keys = dict(self.grid.nodes())
        for node in [node for node in self.homes if node not in self._keys]:
            self.say(f"node {node} has left, with {named(self.homes[node].clients)}")
            self.forget(node)
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in self._keys}
        self._asked = {message: node for message, node in self._asked.items() if node in self._keys}
        known, now = {*self.homes, *self._asked.values()}, time.monotonic()
        for node in self._keys:
            if node not in known and (node not in self._refused or now > self._refused[node].again):
                self._asked[self.grid.push(node, encode(self._hello()))] = node
        for reply in self.grid.pull(list(self._asked)) if self._asked else ():
            if (asked := self._asked.pop(reply.message_id, None)) is not None:
                self._take_in(asked, reply)

    def forget(self, node: int) -> None:
        """A node is not there, or no more the one that it was."""
        home = self.homes.pop(node, None)
        for client_id in home.clients if home is not None else ():
            self._owner.pop(client_id, None)

    def ask(self, messages: Mapping[int, Message], seconds: float, read: Callable[[int, Message], T]) -> dict[int, T]:
        """Ask nodes, and say whose answer is none.

        Args:
            messages: By node.
            seconds: How long to wait.
            read: Makes of a node and its answer what is asked for; a `WireError` leaves the node out.

        Returns:
            By node, of those that have answered.
        """
        waiting = {self.grid.push(node, encode(message)): node for node, message in messages.items()}
        found, end = dict[int, T](), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            replies = list(self.grid.pull(list(waiting)))
            for reply in replies:
                if (node := waiting.pop(reply.message_id, None)) is None or reply.error:
                    continue
                try:
                    found[node] = hear(reply.blob, self.limit, LONGEST_GREETING, partial(read, node))
                except WireError as error:
                    self.say(f"node {node} is left out: {error}")
            if not replies:
                time.sleep(_PAUSE_S)
        return found

    def _missing(self, clients: Iterable[int]) -> list[int]:
        return [one for one in clients if one not in self._owner]

    def _hello(self) -> Message:
        from lit_fed import __version__

        return Message("hello", {"protocol": PROTOCOL, "version": __version__, "settings": dict(self.settings)})

    def _take_in(self, node: int, reply: Reply) -> None:
        """Believe a node who lives there, or say why not."""
        if reply.error:
            self._put_off(node, "it gave no answer to who lives there", aloud=False)
            return
        try:
            said = hear(
                reply.blob,
                self.limit,
                LONGEST_GREETING,
                lambda message: greeting(message, self.num_clients, self.num_classes),
            )
        except WireError as error:
            self._put_off(node, str(error))
            return
        key = self._keys[node]
        if (why := self._objection(node, key, said.clients)) is not None:
            self._put_off(node, why)
            return
        for other in {self._owner[one] for one in said.clients if one in self._owner}:  # the same key
            self.forget(other)
            if other != node:  # it was started again, and what it was has not been missed yet
                self._put_off(other, f"node {node} has come with its key for its clients", aloud=False)
        self._refused.pop(node, None)
        self.homes[node] = KnownNode(node, key, said.boot, said.clients, said.sums)
        self._owner |= dict.fromkeys(said.clients, node)
        self.identity.accept({one: (report.fingerprint, key) for one, report in said.clients.items()})
        self.say(
            f"node {node} has come with {named(said.clients)}: {len(self._owner)} of {self.num_clients} clients are "
            "there"
        )

    def _objection(self, node: int, key: str, clients: Mapping[int, ClientReport]) -> str | None:
        """What speaks against a node being some clients; None where nothing does. It changes nothing."""
        if self.node_clients is not None:
            own = self.node_clients.get(key) if key else None
            if own is None:
                return f"node {node} has a key that is given to nobody; enter it in the map of --node_keys"
            if others := clients.keys() - own:
                return (
                    f"node {node} claims {named(others)}, and its key is that of {named(own)}; correct its --client, "
                    "or the map of --node_keys"
                )
        for client_id, report in clients.items():
            other = self._owner.get(client_id)
            if other is not None and other != node and not (key and key == self.homes[other].key):
                return f"nodes {other} and {node} both claim client {client_id}; stop one of them"
            if (why := self.identity.check(client_id, report.fingerprint, key)) is not None:
                return why
            before = self._learnt.get(client_id, report)
            if (before.samples, before.histogram) != (report.samples, report.histogram):
                return f"client {client_id} reports other numbers of samples than before; start a new run"
        return None

    def _put_off(self, node: int, why: str, aloud: bool = True) -> None:
        """Refuse a node for a while: who was mistaken may be started again, under the same key."""
        before = self._refused.get(node)
        pause = _AGAIN_S[0] if before is None else min(2 * before.pause, _AGAIN_S[1])
        said = 0 if before is None else before.said
        if aloud and said < _MOST_SAID and (before is None or before.why != why):
            self.say(f"refused node {node}: {why}")
            said += 1
        self._refused[node] = _Refusal(why, time.monotonic() + pause, pause, said)

    def _present(self) -> dict[int, tuple[str, str]]:
        return {
            one: (report.fingerprint, home.key) for home in self.homes.values() for one, report in home.clients.items()
        }
