"""A node: it holds the data and states of some clients, and does their work on request.

It turns messages into answers, independently of the transport.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lit_fed.checks import check_range
from lit_fed.data.partitions.cut import clients_here
from lit_fed.data.population.naming import called
from lit_fed.engine.clients.executor import failure
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol
from lit_fed.engine.method.algorithm import held_model
from lit_fed.engine.method.client import Stage
from lit_fed.engine.storage.packs import VersionedFiles
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Payload, add_prefix, layout_of
from lit_fed.engine.wire.totals import Totals
from lit_fed.errors import ClientFailure, ConfigError, WireError
from lit_fed.federation.ends import Alert, next_line
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.frozen import FrozenTensors, UnknownTensor
from lit_fed.federation.messages.settings import agreed, mismatch, signs
from lit_fed.federation.messages.wire import MOST_BYTES, Message, check_payload, decode, encode, shown
from lit_fed.federation.node.kept import Kept
from lit_fed.federation.node.log import NodeLog
from lit_fed.federation.node.run import StateFiles, for_nobody_else, settle
from lit_fed.federation.node.summing import own_work
from lit_fed.federation.node.withheld import Report, Withheld, check_least
from lit_fed.networks.base import Names
from lit_fed.tensors import hash_of_groups, hash_of_named, map_tensors
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm
    from lit_fed.federation.keys.statements import SigningKey
    from lit_fed.federation.node.receipts import ReceiptBook
    from lit_fed.federation.secure.signer import Signer


_OFTEN = 16  # maximum number of equal requests per round; a restarted server repeats them
_MOST_RUNS = 64  # maximum number of runs per process, each with its folder and its counts of requests
_LINE = 1000  # maximum number of printed characters


class Node:
    """The clients of one node.

    Args:
        trainer: The node's trainer, with the settings of the run.
        model: The task.
        data: The data; the node sets them up for these clients only.
        algorithm: The method.
        clients: Positions of the node's clients.
        folder: The folder of the clients' states, one subfolder per run, and of the log; readable for the user only.
        histogram: Report the class histogram of every client.
        limit: Maximum size of a message, bytes.
        report: Report metrics per client, or only their sums over the node's clients.
        report_least: Minimum number of clients of such a sum.
        say: Prints a line.
        signer: Signs in secure sums; None makes a key that nobody knows.
        smallest_sum: Least number of nodes with clients in a secure sum; None for its threshold.
        key: Signs what is sent, where the trainer writes a record; None without TLS.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        model: Tasks,
        data: FederatedDataModule,
        algorithm: Algorithm[Any],
        clients: Iterable[int],
        folder: Path,
        histogram: bool = True,
        limit: int = MOST_BYTES,
        report: Report = "clients",
        report_least: int = 2,
        say: Callable[[str], object] = print,
        signer: Signer | None = None,
        smallest_sum: int | None = None,
        key: SigningKey | None = None,
    ) -> None:
        self.clients = clients_here(clients, data.num_clients)
        if not self.clients:
            raise ConfigError("the node has no clients; name at least one with --client")
        self.folder, self.limit = folder, limit
        self.say: Callable[[str], object] = lambda line: say(type(line)(shown(line, _LINE)))
        self.log = NodeLog(folder)
        self.boot = secrets.token_hex(8)
        self.settings = agreed(trainer.settings.config)
        self.trainer = trainer
        self.run = settle(trainer, model, data, algorithm, self.clients, "fit")
        if empty := [one for one in self.clients if not data.census.num_samples(one)]:
            say(Alert(f"client {called(data, empty[0])} has no training samples"))
        self.federation = self.run.federation
        held = {kind: (loop, held_model(self.federation.server, kind)) for kind, loop in self.federation.loops.items()}
        frozen = {kind: {n: own[n] for n in loop.model.split.frozen if n in own} for kind, (loop, own) in held.items()}
        self.frozen = FrozenTensors(frozen, folder, self.say)
        wrappers = self.federation.wrappers
        self.reports = {one: wrappers.report(data.census.report(one, histogram), one) for one in self.clients}
        samples = {one: report.samples for one, report in self.reports.items()}
        self.withheld = None
        if report == "aggregate":
            check_range("--report_least", report_least, least=1)
            check_least(report_least, len(samples), "metrics")
            self.withheld = Withheld(samples, report_least, folder, self.say)
            self.say(f"metrics leave this node in sums over at least {report_least} clients; sums over fewer stay here")
        self.sums = own_work(trainer, signer, limit, report, self.say, folder, smallest_sum)
        self.receipts: ReceiptBook | None = None
        if signs(trainer, key, self.say) and key is not None:
            from lit_fed.federation.node.receipts import ReceiptBook  # with cryptography, which not every run needs

            self.receipts = ReceiptBook(key, folder, self.say)
        self._received: dict[str, Any] = {}  # of the last training: the run, the round and the hash of the broadcast
        self.run_id = ""
        self.given: dict[str, Counter[tuple[object, ...]]] = {}  # counts of equal requests, by run
        self._continued: dict[tuple[str, int], int] = {}  # the state that a client continued from last, by run
        self._errors: dict[str, int] = {}  # numbers of errors, by the text that the server gets
        self._heard, self._next = time.monotonic(), next_line(0.0)
        self.at = "nothing yet"
        self.done = False
        """Whether the server has said that the run is done."""

    @contextmanager
    def at_work(self) -> Iterator[Node]:
        """Prepare to handle messages."""
        duty = self.trainer.local.guard.on_duty(False)
        with for_nobody_else(self.folder), duty, self.federation.session.at_work("fit"):
            yield self

    def idle(self, connected: bool = True) -> None:
        """Report a server that is connected and silent, at growing intervals; cheap to call at any rate."""
        silent = time.monotonic() - self._heard
        if connected and not self.done and silent > self._next:
            self._next = next_line(silent)
            self.say(Alert(f"waiting for the server, silent for {silent / 60:.0f} min; last message: {self.at}"))

    def handle(self, blob: bytes | bytearray) -> bytearray:
        """Handle a message, and return the answer; every error becomes an answer, too."""
        self._heard, self._next = time.monotonic(), next_line(0.0)
        try:
            return self._handle(blob)
        finally:  # no tensor of a message stays in memory while the node waits
            vars(self).pop("_request", None)
            self.federation.session.leave()

    def _handle(self, blob: bytes | bytearray) -> bytearray:
        client_id, round_idx, asked, broadcast = -1, -1, None, None
        outcome: ClientUpdate | ClientFailure | None
        try:
            message = decode(blob, self.limit)
            of_the_node = {"hello": self._greet, "held": self._list_states, "keep": self._keep}
            if message.word in of_the_node:
                return encode(of_the_node[message.word](message))
            if message.word == "receipts" and self.receipts is not None:
                self.receipts.take(message.read(schema.Receipts))
                return encode(Message.pack(schema.NodeAnswer()))
            if message.word == "secure" and self.sums is not None:
                return encode(self._signed_sum(message, self.sums.answer(message)))
            asked = message.read(schema.Ask) if message.word == "ask" else message.read(schema.Train)
            client_id, round_idx = asked.client, asked.round
            if asked.boot != self.boot or client_id not in self.clients:
                cause = f"client {client_id} is not on this node, which restarted in the meantime"
                return encode(self._failed(client_id, round_idx, cause, moved=True))
            broadcast = self._take_in(asked, message.tensors)
            outcome = (
                self._ask(asked, broadcast) if isinstance(asked, schema.Ask) else self._train(client_id, broadcast)
            )
            if isinstance(outcome, ClientFailure) and self.sums is not None and self.sums.summed.noise is not None:
                self.say(Alert(f"{outcome}; the server gets an update by zeros"))
                self.log.write(f"{outcome}\n{outcome.details}".rstrip())  # without a number, of which it could count
                outcome = self.sums.unmoved(client_id, broadcast)
                self.federation.session.restore(outcome, broadcast)
            if self.sums is not None and isinstance(outcome, ClientUpdate):
                outcome = self.sums.keep(self._request(), broadcast, outcome)
        except UnknownTensor as error:  # the server greets the node again, and learns what it holds
            return encode(self._failed(client_id, round_idx, str(error), moved=True))
        except (Exception, SystemExit) as error:
            outcome = failure(client_id, round_idx, error)
        sums: Totals = {}
        if self.withheld is not None and asked is not None and client_id in self.clients:
            try:
                sums = self.withheld.take(asked, outcome, broadcast)
            except Exception as error:  # messages are untrusted
                outcome = failure(client_id, round_idx, error)
        if not isinstance(outcome, ClientFailure):
            try:
                assert broadcast is not None
                signed = isinstance(asked, schema.Train) and self.sums is None
                return encode(self._answer(client_id, broadcast, outcome, sums, signed))
            except Exception as error:  # such as more metrics than a message can hold
                outcome = failure(client_id, round_idx, error)
        return encode(self._failed(client_id, round_idx, self._reported_cause(outcome), sums=sums))

    def _reported_cause(self, failed: ClientFailure) -> str:
        """Return the outline of a failure for the server; print and log all of it, under a number."""
        outline = shown(failed.outline)
        if outline == shown(failed.cause):
            self.say(Alert(failed))
            return outline
        number = self._errors.setdefault(outline, len(self._errors) + 1)
        self.say(Alert(f"error {number}: {failed}" + (f"; see {self.log.path}" if failed.details else "")))
        self.log.write(f"error {number}: {failed}\n{failed.details}".rstrip())
        return f"{outline} (error {number} in the log of its node)"

    # ------------------------------------------------------------------ who lives here

    def _greet(self, message: Message) -> Message:
        self.done = False
        if (cause := mismatch(self.settings, message.read(schema.Hello))) is None:
            clients = {str(client_id): schema.DataReport(**vars(report)) for client_id, report in self.reports.items()}
            self._say_where("registered with the server")
            smallest = 0 if self.sums is None else self.sums.smallest
            return Message.pack(
                schema.Greeted(self.boot, clients, self.withheld is not None, smallest, self.limit, self.frozen.hashes)
            )
        self.say(Alert(f"refused the server: {cause}"))
        return self._failed(-1, -1, shown(cause))

    def _list_states(self, message: Message) -> Message:
        """List the versions of the clients' states of a run."""
        self._open(message.read(schema.ListStates).run)
        files: VersionedFiles = self.federation.store.files
        names = {str(client_id) for client_id in self.clients}
        return Message.pack(schema.States([(name, at) for name, at in files.rounds() if name in names]))

    def _keep(self, message: Message) -> Message:
        """Save the end of a run, for later prediction and evaluation."""
        end = message.read(schema.Keep)
        round_idx, versions = end.round, end.versions
        if not 0 <= round_idx < self.run.max_rounds or versions.keys() != {
            str(client_id) for client_id in self.clients
        }:
            raise WireError("the end of the run is for other clients; run the same lit_fed on both ends")
        self._open(end.run)
        self._count("keep")
        channel = self.federation.channel
        payloads, frozen, bases = dict[str, Payload](), dict[str, Payload](), dict[str, Names]()
        for kind in {self.federation.kinds[client_id] for client_id in self.clients}:
            sent = message.tensors.get(f"payload/{kind}", {})
            payloads[kind] = channel.downlink.arrive(sent, channel.down(round_idx, kind)).payload
            received = self._frozen(kind, message.tensors.get(f"frozen/{kind}", {}), end.frozen.get(kind, {}))
            base = self.federation.loops[kind].model.base
            frozen[kind] = {name: tensor for name, tensor in received.items() if not base.holds(name, tensor)}
            bases[kind] = {name: base.names[name] for name in received.keys() - frozen[kind].keys()}
            self._check(payloads[kind], round_idx, kind, "predict")
        addressed = dict[int, Payload]()
        for client_id in self.clients if self.federation.algorithm.addresses else ():
            wire, kind = message.tensors.get(f"addressed/{client_id}", {}), self.federation.kinds[client_id]
            addressed[client_id] = channel.downlink.arrive(wire, channel.down(round_idx, kind)).payload
            self._check(addressed[client_id], round_idx, kind, "predict", client_id)
        versions_told = {int(name): version for name, version in versions.items()}
        Kept(self.run_id, round_idx, versions_told, payloads, frozen, bases, addressed).write(self.folder)
        self.done = True
        self._say_where(f"the run ended after round {round_idx + 1}; its model is saved in {self.folder}")
        return Message.pack(schema.NodeAnswer())

    def _open(self, run_id: str) -> None:
        if run_id != self.run_id:
            if run_id not in self.given and len(self.given) >= _MOST_RUNS:  # counts are never forgotten
                raise WireError(f"the server began more than {_MOST_RUNS} runs; restart the node")
            self.given.setdefault(run_id, Counter())
            self.federation.store.open(self.folder / run_id)
            self.run_id = run_id

    # ------------------------------------------------------------------ one client's work

    def _take_in(self, asked: schema.ClientWork, tensors: Mapping[str, Payload]) -> Broadcast:
        """Decode a broadcast, select the state's version that the server names, and delete the states that it drops."""
        federation, store = self.federation, self.federation.store
        client_id, round_idx, version, dropped = asked.client, asked.round, asked.version, asked.drop
        if not 0 <= round_idx < self.run.max_rounds:
            raise WireError(
                f"round {round_idx} is not one of the {self.run.max_rounds}; run the same lit_fed on both ends"
            )
        self._open(asked.run)
        if version is not None and version[0] in dropped:
            raise WireError(f"the server drops the state with which client {client_id} is to continue")
        self._count(*asked.question, client_id, round_idx)
        self._say_where(f"round {round_idx + 1} of {self.run.max_rounds}")
        if version is not None:
            self._continued[self.run_id, client_id] = version[0]
        newest = max((at for name, at in store.files.rounds() if name == str(client_id)), default=-1) if dropped else -1
        for drop_round in dropped:
            if drop_round not in (newest, self._continued.get((self.run_id, client_id))):
                store.files.forget([(str(client_id), drop_round)], delete=True)
        store.load_state_dict({} if version is None else {str(client_id): version}, round_idx)
        kind, device = federation.kinds[client_id], federation.fabric.device
        groups = {
            "payload": tensors.get("payload", {}),
            "frozen": self._frozen(kind, tensors.get("frozen", {}), asked.frozen),
            **({"addressed": tensors.get("addressed", {})} if federation.algorithm.addresses else {}),
        }
        self._request = cache(lambda: asked.request([client_id], hash_of_groups(groups)))  # not every method needs it
        if isinstance(store.files, StateFiles):
            store.files.number = lambda: self._request().digest(version)
        received = map_tensors(groups, lambda tensor: tensor.to(device))
        channel = federation.channel
        downlink, context = channel.downlink, channel.down(round_idx, kind)
        if self.receipts is not None and isinstance(asked, schema.Train):
            frozen = {name: self.frozen.hashes[kind][name] for name in groups["frozen"]}
            sent = {**groups["payload"], **add_prefix("addressed/", groups.get("addressed", {}))}
            self._received = {"run": self.run_id, "round": round_idx, "received": hash_of_named(sent, frozen)}
        stage: Stage = "test" if isinstance(asked, schema.Ask) else "train"
        payload = downlink.arrive(received["payload"], context).payload
        self._check(payload, round_idx, kind, stage)
        broadcast = Broadcast(round_idx, {kind: payload}, {kind: received["frozen"]})
        if federation.algorithm.addresses:
            broadcast.addressed = {client_id: downlink.arrive(received["addressed"], context)}
            self._check(broadcast.addressed[client_id].payload, round_idx, kind, stage, client_id)
        return broadcast

    def _frozen(self, kind: str, sent: Payload, named: Mapping[str, str]) -> Payload:
        """All frozen tensors of a message, checked against the model."""
        model = self.federation.loops[kind].model
        check_payload(sent, layout_of({name: model.tensor(name) for name in sent if name in model}), "the server")
        return self.frozen.complete(kind, sent, named)

    def _check(self, payload: Payload, round_idx: int, kind: str, stage: Stage, client_id: int | None = None) -> None:
        """Refuse a payload that lacks a tensor of the round's first broadcast, or of what it addresses to a client.

        A later one may hold more.
        """
        method, server = self.federation.algorithm, self.federation.server
        self.federation.session.divide(round_idx)
        if client_id is None:
            layout = layout_of(method.broadcast(server, round_idx, kind, stage))
        else:
            layout = layout_of(method.address(server, client_id, round_idx, kind, stage))
        known = {name: payload[name] for name in layout if name in payload}
        check_payload(known, layout, "the server", () if client_id is None else method.varying)

    def _count(self, *work: object) -> None:
        """Raise `WireError` if the server repeats a request more than `_OFTEN` times in a round."""
        given = self.given[self.run_id]
        given[work] += 1
        if given[work] > _OFTEN:
            what = shown(work[1] if work[0] == "ask" else work[0], 40)
            raise WireError(f"the server requests {what!r} more than {_OFTEN} times in one round")

    def _say_where(self, at: str) -> None:
        """Print the server's request if it differs from the last one."""
        if at != self.at:
            self.at = at
            self.say(at)

    def _train(self, client_id: int, broadcast: Broadcast) -> ClientUpdate | ClientFailure:
        (outcome,) = self.federation.executor.run([client_id], broadcast)
        return outcome if isinstance(outcome, ClientFailure) else next(iter(outcome))

    def _ask(self, asked: schema.Ask, broadcast: Broadcast) -> ClientUpdate | None:
        name, subset = asked.protocol, asked.subset
        settings = self.run.settings
        protocol = next((one for one in settings.protocols if one.name == name), None)
        if protocol is None or type(protocol).answer is Protocol.answer:
            raise WireError(
                f"trainer.protocols on the node has no {shown(name, 40)!r} that asks clients; use the same on both ends"
            )
        chooses = subset == "val" and self.federation.data.has_val and not self.federation.wrappers.private
        if subset != settings.evaluate_on and not chooses:
            raise WireError(
                f"trainer.evaluate_on is {settings.evaluate_on!r} on the node and {shown(subset, 40)!r} on the server; "
                "use the same on both ends"
            )
        on: EvalSubset = "val" if subset == "val" else "test"
        return protocol.answer(self.federation, asked.client, broadcast, on)

    def _answer(
        self, client_id: int, broadcast: Broadcast, update: ClientUpdate | None, sums: Totals, signed: bool
    ) -> Message:
        if update is None:
            return Message.pack(schema.WorkAnswer(client_id, broadcast.round_idx, True, sums, 0, {}, None))
        version = self.federation.store.written(client_id)
        work = schema.WorkAnswer(client_id, broadcast.round_idx, False, sums, update.weight, update.metrics, version)
        wire = self.federation.channel.sent(update, broadcast).wire
        if signed and self.receipts is not None:
            due = {**self._received, "clients": [client_id], "weight": update.weight}
            work = schema.SignedAnswer(**msgspec.structs.asdict(work), signature=self.receipts.signature(due, wire))
        return Message.pack(work, {"payload": wire})

    def _signed_sum(self, asked: Message, answer: Message) -> Message:
        """A vector under masks with this node's signature, where nodes sign; other answers as they are."""
        of = None if self.sums is None else self.sums.summing
        if self.receipts is None or asked.fields.get("stage") != "vectors" or of is None or of.work != "train":
            return answer
        due = dict(self._received) if of.clients else {"run": of.run, "round": of.round_idx, "received": None}
        due |= {"clients": list(of.clients), "weight": None}
        signature = self.receipts.signature(due, answer.tensors["secure"])
        return Message.pack(schema.SignedSumAnswer(answer.fields["message"], signature), answer.tensors)

    def _failed(
        self, client_id: int, round_idx: int, cause: str, moved: bool = False, sums: Totals | None = None
    ) -> Message:
        return Message.pack(schema.WorkFailure(cause, client_id, round_idx, moved, sums or {}))
