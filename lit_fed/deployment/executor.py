"""How a cohort is trained that lives elsewhere: a message a client and round, and what comes back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from lit_fed.deployment.grid import Reply
from lit_fed.deployment.heard import Due, Heard, answer, hear, held
from lit_fed.deployment.roster import KnownNode, Roster
from lit_fed.deployment.wire import MOST_METRICS, Message, Ranges, encode, shown
from lit_fed.engine.clients.executor import Executor, Question
from lit_fed.engine.clients.forecast import layouts_of
from lit_fed.engine.clients.session import Session
from lit_fed.engine.storage.files import Version, VersionedFiles
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import Channel, ClientUpdate, Layout
from lit_fed.engine.wire.totals import Totals
from lit_fed.errors import ClientFailure, ConfigError, NobodyLeft, WireError

_PAUSE_S = (0.005, 0.25)  # between two looks for answers: from the shortest to the longest
_LOOK_S = 3.0  # between two looks who is there
_RETURN_S = 0.25  # the same, while somebody is waited for
_AT_ONCE = {"train": 4, "ask": 64}  # messages a node may have before it, so that answers take bounded memory
_MOST_DROPPED = 1000  # versions that a node is told of in one message
_MOST_CAUSES = 20  # of failure that one client may give, until they are all the same


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
    boot: str
    together: tuple[int, ...]


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
        busy: Messages before each node, by the name of its process.
        end: When it is too late.
        awaited: Clients whose node has been started again, and until when it is waited for.
        together: By the name of a node's process, all clients that are told the same there.
        summed: The processes that have told their sums, and over whom.
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
        self._round_idx = -1
        self._late: set[str] = set()  # processes of nodes that have let this round's deadline pass
        self._unanswered: dict[str, _Sent] = {}  # what they have not answered yet, in this round or before
        self._names: dict[int, set[str]] = {}  # of every client's metrics
        self._causes: dict[int, set[str]] = {}  # of every client's failures
        self._ranges: Ranges = {
            name: range_
            for loop in session.loops.values()
            for name, range_ in getattr(loop.model.task, "ranges", {}).items()
        }
        session.store.keeper = self._files

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Let every client train where it lives."""
        ids = list(client_ids)
        arrived = 0
        for outcome in self._work("train", ids, broadcast, {}, layouts_of(self.session, ids, broadcast)):
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
        if word == "train" or broadcast.round_idx != self._round_idx:  # who is late has another chance in each round
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
        """Tell those whose node has time; whether somebody is waited for."""
        absent = False
        for _ in range(len(work.queue)):
            client_id = work.queue.popleft()
            home = self.roster.home(client_id)
            if home is None and (may_return or time.monotonic() < work.awaited.get(client_id, 0.0)):
                work.queue.append(client_id)
                absent = True
            elif home is None:
                yield self._failure(client_id, work, "its node is not there; start it again")
            elif home.boot in self._late:
                yield self._failure(client_id, work, "its node was too late in this round already")
            elif self._before(home, work) >= _AT_ONCE[work.word]:
                work.queue.append(client_id)
            else:
                blob = encode(self._message(client_id, home, work))
                if len(blob) > self.roster.limit:
                    raise WireError(
                        f"the message to client {client_id} has {len(blob):,} bytes, over the limit of "
                        f"{self.roster.limit:,}; raise --most_bytes here and on the nodes"
                    )
                self.num_bytes += len(blob)
                together = tuple(work.together[home.boot])
                work.sent[self.roster.grid.push(home.node, blob)] = _Sent(client_id, home.node, home.boot, together)
                work.busy[home.boot] = work.busy.get(home.boot, 0) + 1
        return absent

    def _before(self, home: KnownNode, work: _Work) -> int:
        """How many messages a node has before it."""
        return work.busy.get(home.boot, 0) + sum(sent.boot == home.boot for sent in self._unanswered.values())

    def _message(self, client_id: int, home: KnownNode, work: _Work) -> Message:
        store, kind, broadcast = self.session.store, self.session.kinds[client_id], work.broadcast
        dropped: list[int] = []
        if isinstance(store.files, NodeFiles):
            every = store.files.dropped.pop(str(client_id), [])
            dropped, later = every[:_MOST_DROPPED], every[_MOST_DROPPED:]
            if later:
                store.files.dropped[str(client_id)] = later
        fields = {
            "client": client_id, "round": broadcast.round_idx, "run": self.roster.identity.run_id, "boot": home.boot,
            "version": store.version(client_id), "drop": dropped, "together": self._together(client_id, home, work),
            **work.fields,
        }  # fmt: skip
        tensors = {"payload": broadcast.wire[kind], "frozen": broadcast.frozen.get(kind, {})}
        return Message(cast("Any", work.word), fields, tensors)

    def _together(self, client_id: int, home: KnownNode, work: _Work) -> list[int]:
        """All clients that are told the same on a client's node, as far as is known when the first of them is."""
        if client_id not in work.together.get(home.boot, ()):
            others = [one for one in work.queue if self.roster.home(one) is home]
            work.together[home.boot] = sorted([client_id, *others])
        return work.together[home.boot]

    def _take_in(self, work: _Work, reply: Reply) -> Iterator[ClientUpdate | ClientFailure | None]:
        if (late := self._unanswered.pop(reply.message_id, None)) is not None:  # it is left out, and its node is back
            self._late.discard(late.boot)
            return
        if (sent := work.sent.pop(reply.message_id, None)) is None:
            return
        work.busy[sent.boot] -= 1
        if reply.error:
            yield self._failure(sent.client_id, work, f"its node gave no answer: {shown(reply.error)}")
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
            self._totals.append(heard.sums)
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
        """What the answer to a message may hold."""
        client_id, trained, algorithm = sent.client_id, work.word == "train", self.session.algorithm
        count = self.session.data.num_samples
        home = self.roster.homes.get(sent.node)
        sums = None
        if home is not None and home.sums and home.boot == sent.boot and sent[2:] not in work.summed:
            sums = sum(map(count, sent.together)) if trained else len(sent.together)
        return Due(
            client_id,
            work.broadcast.round_idx,
            trained,
            work.layouts[self.session.kinds[client_id]],
            self.channel.uplink,
            {count(client_id)} if trained else {1, count(client_id)},
            algorithm.heaviest if trained else None,
            algorithm.varying if trained else (),
            algorithm.nonnegative if trained else (),
            self._ranges,
            sums,
        )

    def _know_names(self, client_id: int, metrics: Mapping[str, float]) -> None:
        """Refuse a client that has ever new metrics, each of which is a column of the tables."""
        known = self._names.setdefault(client_id, set())
        if len(known | metrics.keys()) > MOST_METRICS:
            raise WireError(f"client {client_id} has sent more than {MOST_METRICS:,} different metrics")
        known.update(metrics)

    def _update(self, client_id: int, heard: Heard, due: Due) -> ClientUpdate | None:
        """An answer as the loop takes it; None where the client has nothing to say."""
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
        """Those whose node has left while they were at work."""
        for message_id, sent in list(work.sent.items()):
            if not self.roster.is_connected(sent.node):
                del work.sent[message_id]
                work.busy[sent.boot] -= 1
                yield self._failure(sent.client_id, work, "its node has left while it was at work")
        connected = self.roster.is_connected
        self._unanswered = {one: sent for one, sent in self._unanswered.items() if connected(sent.node)}

    def _give_up(self, work: _Work) -> Iterator[ClientFailure]:
        """Those who are too late, and whose node is asked nothing more in this round."""
        self._unanswered |= work.sent
        self._late |= {sent.boot for sent in work.sent.values()}
        late = sorted([sent.client_id for sent in work.sent.values()] + list(work.queue))
        for client_id in late:
            yield self._failure(client_id, work, f"it gave no answer within {self.patience.round_s:g} s")

    def _failure(self, client_id: int, work: _Work, cause: str) -> ClientFailure:
        known = self._causes.setdefault(client_id, set())
        if cause not in known and len(known) >= _MOST_CAUSES:
            cause = f"it gives ever new causes, after {_MOST_CAUSES} others; look at its node"
        else:
            known.add(cause)
        return ClientFailure(client_id, work.broadcast.round_idx, cause)

    # ------------------------------------------------------------------ what answers look like, and where states lie

    def _files(self, directory: Path) -> NodeFiles:
        return NodeFiles(directory, self._held)

    def _held(self) -> Iterator[tuple[str, int]]:
        """The versions that the nodes hold of this run, each of clients that live there."""
        message = Message("held", {"run": self.roster.identity.run_id})
        homes = dict(self.roster.homes)
        asked = dict.fromkeys(homes, message)
        for entries in self.roster.ask(
            asked, _LOOK_S * 10, lambda node, said: held(said, homes[node].clients)
        ).values():
            yield from entries
