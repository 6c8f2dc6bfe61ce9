"""Which node every client lives on, asked anew whenever nodes come and go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_fed.callbacks import Callback
from lit_fed.data.client_report import ClientReport
from lit_fed.data.cut import named
from lit_fed.data.scale import SCALES
from lit_fed.deployment.grid import Grid, Reply
from lit_fed.deployment.wire import MOST_BYTES, PROTOCOL, Message, decode, encode
from lit_fed.engine.run import Run
from lit_fed.errors import ConfigError, LitFedError, WireError

_PAUSE_S = 0.05  # between two looks for answers
_SHA256 = re.compile(r"[0-9a-f]{64}")


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

    def check(self, client_id: int, fingerprint: str, key: str) -> str | None:
        """What speaks against somebody who claims to be a client; None where nothing does."""
        if client_id not in self.known:
            self.known[client_id] = fingerprint, key
        before, before_key = self.known[client_id]
        if fingerprint != before:
            return f"client {client_id} has other data than before; give it back its data, or start a new run"
        if key != before_key:
            return f"client {client_id} was known by another key; use the key that it had, or start a new run"
        return None

    def on_fit_start(self, run: Run) -> None:
        """Refuse a run that goes on with clients who are not those that it began with.

        Raises:
            ConfigError: For the first of them.
        """
        for client_id, (fingerprint, key) in sorted(self.present().items()):
            if (why := self.check(client_id, fingerprint, key)) is not None:
                raise ConfigError(why)

    def state_dict(self) -> dict[str, Any]:
        """The run's name, and its clients."""
        return {"run_id": self.run_id, "known": {str(one): list(known) for one, known in self.known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be the run that was saved."""
        self.run_id = str(state["run_id"])
        self.known = {int(one): (str(known[0]), str(known[1])) for one, known in state["known"].items()}


@dataclass(slots=True)
class Home:
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
    """

    grid: Grid
    identity: Identity
    settings: Mapping[str, str]
    num_clients: int
    say: Callable[[str], object] = print
    limit: int = MOST_BYTES
    homes: dict[int, Home] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identity.present = self._present

    def home(self, client_id: int) -> Home | None:
        """Where a client lives; None where its node is not there."""
        node = self._owner.get(client_id)
        return None if node is None else self.homes[node]

    def reports(self) -> dict[int, ClientReport]:
        """What is known of the clients that are there."""
        return {one: report for home in self.homes.values() for one, report in home.clients.items()}

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every client of the population is there.

        Raises:
            ConfigError: If one is not, after a time; it says which, and who was refused and why.
        """
        self.await_clients(range(self.num_clients), seconds)
        missing = [one for one in range(self.num_clients) if one not in self._owner]
        if missing:
            why = "".join(f"; refused: {cause}" for cause in dict.fromkeys(self._refused.values()))
            who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise ConfigError(
                f"no node has come for client {who} within {seconds:g} s; start it with lit-fed node{why}"
            )
        if together := [one for home in self.homes.values() if home.sums for one in home.clients]:
            self.say(
                f"the nodes of {named(together)} tell their clients' metrics in sums only: clients.csv lacks them, and "
                "metrics over clients have a mean but no _std, _p10 and _min"
            )

    def await_clients(self, client_ids: Iterable[int], seconds: float) -> None:
        """Wait until some clients are there, but not for ever."""
        wanted, end = set(client_ids), time.monotonic() + seconds
        self.refresh()
        while not wanted <= self._owner.keys() and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            self.refresh()

    def refresh(self) -> None:
        """Look who has come and gone, ask those who are new, and take in what they have said; it does not wait."""
        self._keys = dict(self.grid.nodes())
        for node in [node for node in self.homes if node not in self._keys]:
            self.forget(node)
        self._refused = {node: why for node, why in self._refused.items() if node in self._keys}
        known = {*self.homes, *self._refused, *self._asked.values()}
        for node in self._keys:
            if node not in known:
                self._asked[self.grid.push(node, encode(self._hello()))] = node
        for reply in self.grid.pull(list(self._asked)) if self._asked else ():
            self._take_in(self._asked.pop(reply.message_id), reply)

    def forget(self, node: int) -> None:
        """A node is not there, or no more the one that it was."""
        home = self.homes.pop(node, None)
        for client_id in home.clients if home is not None else ():
            self._owner.pop(client_id, None)

    def ask(self, messages: Mapping[int, Message], seconds: float) -> dict[int, Message]:
        """Ask nodes; the answers of those that have one, by node."""
        waiting = {self.grid.push(node, encode(message)): node for node, message in messages.items()}
        found, end = {}, time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            replies = list(self.grid.pull(list(waiting)))
            for reply in replies:
                node = waiting.pop(reply.message_id)
                if not reply.error and (answer := decode(reply.blob, self.limit)).word == "answer":
                    found[node] = answer
            if not replies:
                time.sleep(_PAUSE_S)
        return found

    def _hello(self) -> Message:
        from lit_fed import __version__

        return Message("hello", {"protocol": PROTOCOL, "version": __version__, "settings": dict(self.settings)})

    def _take_in(self, node: int, reply: Reply) -> None:
        """Believe a node who lives there, or say why not."""
        if reply.error or node not in self._keys:
            return  # it is asked again where it is still there
        try:
            answer = decode(reply.blob, self.limit)
            if answer.word == "failure":
                self._refuse(node, answer.get("cause", str)[:300])
                return
            clients = self._read_clients(answer.get("clients", dict))
            boot, sums = answer.get("boot", str), answer.get("sums", bool)
        except LitFedError as error:
            self._refuse(node, str(error))
            return
        key = self._keys[node]
        for client_id, report in clients.items():
            if (other := self._owner.get(client_id)) is not None and not (key and key == self.homes[other].key):
                self._refuse(node, f"nodes {other} and {node} both claim client {client_id}; stop one of them")
                return
            if (why := self.identity.check(client_id, report.fingerprint, key)) is not None:
                self._refuse(node, why)
                return
        for other in {self._owner[one] for one in clients if one in self._owner}:
            self.forget(other)  # the same key: it was started again
        self.homes[node] = Home(node, key, boot, clients, sums)
        self._owner |= dict.fromkeys(clients, node)

    def _read_clients(self, claimed: Mapping[str, Any]) -> dict[int, ClientReport]:
        clients = {}
        for name, content in claimed.items():
            if not name.isdecimal() or int(name) >= self.num_clients or type(content) is not dict:
                raise WireError(f"a node claims {name[:20]!r}; clients are 0 to {self.num_clients - 1}")
            clients[int(name)] = _read_report(content, f"client {name}")
        if not clients:
            raise WireError("a node claims no client; start it with --client")
        return clients

    def _refuse(self, node: int, why: str) -> None:
        self._refused[node] = why
        self.say(f"refused node {node}: {why}")

    def _present(self) -> dict[int, tuple[str, str]]:
        return {
            one: (report.fingerprint, home.key) for home in self.homes.values() for one, report in home.clients.items()
        }


def _read_report(content: Mapping[str, Any], who: str) -> ClientReport:
    samples, histogram, fingerprint, scale = (
        content.get(key) for key in ("samples", "histogram", "fingerprint", "scale")
    )
    counts = histogram if type(histogram) is list else []
    if (
        not all(type(count) is int and 0 <= count < 2**53 for count in (samples, *counts))
        or not (histogram is None or type(histogram) is list)
        or type(fingerprint) is not str
        or not _SHA256.fullmatch(fingerprint)
        or scale not in (None, *SCALES)
    ):
        raise WireError(f"what {who} reports of its data cannot be; both ends must run the same lit_fed")
    assert type(samples) is int
    return ClientReport(samples, None if histogram is None else tuple(counts), fingerprint, scale)
