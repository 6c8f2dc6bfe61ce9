"""The executor of a federation: it trains a cohort with one message per client and round."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import named
from lit_fed.engine.clients.executor import Executor, Question, layouts_of
from lit_fed.engine.clients.session import Session
from lit_fed.engine.storage.packs import Version, VersionedFiles
from lit_fed.engine.wire.payload import Broadcast, Channel, ClientUpdate, Layout
from lit_fed.engine.wire.totals import Total, Totals, exact_sum
from lit_fed.errors import ClientFailure, NobodyLeft, WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages.frozen import KnownHashes
from lit_fed.federation.messages.schema import MOST_DROPPED, Ask, ListStates, Train
from lit_fed.federation.messages.wire import LARGEST, MOST_METRICS, OF_WORK, Message, Ranges, encode, shown
from lit_fed.federation.server.heard import Due, Heard, answer, hear, held
from lit_fed.federation.server.roster import KnownNode, Roster
from lit_fed.federation.server.summing import Summing
from lit_fed.federation.transport.serving import Reply

_PAUSE_S = (0.005, 0.25)  # shortest and longest interval of polls for answers
_LOOK_S = 3.0  # interval of looking for connected nodes
_RETURN_S = 0.25  # the same, while the round waits for a node to reconnect
_KINDS = {"train": Train, "ask": Ask}
_AT_ONCE = {"train": 4, "ask": 64}  # maximum number of pending messages per node, which bounds the memory of answers
_FAR = 100.0  # times the median magnitude of a metric
_MOST_CAUSES = 20  # maximum number of distinct causes of failure per client

Clients = tuple[int, ...]


@dataclass(frozen=True)
class Patience:
    """Time-outs of a round.

    Args:
        round_s: Seconds after which a client without an answer fails.
        return_s: Seconds from the start of a round in which a disconnected node may reconnect.
        smallest_cohort: Minimum number of answers; a round with fewer stops the run.
    """

    round_s: float = 600.0
    return_s: float = 0.0
    smallest_cohort: int = 1

    def __post_init__(self) -> None:
        check_range("--patience.round_s", self.round_s, above=0, infinite=True, why=" s")
        check_range("--patience.return_s", self.return_s, least=0, infinite=True, why=" s")
        check_range("--patience.smallest_cohort", self.smallest_cohort, least=0)


def implausible(values: Mapping[Clients, float]) -> list[Clients]:
    """Find whose value of a metric would decide the mean alone.

    A value must be finite, and its magnitude at most a hundred times the median magnitude of three values or more (and
    of 1, so that metrics near 0 may vary). NaN stands for a metric that a client could not measure.
    """
    known = [abs(value) for value in values.values() if math.isfinite(value)]
    most = min(_FAR * max(median(known), 1.0), LARGEST) if len(known) > 2 else LARGEST
    return [who for who, value in values.items() if abs(value) > most]


class ServerEnd(Channel):
    """The server's end of a wire whose other end is a node: an executor yields updates that have crossed it."""

    @override
    def receive(self, update: ClientUpdate) -> ClientUpdate:
        return update


class NodeFiles(VersionedFiles):
    """Clients' states, which are on their nodes; only late updates are stored here, in ``directory``.

    Args:
        held: Asks the nodes which versions they hold.
    """

    def __init__(self, directory: Path | None, held: Callable[[], Iterable[tuple[str, int]]]) -> None:
        super().__init__(directory)
        self.held = held
        self.dropped: dict[str, list[int]] = {}
        """By client, the obsolete versions that its node does not know about yet."""

    @override
    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Drop versions; a client's node deletes them with the next message to it."""
        here = list[tuple[str, int]]()
        for name, round_idx in gone:
            if name.isdecimal():
                self.dropped.setdefault(name, []).append(round_idx)
            else:
                here.append((name, round_idx))
        super().forget(here, delete)

    @override
    def expect(self, name: str, round_idx: int) -> None:
        if name in self.dropped:
            self.dropped[name] = [at for at in self.dropped[name] if at != round_idx]

    @override
    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        if not name.isdecimal():  # nodes keep their clients' states
            super().copy(name, version, source)

    @override
    def rounds(self) -> Iterator[tuple[str, int]]:
        yield from super().rounds()
        yield from self.held()


class _Sent(NamedTuple):
    client_id: int
    node: int
    boot: str
    together: tuple[int, ...]


@dataclass
class _Work:
    """The progress of a request to a cohort.

    Args:
        word: ``train`` or ``ask``.
        fields: Further fields of the message.
        layouts: The expected layout of answers, by kind.
        queue: Clients without a message so far.
        end: The deadline.
        sent: Pending messages by id.
        busy: The number of pending messages by node's process.
        awaited: Clients whose node restarted, with the deadline for its reconnection.
        together: By node's process, all clients that get the same request.
        summed: The processes that have sent sums, and the clients of these sums.
    """

    word: str
    broadcast: Broadcast
    fields: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    queue: deque[int]
    end: float
    sent: dict[str, _Sent] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    awaited: dict[int, float] = field(default_factory=dict)
    together: dict[str, list[int]] = field(default_factory=dict)
    summed: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)


class GridExecutor(Executor):
    """Sends every client a message, and yields the outcomes in order of arrival.

    Args:
        session: The server's session, which never enters a client.
        tolerant: Continue without the answers of clients that fail an evaluation.
        sums: Of `trainer.secure_sum`: nodes keep what their clients answer, and sum it.
    """

    def __init__(
        self,
        session: Session,
        roster: Roster,
        channel: Channel,
        patience: Patience,
        tolerant: bool = False,
        sums: Summing | None = None,
    ) -> None:
        self.sums = sums
        self.session = session
        self.roster = roster
        self.channel = channel
        self.patience = patience
        self.tolerant = tolerant
        self.num_bytes = 0
        self._hashes = KnownHashes()
        self._totals: list[tuple[Clients, dict[str, Total]]] = []  # of the last work, and of which clients
        self._odd: set[Clients] = set()  # whose values a line has said that means leave out
        self._round_idx = -1
        self._late: set[str] = set()  # nodes' processes that missed this round's deadline
        if sums is not None:
            sums.late = lambda: self._late
        self._unanswered: dict[str, _Sent] = {}  # their pending messages, also of earlier rounds
        self._names: dict[int, set[str]] = {}  # names of metrics by client
        self._causes: dict[int, set[str]] = {}  # causes of failure by client
        self._ranges: Ranges = {
            name: range_
            for loop in session.loops.values()
            for name, range_ in getattr(loop.model.task, "ranges", {}).items()
        }
        self._bounded = {name for name, range_ in self._ranges.items() if all(map(math.isfinite, range_))}
        session.store.keeper = partial(NodeFiles, held=self._held)

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        ids = list(client_ids)
        arrived = 0
        nothing: dict[str, Layout] = {self.session.kinds[client_id]: {} for client_id in ids}
        layouts = layouts_of(self.session, ids, broadcast) if self.sums is None else nothing
        for outcome in self._work("train", ids, broadcast, {}, layouts):
            arrived += isinstance(outcome, ClientUpdate)
            if outcome is not None:
                yield outcome
        if arrived < min(self.patience.smallest_cohort, len(ids)):
            raise NobodyLeft(
                f"round {broadcast.round_idx} has answers from {arrived} of {len(ids)} clients, and the smallest "
                f"cohort is {self.patience.smallest_cohort}; raise the time-out, or resume with --ckpt_path last when "
                "the nodes are connected"
            )

    @override
    def ask(
        self, question: Question, client_ids: Iterable[int], broadcast: Broadcast
    ) -> Iterator[ClientUpdate | ClientFailure]:
        """Ask every client on its node; report a tolerated failure, and yield no other answer after another one."""
        ids = list(client_ids)
        layouts = {self.session.kinds[client_id]: question.layout for client_id in ids}
        fields = {"protocol": question.protocol, "subset": question.subset}
        answers = list[ClientUpdate]()  # of metrics alone
        for outcome in self._work("ask", ids, broadcast, fields, layouts):
            if isinstance(outcome, ClientUpdate):
                if question.layout:
                    yield outcome
                else:
                    answers.append(outcome)
            elif outcome is not None:
                if not self.tolerant:
                    yield outcome
                    return
                self.roster.say(Alert(f"{outcome}; its {question.protocol} metrics are missing"))
        told = {update.client_id: update.metrics for update in answers}
        self._leave_out(told, f"round {broadcast.round_idx}: {question.protocol}/", self._bounded)
        if self.sums is not None and answers:
            self._totals = [(tuple(told), dict(self.sums.ask(question, broadcast, list(told), self._ranges)))]
        yield from answers

    @override
    def told_together(self, logged: Mapping[int, dict[str, float]] | None = None, round_idx: int = 0) -> list[Totals]:
        if logged is not None:
            self._leave_out(logged, f"round {round_idx}: ", OF_WORK | {"staleness"})
        return [totals for _, totals in self._totals]

    def _leave_out(self, told: Mapping[int, dict[str, float]], where: str, known: Collection[str]) -> None:
        """Leave values that would decide a mean over clients, and over nodes' sums, out of it; say once of whom.

        Args:
            told: Metrics by client; NaN, as of a metric that could not be measured, replaces such values.
            where: The round, and a prefix of metrics, for the line.
            known: Names of metrics that are bounded, or not averaged.
        """
        columns: dict[str, dict[Clients, float]] = {}
        for client_id, metrics in told.items():
            for name, value in metrics.items():
                columns.setdefault(name, {})[client_id,] = value
        for clients, totals in self._totals:
            for name, total in totals.items():
                columns.setdefault(name, {})[clients] = exact_sum(total.parts) / max(total.weight, 1)
        for name in [name for name in columns if name not in known]:
            for who in implausible(columns[name]):
                if who not in self._odd:
                    self._odd.add(who)
                    odd = f"{where}{name} of {named(who)} is {columns[name][who]:.3g}"
                    self.roster.say(Alert(f"{odd}, {_FAR:g} times beyond the median; means leave out such values"))
                for clients, totals in self._totals:
                    if clients == who:
                        totals.pop(name, None)
                if len(who) == 1 and name in told.get(who[0], {}):
                    told[who[0]][name] = math.nan

    @override
    def check_kept(self, session: Session, broadcast: Broadcast) -> None:
        """Do nothing: a node checks a client's state before the client uses it."""

    # ------------------------------------------------------------------ messages

    def _work(
        self, word: str, ids: list[int], broadcast: Broadcast, fields: Mapping[str, Any], layouts: Mapping[str, Layout]
    ) -> Iterator[ClientUpdate | ClientFailure | None]:
        begun = time.monotonic()
        self._totals = []
        if word == "train" or broadcast.round_idx != self._round_idx:  # late nodes get another chance in each round
            self._round_idx, self._late = broadcast.round_idx, set()
        work = _Work(word, broadcast, fields, layouts, deque(ids), begun + self.patience.round_s)
        self.roster.refresh()
        pause, looked = _PAUSE_S[0], begun
        while work.queue or work.sent:
            absent = yield from self._push(work, may_return=time.monotonic() < begun + self.patience.return_s)
            replies = list(self.roster.grid.pull([*work.sent, *self._unanswered]))
            for reply in replies:
                yield from self._take_in(work, reply)
            now = time.monotonic()
            if now > work.end:
                yield from self._give_up(work)
                return
            if now - looked > (_RETURN_S if absent else _LOOK_S):
                looked = now
                self.roster.refresh()
                yield from self._miss(work)
            pause = _PAUSE_S[0] if replies else min(2 * pause, _PAUSE_S[1])
            if not replies and (work.sent or work.queue):
                time.sleep(pause)

    def _push(self, work: _Work, may_return: bool) -> Generator[ClientFailure, None, bool]:
        """Send messages to nodes with spare capacity; return whether a client's node is awaited."""
        absent, unanswered = False, Counter(sent.boot for sent in self._unanswered.values())
        for _ in range(len(work.queue)):
            client_id = work.queue.popleft()
            home = self.roster.home(client_id)
            pending = 0 if home is None else work.busy.get(home.boot, 0) + unanswered[home.boot]
            if home is None and (may_return or time.monotonic() < work.awaited.get(client_id, 0.0)):
                work.queue.append(client_id)
                absent = True
            elif home is None:
                yield self._failure(client_id, work, "its node is not connected; restart it")
            elif home.boot in self._late:
                yield self._failure(client_id, work, "its node already missed this round's deadline")
            elif pending >= _AT_ONCE[work.word]:
                work.queue.append(client_id)
            else:
                blob = encode(self._message(client_id, home, work))
                if len(blob) > self.roster.limit:
                    raise WireError(
                        f"the message to client {client_id} has {len(blob):,} bytes and exceeds the limit of "
                        f"{self.roster.limit:,}; raise --most_bytes here and on the nodes"
                    )
                self.num_bytes += len(blob)
                together = tuple(work.together[home.boot])
                sent = _Sent(client_id, home.node, home.boot, together)
                work.sent[self.roster.grid.push(home.node, blob, self._due(sent, work).most_bytes)] = sent
                work.busy[home.boot] = work.busy.get(home.boot, 0) + 1
        return absent

    def _message(self, client_id: int, home: KnownNode, work: _Work) -> Message:
        store, kind, broadcast = self.session.store, self.session.kinds[client_id], work.broadcast
        dropped: list[int] = []
        if isinstance(store.files, NodeFiles):
            every = store.files.dropped.pop(str(client_id), [])
            dropped, later = every[:MOST_DROPPED], every[MOST_DROPPED:]
            if later:
                store.files.dropped[str(client_id)] = later
        fields: dict[str, Any] = {
            "client": client_id, "round": broadcast.round_idx, "run": self.roster.identity.run_id, "boot": home.boot,
            "version": store.version(client_id), "drop": dropped, "together": self._together(client_id, home, work),
            **work.fields,
        }  # fmt: skip
        there = home.frozen.setdefault(kind, {})
        frozen, fields["frozen"] = self._hashes.divide(kind, broadcast.frozen.get(kind, {}), there)
        return Message.of(_KINDS[work.word](**fields), {"payload": broadcast.wire[kind], "frozen": frozen})

    def _together(self, client_id: int, home: KnownNode, work: _Work) -> list[int]:
        """Return all clients of a client's node that get the same request; fixed with the first message to the node."""
        if client_id not in work.together.get(home.boot, ()):
            others = [client_id for client_id in work.queue if self.roster.home(client_id) is home]
            work.together[home.boot] = sorted([client_id, *others])
        return work.together[home.boot]

    def _take_in(self, work: _Work, reply: Reply) -> Iterator[ClientUpdate | ClientFailure | None]:
        if (late := self._unanswered.pop(reply.message_id, None)) is not None:  # too late, but the node is responsive
            self._late.discard(late.boot)
            return
        if (sent := work.sent.pop(reply.message_id, None)) is None:
            return
        work.busy[sent.boot] -= 1
        if reply.error:
            yield self._failure(sent.client_id, work, f"its node did not answer: {shown(reply.error)}")
            return
        self.num_bytes += len(reply.blob)
        due = self._due(sent, work)
        try:
            heard = hear(reply.blob, self.roster.limit, due.most_bytes, lambda message: answer(message, due))
            self._know_names(sent.client_id, heard.metrics)
        except WireError as error:
            yield self._failure(sent.client_id, work, str(error))
            return
        if heard.sums:
            work.summed.add((sent.boot, sent.together))
            self._totals.append((sent.together, dict(heard.sums)))
        if heard.moved and sent.client_id not in work.awaited:
            work.awaited[sent.client_id] = min(time.monotonic() + _LOOK_S, work.end)
            work.queue.append(sent.client_id)
            if (home := self.roster.homes.get(sent.node)) is not None and home.boot == sent.boot:
                self.roster.forget(sent.node)
                self.roster.refresh()
        elif heard.cause:
            yield self._failure(sent.client_id, work, heard.cause)
        else:
            yield self._update(sent.client_id, heard, due)

    def _due(self, sent: _Sent, work: _Work) -> Due:
        """Return the constraints on the answer to a message."""
        client_id, trained, algorithm = sent.client_id, work.word == "train", self.session.algorithm
        count = self.session.data.census.num_samples
        home = self.roster.homes.get(sent.node)
        sums, withheld = None, home is not None and home.sums and home.boot == sent.boot
        if withheld and sent[2:] not in work.summed:
            sums = sum(map(count, sent.together)) if trained else len(sent.together)
        return Due(
            client_id,
            work.broadcast.round_idx,
            trained,
            work.layouts[self.session.kinds[client_id]],
            self.channel.uplink,
            {0} if self.sums is not None else {count(client_id)} if trained else {1, count(client_id)},
            algorithm.heaviest if trained and self.sums is None else None,
            algorithm.varying if trained else (),
            algorithm.nonnegative if trained else (),
            self._ranges,
            sums,
            withheld,
        )

    def _know_names(self, client_id: int, metrics: Mapping[str, float]) -> None:
        """Bound the number of a client's distinct metrics, because each is a column of a table."""
        known = self._names.setdefault(client_id, set())
        if len(known | metrics.keys()) > MOST_METRICS:
            raise WireError(f"client {client_id} sent more than {MOST_METRICS:,} distinct metrics; it is dropped")
        known.update(metrics)

    def _update(self, client_id: int, heard: Heard, due: Due) -> ClientUpdate | None:
        """Convert an answer to an update; None if the client does not take part in an evaluation."""
        if heard.payload is None:
            return None
        if heard.version is not None:
            self.session.store.note(client_id, heard.version)
        kind = self.session.kinds[client_id]
        device = self.session.loops[kind].fabric.device
        payload = {name: tensor.to(device) for name, tensor in heard.payload.items()}
        metrics = dict(heard.metrics)
        return ClientUpdate(client_id, payload, heard.weight, metrics, kind, uplink_bytes=heard.wire_bytes)

    def _miss(self, work: _Work) -> Iterator[ClientFailure]:
        """Fail the clients whose node disconnected while they worked."""
        for message_id, sent in list(work.sent.items()):
            if not self.roster.is_connected(sent.node):
                del work.sent[message_id]
                self.roster.grid.drop([message_id])
                work.busy[sent.boot] -= 1
                yield self._failure(sent.client_id, work, "its node disconnected while it worked")
        gone = [message_id for message_id, sent in self._unanswered.items() if not self.roster.is_connected(sent.node)]
        self.roster.grid.drop(gone)
        self._unanswered = {message_id: sent for message_id, sent in self._unanswered.items() if message_id not in gone}

    def _give_up(self, work: _Work) -> Iterator[ClientFailure]:
        """Fail the clients that missed the deadline, and ask their nodes nothing more in this round."""
        self._unanswered |= work.sent
        self._late |= {sent.boot for sent in work.sent.values()}
        late = sorted([sent.client_id for sent in work.sent.values()] + list(work.queue))
        for client_id in late:
            yield self._failure(client_id, work, f"it did not answer within {self.patience.round_s:g} s")

    def _failure(self, client_id: int, work: _Work, cause: str) -> ClientFailure:
        known = self._causes.setdefault(client_id, set())
        if cause not in known and len(known) >= _MOST_CAUSES:
            cause = f"it keeps giving new causes, after {_MOST_CAUSES} others; check its node"
        else:
            known.add(cause)
        return ClientFailure(client_id, work.broadcast.round_idx, cause)

    # ------------------------------------------------------------------ layouts of answers, and states on nodes

    def _held(self) -> Iterator[tuple[str, int]]:
        """Ask all nodes for the versions of this run's states that they hold."""
        message = Message.of(ListStates(self.roster.identity.run_id))
        homes = dict(self.roster.homes)
        asked = dict.fromkeys(homes, message)
        for entries in self.roster.ask(
            asked, _LOOK_S * 10, lambda node, said: held(said, homes[node].clients)
        ).values():
            yield from entries
