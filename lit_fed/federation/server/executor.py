"""The executor of a federation: it trains a cohort with one message per client and round."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.clients.executor import Executor, Question, layouts_of
from lit_fed.engine.clients.session import Session
from lit_fed.engine.wire.channel import Channel
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout, Payload, add_prefix
from lit_fed.engine.wire.totals import Totals
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import ClientFailure, NobodyLeft, WireError
from lit_fed.federation.messages.frozen import KnownHashes
from lit_fed.federation.messages.schema import MOST_DROPPED, Ask, ListStates, SignedAnswer, Train, WorkAnswer
from lit_fed.federation.messages.wire import MOST_METRICS, OF_WORK, Bodies, Message, Ranges, encode_shared
from lit_fed.federation.server.absences import Absences
from lit_fed.federation.server.answers import ClientAnswer, ExpectedAnswer, answer, held
from lit_fed.federation.server.means import Clients, NodeTotals, PlausibleMeans
from lit_fed.federation.server.node_files import NodeFiles
from lit_fed.federation.server.requests import Envelope, Requests
from lit_fed.federation.server.roster import KnownNode, Roster
from lit_fed.tensors import hash_of_named

if TYPE_CHECKING:
    from lit_fed.federation.server.receipts import Receipting
    from lit_fed.federation.server.summing import Summing

_LOOK_S = 3.0  # interval of looking for connected nodes
_RETURN_S = 0.25  # the same, while the round waits for a node to reconnect
_KINDS = {"train": Train, "ask": Ask}
_AT_ONCE = {"train": 4, "ask": 64}  # maximum number of pending messages per node, which bounds the memory of answers
_MOST_CAUSES = 20  # distinct causes of failure per client; from then on one in `_SAY_S`
_SAY_S = 60.0


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


class ServerEnd(Channel):
    """The server's end of a wire whose other end is a node: an executor yields updates that have crossed it."""

    @override
    def receive(self, updates: Updates, broadcast: Broadcast) -> Updates:
        return updates

    @override
    def receive_one(self, update: ClientUpdate, broadcast: Broadcast) -> ClientUpdate:
        return update


@dataclass(eq=False)
class CohortWork:
    """What a cohort is asked.

    Args:
        word: The message's type.
        layouts: The expected layout of answers, by kind.
        fields: Further fields of the message.
        begun: When the cohort was lined up.
        together: By node's process, all clients that get the same request.
        summed: The processes that have sent sums, and the clients of these sums.
        bodies: The tensors as they travel, once for all messages.
    """

    word: Literal["train", "ask"]
    broadcast: Broadcast
    layouts: Mapping[str, Layout]
    fields: Mapping[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    together: dict[str, Clients] = field(default_factory=dict)
    summed: set[tuple[str, Clients]] = field(default_factory=set)
    bodies: Bodies = field(default_factory=Bodies)


@dataclass(eq=False)
class Asked:
    """A client that is asked.

    Args:
        boot: The process of its node that its message was sent to; empty before.
        withholds: Whether this node reports sums only.
        together: All clients of this node that get the same request.
        awaited: Until when its node may reconnect after a restart; 0 without one.
        home: The node.
        received: Where nodes sign, the hash of what is sent.
    """

    client_id: int
    work: CohortWork
    boot: str = ""
    withholds: bool = False
    together: Clients = ()
    awaited: float = 0.0
    home: KnownNode | None = None
    received: str = ""


class GridExecutor(Executor):
    """Sends every client a message, and yields the outcomes in order of arrival.

    Args:
        session: The server's session, which never enters a client.
        tolerant: Continue without the answers of clients that fail an evaluation.
        sums: Of `trainer.secure_sum`: nodes keep what their clients answer, and sum it.
        receipts: Verifies what nodes sign; None where they do not.
    """

    def __init__(
        self,
        session: Session,
        roster: Roster,
        channel: Channel,
        patience: Patience,
        tolerant: bool = False,
        sums: Summing | None = None,
        receipts: Receipting | None = None,
    ) -> None:
        self.session, self.roster, self.channel = session, roster, channel
        self.patience, self.tolerant, self.sums = patience, tolerant, sums
        self.receipts = receipts if sums is None else None  # of sums, `sums` verifies
        self._hashes = KnownHashes()
        self._totals: NodeTotals = []  # of the last work
        self._means = PlausibleMeans(roster.say)
        self._round_idx = -1
        self._late: dict[str, Envelope[Asked]] = {}  # messages without an answer in time, also of earlier rounds
        self._names: dict[int, set[str]] = {}  # names of metrics by client
        self._causes: dict[int, set[str]] = {}  # causes of failure by client
        self._new_cause: dict[int, float] = {}  # when a client's last new cause came, seconds of a monotonic clock
        self._absences = Absences(roster.say)
        self._ranges: Ranges = {
            name: range_
            for loop in session.loops.values()
            for name, range_ in getattr(loop.model.task, "ranges", {}).items()
        }
        self._bounded = {name for name, range_ in self._ranges.items() if all(map(math.isfinite, range_))}
        session.store.keeper = partial(NodeFiles, held=self._held)

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        ids, arrived = list(client_ids), 0
        layouts = layouts_of(self.session, ids, broadcast) if self.sums is None else {}  # the sums have the tensors
        for outcome in self._work(ids, CohortWork("train", broadcast, layouts)):
            arrived += isinstance(outcome, ClientUpdate)
            yield outcome if isinstance(outcome, ClientFailure) else Updates.of([outcome])
            del outcome  # no update stays in memory while the next one is awaited
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
        for outcome in self._work(ids, CohortWork("ask", broadcast, layouts, fields)):
            if isinstance(outcome, ClientFailure):
                if not self.tolerant:
                    yield outcome
                    return
                self._absences.missing(question.protocol, outcome)
                continue
            self._absences.answered(question.protocol, outcome.client_id)
            if question.layout:
                yield outcome
            else:
                answers.append(outcome)
        told = {update.client_id: update.metrics for update in answers}
        self._means.leave_out(told, self._totals, f"round {broadcast.round_idx}: {question.protocol}/", self._bounded)
        if self.sums is not None and answers:
            self._totals = [(tuple(told), dict(self.sums.ask(question, broadcast, list(told), self._ranges)))]
        yield from answers

    @override
    def summed_metrics(self, logged: Mapping[int, dict[str, float]] | None = None, round_idx: int = 0) -> list[Totals]:
        if logged is not None:
            self._means.leave_out(logged, self._totals, f"round {round_idx}: ", OF_WORK | {"staleness"})
        return [totals for _, totals in self._totals]

    @override
    def check_kept(self, session: Session, broadcast: Broadcast) -> None:
        """Do nothing: a node checks a client's state before the client uses it."""

    # ------------------------------------------------------------------ who is asked when

    def _work(self, ids: list[int], work: CohortWork) -> Iterator[ClientUpdate | ClientFailure]:
        self._totals, round_idx = [], work.broadcast.round_idx
        if work.word == "train" or round_idx != self._round_idx:  # late nodes get another chance in each round
            self._round_idx, self.roster.late = round_idx, set()
        requests = self._requests()
        requests.queue.extend(Asked(client_id, work) for client_id in ids)
        self.roster.refresh()
        yield from self._outcomes(requests)

    def _requests(self) -> Requests[Asked]:
        return Requests(self.roster.grid, self.roster.limit, self._late)

    def _outcomes(self, requests: Requests[Asked]) -> Iterator[ClientUpdate | ClientFailure]:
        """Send the messages of clients in line as their nodes can take them, and yield outcomes as they arrive."""
        looked = time.monotonic()
        while requests:
            absent = yield from self._push(requests)
            requests.rest()
            yield from chain.from_iterable(starmap(partial(self._take_in, requests), requests.arrived()))
            yield from self._give_up(requests)
            if time.monotonic() - looked > (_RETURN_S if absent else _LOOK_S):
                looked = time.monotonic()
                self.roster.refresh()
                for asked in requests.drop(lambda node: not self.roster.is_connected(node)):
                    yield self._failure(asked, "its node disconnected while it worked")

    def _push(self, requests: Requests[Asked]) -> Generator[ClientFailure, None, bool]:
        """Send messages to nodes with spare capacity; return whether a client's node is awaited."""
        absent, pending = False, Counter(asked.boot for asked in requests.pending())
        for _ in range(len(requests.queue)):
            asked = requests.queue.popleft()
            work, home = asked.work, self.roster.home(asked.client_id)
            if home is None and time.monotonic() < max(work.begun + self.patience.return_s, asked.awaited):
                requests.queue.append(asked)
                absent = True
            elif home is None:
                advice = self.roster.advice([asked.client_id], "restart it")
                yield self._failure(asked, f"its node is not connected; {advice}")
            elif home.boot in self.roster.late:
                yield self._failure(asked, "its node already missed this round's deadline")
            elif pending[home.boot] >= _AT_ONCE[work.word]:
                requests.queue.append(asked)
            else:
                pending[home.boot] += 1
                if asked.client_id not in work.together.get(home.boot, ()):  # fixed with the first message to a node
                    there = {one.client_id for one in requests.queue if one.work is work}
                    work.together[home.boot] = tuple(sorted({asked.client_id, *(there & home.clients.keys())}))
                asked.boot, asked.withholds, asked.together = home.boot, home.sums, work.together[home.boot]
                blob = encode_shared(self._message(asked, home), work.bodies)
                if len(blob) > self.roster.limit:
                    raise WireError(
                        f"the message to client {asked.client_id} has {len(blob):,} bytes and exceeds the limit of "
                        f"{self.roster.limit:,}; raise --most_bytes here and on the nodes"
                    )
                if (objection := home.objection(blob)) is not None:
                    yield self._failure(asked, objection)
                    continue
                most = self._expected(asked).most_bytes
                requests.send(Envelope(asked, home.node, blob, partial(self._read, asked), self._end(asked), most))
        return absent

    def _take_in(
        self, requests: Requests[Asked], asked: Asked, reply: ClientAnswer | WireError | None
    ) -> Iterator[ClientUpdate | ClientFailure]:
        if reply is None:  # too late, but the node is responsive
            self.roster.late.discard(asked.boot)
            return
        if isinstance(reply, WireError):
            yield self._failure(asked, str(reply))
            return
        if reply.sums:
            asked.work.summed.add((asked.boot, asked.together))
            self._totals.append((asked.together, dict(reply.sums)))
        if reply.moved and not asked.awaited:
            asked.awaited = min(time.monotonic() + _LOOK_S, self._end(asked))
            requests.queue.append(asked)
            if (home := self.roster.home(asked.client_id)) is not None and home.boot == asked.boot:
                self.roster.forget(home.node)
                self.roster.refresh()
        elif reply.cause:
            yield self._failure(asked, reply.cause)
        elif reply.payload is not None:  # else the client does not take part in an evaluation
            yield self._update(asked.client_id, reply, reply.payload)

    def _give_up(self, requests: Requests[Asked]) -> Iterator[ClientFailure]:
        """Fail the clients that missed the deadline, and ask their nodes nothing more in this round."""
        late, now = requests.overdue(), time.monotonic()
        self.roster.late |= {asked.boot for asked in late}
        for asked in [asked for asked in requests.queue if now > self._end(asked)]:
            requests.queue.remove(asked)
            late.append(asked)
        for asked in sorted(late, key=lambda asked: asked.client_id):
            yield self._failure(asked, f"it did not answer within {self.patience.round_s:g} s")

    def _end(self, asked: Asked) -> float:
        return asked.work.begun + self.patience.round_s

    def _failure(self, asked: Asked, cause: str) -> ClientFailure:
        client_id, now = asked.client_id, time.monotonic()
        known = self._causes.setdefault(client_id, set())
        if cause not in known:
            if len(known) < _MOST_CAUSES or now > self._new_cause.get(client_id, now) + _SAY_S:
                known.add(cause)
                self._new_cause[client_id] = now
            else:
                cause = f"it keeps giving new causes, after {_MOST_CAUSES} others; check its node"
        return ClientFailure(asked.client_id, asked.work.broadcast.round_idx, cause)

    # ------------------------------------------------------------------ messages, and states on nodes

    def _message(self, asked: Asked, home: KnownNode) -> Message:
        client_id, work, store = asked.client_id, asked.work, self.session.store
        kind, broadcast = self.session.kinds[client_id], work.broadcast
        dropped: list[int] = []
        if isinstance(store.files, NodeFiles):
            every = store.files.dropped.pop(str(client_id), [])
            dropped, later = every[:MOST_DROPPED], every[MOST_DROPPED:]
            if later:
                store.files.dropped[str(client_id)] = later
        fields: dict[str, Any] = {
            "client": client_id, "round": broadcast.round_idx, "run": self.roster.identity.run_id, "boot": home.boot,
            "version": store.version(client_id), "drop": dropped, "together": list(asked.together), **work.fields,
        }  # fmt: skip
        there = home.frozen.setdefault(kind, {})
        frozen, fields["frozen"] = self._hashes.divide(kind, broadcast.frozen.get(kind, {}), there)
        tensors = {"payload": broadcast.wire[kind], "frozen": frozen}
        if broadcast.addressed is not None:
            tensors["addressed"] = broadcast.addressed[client_id].wire
        if self.receipts is not None and work.word == "train":
            hashes = self._hashes.hashes(f"wire/{kind}", broadcast.wire[kind])
            hashes |= self._hashes.hashes(kind, broadcast.frozen.get(kind, {}))
            addressed = add_prefix("addressed/", tensors.get("addressed", {}))
            asked.home, asked.received = home, hash_of_named(addressed, hashes)
        return Message.pack(_KINDS[work.word](**fields), tensors)

    def _expected(self, asked: Asked) -> ExpectedAnswer:
        """Return the constraints on the answer to a message."""
        client_id, work, algorithm = asked.client_id, asked.work, self.session.algorithm
        kind = self.session.kinds[client_id]
        layout = work.layouts.get(kind, {})
        most_values = max((shape.numel() for _, shape in layout.values()), default=0)
        known: dict[str, Any] = {"buffers": self.session.loops[kind].model.buffers, "most_values": most_values}
        trained, count = work.word == "train", self.session.data.census.num_samples
        if trained:
            known["decoder"] = dict(self.session.store.decoder(client_id) or {})
        sums = None
        if asked.withholds and (asked.boot, asked.together) not in work.summed:
            sums = sum(map(count, asked.together)) if trained else len(asked.together)
        return ExpectedAnswer(
            client_id,
            work.broadcast.round_idx,
            trained,
            layout,
            self.channel.uplink,
            self.channel.up(client_id, work.broadcast, kind, "train" if trained else "test", **known),
            {0} if self.sums is not None else {count(client_id)} if trained else {1, count(client_id)},
            algorithm.heaviest if trained and self.sums is None else None,
            algorithm.varying if trained else (),
            algorithm.nonnegative if trained else (),
            self._ranges,
            sums,
            asked.withholds,
            SignedAnswer if asked.received else WorkAnswer,
        )

    def _read(self, asked: Asked, message: Message) -> ClientAnswer:
        """Validate an answer; bound the number of a client's distinct metrics, because each is a table's column."""
        reply, known = answer(message, self._expected(asked)), self._names.setdefault(asked.client_id, set())
        if len(known | reply.metrics.keys()) > MOST_METRICS:
            raise WireError(f"client {asked.client_id} sent more than {MOST_METRICS:,} distinct metrics; it is dropped")
        if self.receipts is not None and asked.home is not None and reply.payload is not None:
            due = {"run": self.roster.identity.run_id, "round": asked.work.broadcast.round_idx}
            due |= {"clients": [asked.client_id], "received": asked.received, "weight": reply.weight}
            signature, sent = message.fields["signature"], message.tensors.get("payload", {})
            self.receipts.verify(asked.home, str(asked.client_id), due, signature, sent)
        known.update(reply.metrics)
        return reply

    def _update(self, client_id: int, reply: ClientAnswer, payload: Payload) -> ClientUpdate:
        if reply.version is not None:
            self.session.store.note(client_id, reply.version)
        kind = self.session.kinds[client_id]
        device = self.session.loops[kind].fabric.device
        moved = {name: tensor.to(device) for name, tensor in payload.items()}
        return ClientUpdate(
            client_id, moved, reply.weight, dict(reply.metrics), kind, uplink_bytes=reply.wire_bytes,
            decoder=reply.decoder,
        )  # fmt: skip

    def _held(self) -> Iterator[tuple[str, int]]:
        """Ask all nodes for the versions of this run's states that they hold."""
        homes = dict(self.roster.homes)
        asked = dict.fromkeys(homes, Message.pack(ListStates(self.roster.identity.run_id)))
        answers = self.roster.ask(asked, _LOOK_S * 10, lambda node, said: held(said, homes[node].clients))
        return chain.from_iterable(answers.values())
