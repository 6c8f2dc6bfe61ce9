"""How a cohort is trained that lives elsewhere: a message a client and round, and what comes back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from lit_fed.deployment.grid import Reply
from lit_fed.deployment.roster import Home, Roster
from lit_fed.deployment.wire import Message, check_metrics, check_payload, check_sums, check_weight, decode, encode
from lit_fed.engine.client import Client
from lit_fed.engine.executor import Executor, Question
from lit_fed.engine.files import Version, VersionedFiles
from lit_fed.engine.forecast import untrained_answer
from lit_fed.engine.payload import Channel, ClientUpdate, Layout, decoded, layout_of, num_bytes
from lit_fed.engine.session import Broadcast, Session
from lit_fed.engine.totals import Totals
from lit_fed.errors import ClientFailure, ConfigError, NobodyLeft, WireError

_PAUSE_S = (0.005, 0.25)  # between two looks for answers: from the shortest to the longest
_LOOK_S = 3.0  # between two looks who is there
_AT_ONCE = {"train": 4, "ask": 64}  # messages a node may have before it, so that answers take bounded memory


@dataclass(frozen=True)
class Patience:
    """How long a server waits.

    Args:
        round_s: Seconds that a cohort may take; who has not answered then is too late.
        return_s: Seconds in which a client whose node has gone may come back in a round.
        smallest_cohort: A round with fewer answers stops the run.

    Raises:
        ConfigError: For times or cohorts that cannot be.
    """

    round_s: float = 600.0
    return_s: float = 0.0
    smallest_cohort: int = 1

    def __post_init__(self) -> None:
        if not self.round_s > 0 or not self.return_s >= 0 or self.smallest_cohort < 0:
            raise ConfigError(
                f"a round of {self.round_s:g} s with {self.return_s:g} s to come back and a smallest cohort of "
                f"{self.smallest_cohort} cannot be; give a time above 0, one from 0, and a number from 0"
            )


class NodeFiles(VersionedFiles):
    """Where clients' states lie: on their nodes; here, only updates that came late.

    Args:
        directory: Of the late updates.
        held: Asks the nodes which versions they hold.
    """

    def __init__(self, directory: Path | None, held: Callable[[], Iterable[tuple[str, int]]]) -> None:
        super().__init__(directory)
        self.held = held
        self.dropped: dict[str, list[int]] = {}
        """By client: the versions that are needed no more, until its node is told."""

    def delete(self, name: str, round_idx: int) -> None:
        """Delete one version, here or with the next message to its client."""
        if name.isdecimal():
            self.dropped.setdefault(name, []).append(round_idx)
        else:
            super().delete(name, round_idx)

    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        """Take one version from another folder's; what lies on nodes is where it belongs."""
        if not name.isdecimal():
            super().copy(name, version, source)

    def rounds(self) -> Iterator[tuple[str, int]]:
        """Every name and round that has a file, anywhere."""
        yield from super().rounds()
        yield from self.held()


class _Sent(NamedTuple):
    client_id: int
    node: int


@dataclass
class _Work:
    """What a cohort is asked, and what has become of it.

    Args:
        word: ``train`` or ``ask``.
        broadcast: What it receives.
        fields: What else the message says.
        layouts: What answers must look like, by kind.
        queue: Who has not been told yet.
        sent: Messages under way, by id.
        busy: Messages before each node.
        end: When it is too late.
        together: By the name of a node's process, all clients that are told the same there.
    """

    word: str
    broadcast: Broadcast
    fields: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    queue: deque[int]
    end: float
    sent: dict[str, _Sent] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    together: dict[str, list[int]] = field(default_factory=dict)


class GridExecutor(Executor):
    """Sends every client its message, and takes in the answers as they come.

    Args:
        session: The server's, which enters no client.
        roster: Knows who lives where.
        channel: The wire's codecs.
        patience: How long it waits.
        tolerant: Go on without the answers of clients that cannot be tested.
    """

    def __init__(
        self, session: Session, roster: Roster, channel: Channel, patience: Patience, tolerant: bool = False
    ) -> None:
        self.session = session
        self.roster = roster
        self.channel = channel
        self.patience = patience
        self.tolerant = tolerant
        self.num_bytes = 0
        self._totals: list[Totals] = []
        session.store.keeper = self._files

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Let every client train where it lives."""
        ids = list(client_ids)
        arrived = 0
        for outcome in self._work("train", ids, broadcast, {}, self._layouts(ids, broadcast)):
            arrived += isinstance(outcome, ClientUpdate)
            if outcome is not None:
                yield outcome
        if arrived < min(self.patience.smallest_cohort, len(ids)):
            raise NobodyLeft(
                f"round {broadcast.round_idx} has {arrived} answers of {len(ids)} clients, and the smallest cohort is "
                f"{self.patience.smallest_cohort}; wait longer, or go on with --ckpt_path last when the nodes are back"
            )

    def ask(self, question: Question, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Ask every client where it lives.

        Raises:
            ClientFailure: If one cannot answer, and that is not tolerated.
        """
        ids = list(client_ids)
        layouts = {self.session.kinds[client_id]: question.layout for client_id in ids}
        fields = {"protocol": question.protocol, "subset": question.subset}
        for outcome in self._work("ask", ids, broadcast, fields, layouts):
            if isinstance(outcome, ClientUpdate):
                yield outcome
            elif outcome is not None:
                if not self.tolerant:
                    raise outcome
                self.roster.say(f"{outcome}; its {question.protocol} metrics are left out")

    def told_together(self) -> list[Totals]:
        """What nodes told of their clients in sums."""
        return self._totals

    def check_kept(self, session: Session, broadcast: Broadcast) -> None:
        """Nothing: a node looks at a client's state before the client goes on with it."""

    # ------------------------------------------------------------------ messages

    def _work(
        self, word: str, ids: list[int], broadcast: Broadcast, fields: Mapping[str, Any], layouts: Mapping[str, Layout]
    ) -> Iterator[ClientUpdate | ClientFailure | None]:
        begun = time.monotonic()
        self._totals = []
        work = _Work(word, broadcast, fields, layouts, deque(ids), begun + self.patience.round_s)
        self.roster.refresh()
        pause, looked = _PAUSE_S[0], begun
        while work.queue or work.sent:
            yield from self._push(work, may_return=time.monotonic() < begun + self.patience.return_s)
            replies = list(self.roster.grid.pull(list(work.sent)))
            for reply in replies:
                yield from self._take_in(work, reply)
            now = time.monotonic()
            if now > work.end:
                yield from self._give_up(work)
                return
            if now - looked > _LOOK_S:
                looked = now
                self.roster.refresh()
                yield from self._miss(work)
            pause = _PAUSE_S[0] if replies else min(2 * pause, _PAUSE_S[1])
            if not replies and work.sent:
                time.sleep(pause)

    def _push(self, work: _Work, may_return: bool) -> Iterator[ClientFailure]:
        """Tell those whose node has time."""
        for _ in range(len(work.queue)):
            client_id = work.queue.popleft()
            home = self.roster.home(client_id)
            if home is None and may_return:
                work.queue.append(client_id)
                time.sleep(_PAUSE_S[1])
                self.roster.refresh()
            elif home is None:
                yield self._failure(client_id, work, "its node is not there; start it again")
            elif work.busy.get(home.node, 0) >= _AT_ONCE[work.word]:
                work.queue.append(client_id)
            else:
                blob = encode(self._message(client_id, home, work))
                if len(blob) > self.roster.limit:
                    raise WireError(
                        f"the message to client {client_id} has {len(blob):,} bytes, over the limit of "
                        f"{self.roster.limit:,}; raise --most_bytes here and on the nodes"
                    )
                self.num_bytes += len(blob)
                work.sent[self.roster.grid.push(home.node, blob)] = _Sent(client_id, home.node)
                work.busy[home.node] = work.busy.get(home.node, 0) + 1

    def _message(self, client_id: int, home: Home, work: _Work) -> Message:
        store, kind, broadcast = self.session.store, self.session.kinds[client_id], work.broadcast
        dropped = store.files.dropped.pop(str(client_id), []) if isinstance(store.files, NodeFiles) else []
        fields = {
            "client": client_id, "round": broadcast.round_idx, "run": self.roster.identity.run_id, "boot": home.boot,
            "version": store.version(client_id), "drop": dropped, "together": self._together(client_id, home, work),
            **work.fields,
        }  # fmt: skip
        tensors = {"payload": broadcast.wire[kind], "frozen": broadcast.frozen.get(kind, {})}
        return Message(cast("Any", work.word), fields, tensors)

    def _together(self, client_id: int, home: Home, work: _Work) -> list[int]:
        """All clients that are told the same on a client's node, as far as is known when the first of them is."""
        if client_id not in work.together.get(home.boot, ()):
            others = [one for one in work.queue if self.roster.home(one) is home]
            work.together[home.boot] = sorted([client_id, *others])
        return work.together[home.boot]

    def _take_in(self, work: _Work, reply: Reply) -> Iterator[ClientUpdate | ClientFailure | None]:
        sent = work.sent.pop(reply.message_id)
        work.busy[sent.node] -= 1
        if reply.error:
            yield self._failure(sent.client_id, work, f"its node gave no answer: {reply.error[:300]}")
            return
        self.num_bytes += len(reply.blob)
        try:
            answer = decode(reply.blob, self.roster.limit)
            if (answer.get("client", int), answer.get("round", int)) != (sent.client_id, work.broadcast.round_idx):
                raise WireError(f"the answer of client {sent.client_id} is to another message; it is left out")
            self._add_sums(answer, work, sent)
            if answer.word == "failure" and answer.get("moved", bool) and sent.client_id not in work.retried:
                work.retried.add(sent.client_id)
                work.queue.append(sent.client_id)
                self.roster.forget(sent.node)
                self.roster.await_clients([sent.client_id], min(_LOOK_S, work.end - time.monotonic()))
            elif answer.word == "failure":
                yield self._failure(sent.client_id, work, " ".join(answer.get("cause", str).split())[:300])
            else:
                yield self._read(sent.client_id, answer, work)
        except WireError as error:
            yield self._failure(sent.client_id, work, str(error))

    def _add_sums(self, answer: Message, work: _Work, sent: _Sent) -> None:
        """Take in what comes with the last answer of a node that tells nothing of single clients."""
        sums, home = answer.get("sums", dict), self.roster.homes.get(sent.node)
        if sums and home is not None:
            samples = [report.samples for report in home.clients.values()]
            most = sum(samples) if work.word == "train" else len(samples)
            self._totals.append(check_sums(sums, f"the node of client {sent.client_id}", most))

    def _read(self, client_id: int, answer: Message, work: _Work) -> ClientUpdate | None:
        """An answer, once nothing in it can do harm.

        Raises:
            WireError: If something can.
        """
        who, kind, trained = f"client {client_id}", self.session.kinds[client_id], work.word == "train"
        if answer.get("silent", bool) and not trained:
            return None
        weight = check_weight(answer.fields.get("weight"), who)
        metrics = check_metrics(answer.get("metrics", dict), who, finite=trained)
        wire = answer.tensors.get("payload", {})
        try:
            payload = decoded(wire, self.channel.uplink)
        except Exception as error:  # a codec is told what anybody may have written
            raise WireError(f"the answer of {who} cannot be decoded: {' '.join(str(error).split())[:200]}") from error
        check_payload(payload, work.layouts[kind], who, self.session.algorithm.varying if trained else ())
        version = _version(answer, work.broadcast.round_idx, who) if trained else None
        if version is not None:
            self.session.store.note(client_id, version)
        device = self.session.loops[kind].fabric.device
        ordered = {name: payload[name].to(device) for name in work.layouts[kind]}
        return ClientUpdate(client_id, ordered, weight, metrics, kind, uplink_bytes=num_bytes(wire))

    def _miss(self, work: _Work) -> Iterator[ClientFailure]:
        """Those whose node has left while they were at work."""
        for message_id, sent in list(work.sent.items()):
            if sent.node not in self.roster.homes:
                del work.sent[message_id]
                work.busy[sent.node] -= 1
                yield self._failure(sent.client_id, work, "its node has left while it was at work")

    def _give_up(self, work: _Work) -> Iterator[ClientFailure]:
        late = sorted([sent.client_id for sent in work.sent.values()] + list(work.queue))
        for client_id in late:
            yield self._failure(client_id, work, f"it gave no answer within {self.patience.round_s:g} s")

    def _failure(self, client_id: int, work: _Work, cause: str) -> ClientFailure:
        return ClientFailure(client_id, work.broadcast.round_idx, cause)

    # ------------------------------------------------------------------ what answers look like, and where states lie

    def _layouts(self, ids: Iterable[int], broadcast: Broadcast) -> dict[str, Layout]:
        """What an update of each kind must look like: as that of a client that has not trained."""
        session, found = self.session, {}
        for client_id in ids:
            kind = session.kinds[client_id]
            if kind not in found:
                data = cast("Any", _Elsewhere(session.data))
                client = Client(
                    client_id, broadcast.round_idx, "train", session.seed, session.loops[kind].model, data,
                    session.work, received=broadcast.payloads[kind],
                )  # fmt: skip
                found[kind] = layout_of(untrained_answer(client, session.algorithm))
        return found

    def _files(self, directory: Path) -> NodeFiles:
        return NodeFiles(directory, self._held)

    def _held(self) -> Iterator[tuple[str, int]]:
        """The versions that the nodes hold of this run, each of clients that live there."""
        message = Message("held", {"run": self.roster.identity.run_id})
        for node, answer in self.roster.ask(dict.fromkeys(self.roster.homes, message), _LOOK_S * 10).items():
            own = {str(client_id) for client_id in self.roster.homes[node].clients}
            for entry in answer.get("held", list):
                if type(entry) is list and len(entry) == 2 and entry[0] in own and type(entry[1]) is int:
                    yield entry[0], entry[1]


class _Elsewhere:
    """The data of a population whose clients are elsewhere: all that is known, and loaders without batches."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_loader(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return []

    val_loader = calibration_loader = train_loader


def _version(answer: Message, round_idx: int, who: str) -> Version | None:
    version = answer.fields.get("version")
    if version is None:
        return None
    if type(version) is not list or [type(part) for part in version] != [int, int]:
        raise WireError(f"the version of the state of {who} is none; both ends must run the same lit_fed")
    if version[0] != round_idx or not 0 <= version[1] < 2**32:
        raise WireError(f"the state of {who} is of round {version[0]}, in round {round_idx}; it is left out")
    return version[0], version[1]
