"""The server's map from clients to nodes as they connect, and the settings on which both ends must agree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import named
from lit_fed.data.population.census import ClientReport, Scale
from lit_fed.data.population.figures import fingerprint
from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages.frozen import Hashes
from lit_fed.federation.messages.schema import Hello
from lit_fed.federation.messages.wire import MOST_BYTES, PROTOCOL, Message, encode, shown
from lit_fed.federation.server.heard import LONGEST_GREETING, greeting, hear
from lit_fed.federation.transport.serving import Grid, Reply
from lit_fed.networks import hash_of_weights
from lit_fed.yaml_text import read_yaml

if TYPE_CHECKING:
    from lit_fed.federation.keys.node_keys import Grant


_TRAINER = (
    "seed", "max_rounds", "local_epochs", "local_steps", "limit_train_batches", "fast_dev_run", "kinds",
    "precision", "buffers", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches",
    "schedule_steps", "uplink_codec", "downlink_codec", "protocols", "evaluate_on", "num_threads", "channels_last",
    "privacy", "aggregation", "attack", "secure_sum",
)  # fmt: skip
OWN_DATA: dict[str, type] = {"root": str, "download": bool, "num_workers": int}
"""Data settings that are local to each end, with their types: where the files are and how they are read."""
OWN_PRIVACY = {
    "ClientLevel": ("key_file", "withhold"),  # the server makes the promise
    "SampleLevel": ("key_file", "withhold", "noise_multiplier", "epsilon", "delta", "physical_batch"),  # each node
}
"""Privacy settings that are local to each end, by class."""


def agreed(config: str) -> dict[str, str]:
    """Return the settings of a resolved YAML configuration on which the bits of a run depend, each as JSON."""
    content = read_yaml(config) or {}
    trainer, data = content.get("trainer") or {}, content.get("data") or {}
    settings = {key: value for key, value in (data.get("init_args") or {}).items() if key not in OWN_DATA}
    if isinstance(file := settings.get("normalize"), str):  # its figures are common, its place is each end's own
        settings["normalize"] = fingerprint(file)
    agreed_on = {key: trainer[key] for key in _TRAINER if key in trainer}
    if isinstance(private := agreed_on.get("privacy"), Mapping):
        own = OWN_PRIVACY.get(str(private.get("class_path")).rpartition(".")[2], OWN_PRIVACY["ClientLevel"])
        alike = {key: value for key, value in (private.get("init_args") or {}).items() if key not in own}
        agreed_on["privacy"] = {**private, "init_args": alike}
    parts = {
        "trainer": agreed_on,
        "data": {**data, "init_args": settings},
        "model": content.get("model"),
        "algorithm": content.get("algorithm"),
    }
    found = {".".join(path): value for path, value in _leaves(parts, ())}
    for key, file in found.items():
        if key.endswith(".weights") and isinstance(file, str) and Path(file).exists():  # as of `normalize`
            found[key] = hash_of_weights(Path(file), key)
    return {key: json.dumps(value) for key, value in found.items()}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Describe the first setting that differs; None if all match. The values of ``there`` are untrusted."""
    for key in sorted(here.keys() | there.keys()):
        mine, other = here.get(key), there.get(key)
        if mine != other:
            return f"{key[:100]} is {_shown(mine)} on the node and {_shown(other)} on the server"
    return None


def mismatch(settings: Mapping[str, str], hello: Hello, more: str = "") -> str | None:
    """Describe why a node with these settings cannot work for the server that greets it; None if it can.

    ``more`` is appended to the remedy for a setting that differs.
    """
    from lit_fed import __version__

    if hello.protocol != PROTOCOL or hello.version != __version__:
        theirs = shown(hello.version, 20)
        return f"the node runs lit_fed {__version__} and the server {theirs}; install the same version"
    odd = difference(settings, hello.settings)
    return None if odd is None else f"{odd}; use the same configuration on both ends{more}"


def _shown(value: str | None) -> str:
    return "not set" if value is None else str(value)[:80]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _leaves(entry, (*path, str(key)))
    else:
        yield path, value


T = TypeVar("T")

_PAUSE_S = 0.05  # interval of polls for answers
_SAY_S = 60.0  # interval of messages about missing clients
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


class Identity(Callback):
    """Stores a run's unique id and its clients' reports in the run's checkpoints.

    Whose key may claim a client is the key file's word, today's: a replaced key needs no new run.
    """

    tells_of_clients = True

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.known: dict[int, ClientReport] = {}
        self.present: Callable[[], Mapping[int, ClientReport]] = dict
        self._begun = False

    def check(self, client_id: int, report: ClientReport) -> str | None:
        """Return why somebody cannot be a client; None if there is no objection."""
        before = self.known.get(client_id, report)
        if report.fingerprint != before.fingerprint:
            return f"client {client_id} has different data than before; restore its data, or start a new run"
        if (report.samples, report.histogram) != (before.samples, before.histogram):
            return f"client {client_id} reports different numbers of samples than before; start a new run"
        return None

    def accept(self, clients: Mapping[int, ClientReport]) -> None:
        """Record clients' reports. Before the run begins, nothing is recorded, so that nodes may swap clients."""
        if self._begun:
            self.known |= clients

    def begin(self) -> dict[int, ClientReport]:
        """Record the connected clients' reports, hold nodes to them from now on, and return all that are known."""
        self._begun = True
        self.accept(self.present())
        return dict(sorted(self.known.items()))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "known": {str(client_id): asdict(report) for client_id, report in self.known.items()},
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; raise `ConfigError` if a connected client is not the one that the checkpoint knows."""
        self.run_id = str(state["run_id"])
        self.known = {int(name): _known(**report) for name, report in state["known"].items()}
        for client_id, report in sorted(self.present().items()):
            if (why := self.check(client_id, report)) is not None:
                raise ConfigError(why)
        self.accept(self.present())


def _known(samples: int, histogram: Sequence[int] | None, fingerprint: str, scale: Scale | None) -> ClientReport:
    return ClientReport(int(samples), None if histogram is None else tuple(histogram), str(fingerprint), scale)


@dataclass(slots=True)
class KnownNode:
    """A registered node.

    The key is empty without authentication, ``boot`` is the id of the node's process, ``frozen`` has the hashes of its
    frozen tensors, and ``smallest`` is the least number of nodes with clients in a secure sum to which it consents.
    """

    node: int
    key: str
    boot: str
    clients: Mapping[int, ClientReport]
    sums: bool = False
    frozen: Hashes = field(default_factory=dict)
    smallest: int = 0


class _Refusal(NamedTuple):
    why: str
    again: float
    pause: float
    said: int


@dataclass
class Roster:
    """The registered nodes.

    Args:
        settings: The settings that must match, see `lit_fed.federation.server.roster`.
        limit: Maximum size of a message, bytes.
        num_classes: Classes of the data; None without classes.
        node_clients: The clients that a node may claim, by the node's public key; None without keys.
    """

    grid: Grid
    identity: Identity
    settings: Mapping[str, str]
    num_clients: int
    say: Callable[[str], object] = print
    limit: int = MOST_BYTES
    num_classes: int | None = None
    node_clients: Mapping[str, Grant] | None = None
    homes: dict[int, KnownNode] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)
    _refused: dict[int, _Refusal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identity.present = self._present

    def home(self, client_id: int) -> KnownNode | None:
        """Return a client's node; None if it is not connected."""
        node = self._owner.get(client_id)
        return None if node is None else self.homes[node]

    def is_connected(self, node: int) -> bool:
        """Whether a node was connected at the last refresh, registered or not."""
        return node in self._keys

    def gather(self, gathering: Gathering) -> None:
        """Wait until every client is connected; print the missing clients every minute."""
        begun = said = time.monotonic()
        self.refresh()
        while (missing := self._missing(range(self.num_clients))) and (
            now := time.monotonic()
        ) < begun + gathering.wait_s:
            if now > said + _SAY_S:
                said = now
                self.say(f"waiting for {named(missing)}: {now - begun:.0f} s of at most {gathering.wait_s:g} s")
            time.sleep(_PAUSE_S)
            self.refresh()
        if missing:
            why = "".join(
                f"; refused: {cause}" for cause in dict.fromkeys(refusal.why for refusal in self._refused.values())
            )
            unknown = [client_id for client_id in missing if client_id not in self.identity.known]
            who = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            if gathering.least is None or len(self._owner) < gathering.least or unknown:
                raise ConfigError(
                    f"no node connected for client {who} within {gathering.wait_s:g} s; start it with lit-fed node{why}"
                )
            here = f"{len(self._owner)} of {self.num_clients} clients"
            self.say(Alert(f"the run goes on without client {who}, {here}{why}"))
            return
        samples = {client_id: report.samples for client_id, report in self._present().items()}
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
        self.grid.drop(gone := [message for message, node in self._asked.items() if node not in self._keys])
        self._asked = {message: node for message, node in self._asked.items() if message not in gone}
        known, now = {*self.homes, *self._asked.values()}, time.monotonic()
        for node in self._keys:
            if node not in known and (node not in self._refused or now > self._refused[node].again):
                self._asked[self.grid.push(node, encode(self._hello()), LONGEST_GREETING)] = node
        for reply in self.grid.pull(list(self._asked)) if self._asked else ():
            if (asked := self._asked.pop(reply.message_id, None)) is not None:
                self._take_in(asked, reply)

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
    ) -> dict[int, T]:
        """Send messages to nodes, wait for the answers, and print which answers are invalid.

        Args:
            messages: The messages by node.
            seconds: Time-out.
            read: Converts a node and its answer; a `WireError` skips the node.
            most: Maximum size of an answer, bytes.
        """
        waiting = {self.grid.push(node, encode(message), most): node for node, message in messages.items()}
        answers, end = dict[int, T](), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            replies = list(self.grid.pull(list(waiting)))
            for reply in replies:
                if (node := waiting.pop(reply.message_id, None)) is None or reply.error:
                    continue
                try:
                    answers[node] = hear(reply.blob, self.limit, most, partial(read, node))
                except WireError as error:
                    self.say(Alert(f"the answer of node {node} is dropped: {error}"))
            if not replies:
                time.sleep(_PAUSE_S)
        self.grid.drop(waiting)
        return answers

    def _missing(self, clients: Iterable[int]) -> list[int]:
        return [client_id for client_id in clients if client_id not in self._owner]

    def _hello(self) -> Message:
        from lit_fed import __version__

        return Message.of(Hello(PROTOCOL, __version__, self.settings))

    def _take_in(self, node: int, reply: Reply) -> None:
        """Register a node, or refuse it and print why."""
        if reply.error:
            self._put_off(node, "it did not answer the greeting", aloud=False)
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
        for other in {self._owner[client_id] for client_id in said.clients if client_id in self._owner}:  # the same key
            self.forget(other)
            if other != node:  # the node restarted before its old session timed out
                self._put_off(other, f"node {node} replaces it, with the same key", aloud=False)
        self._refused.pop(node, None)
        self.homes[node] = KnownNode(node, key, said.boot, said.clients, said.sums, said.frozen, said.smallest)
        self._owner |= dict.fromkeys(said.clients, node)
        self.identity.accept(said.clients)
        self.say(
            f"node {node} connected with {named(said.clients)}: {len(self._owner)} of {self.num_clients} clients are "
            "connected"
        )

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
        said = 0 if before is None else before.said
        if aloud and said < _MOST_SAID and (before is None or before.why != why):
            self.say(Alert(f"refused node {node}: {why}"))
            said += 1
        self._refused[node] = _Refusal(why, time.monotonic() + pause, pause, said)

    def _present(self) -> dict[int, ClientReport]:
        return {client_id: report for home in self.homes.values() for client_id, report in home.clients.items()}
