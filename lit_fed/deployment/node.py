"""A node: what holds the data and the state of some clients, and does their work when it is told to.

It takes messages and gives answers, and knows nothing of how they travel.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed.data.population.naming import called
from lit_fed.deployment.agreed import agreed, difference
from lit_fed.deployment.kept import RUN_ID, Kept
from lit_fed.deployment.node_log import NodeLog
from lit_fed.deployment.wire import MOST_BYTES, PROTOCOL, Message, check_payload, decode, encode, shown
from lit_fed.deployment.withheld import Report, Withheld
from lit_fed.engine.clients.executor import failure
from lit_fed.engine.clients.local import TaskStage
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.loop.run import Run
from lit_fed.engine.method.client import Stage
from lit_fed.engine.storage.files import Version, VersionedFiles
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate, Payload, layout_of
from lit_fed.errors import ClientFailure, ConfigError, WireError
from lit_fed.participation import FullParticipation
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm


_OFTEN = 16  # a client may be given one piece of work in a round: a server that was killed gives it again
_MOST_RUNS = 64  # whose work is counted
_MOST_DROPPED = 1000  # versions of a client's state in one message
_LINE = 1000  # characters that are printed
_SAY_S = 60.0  # between two words about a server that is silent


class Node:
    """Some clients of a federation, at home.

    Args:
        trainer: With the settings of the run; it is the node's own.
        model: What is learnt.
        data: The data, not set up yet; they are, for these clients only.
        algorithm: How it is federated.
        clients: Who lives here, by position.
        folder: Where the clients' states lie, a folder a run, and the node's log; for nobody else to read.
        histogram: Report also how many samples of every class a client has.
        limit: The size of the largest message that is taken, bytes.
        report: Tell each client's metrics, or only their sums over all clients that live here and do the same.
        say: Prints a line.

    Raises:
        ConfigError: For parts that cannot work together, or clients that do not exist.
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
        say: Callable[[str], object] = print,
    ) -> None:
        self.clients = sorted(set(clients))
        if not self.clients:
            raise ConfigError("a node needs at least one client; name some with --client")
        if beyond := [one for one in self.clients if not 0 <= one < data.num_clients]:
            raise ConfigError(f"there is no client {beyond[0]}; clients are 0 to {data.num_clients - 1}")
        self.folder, self.limit = folder, limit
        self.say: Callable[[str], object] = lambda line: say(shown(line, _LINE))
        self.log = NodeLog(folder)
        self.boot = secrets.token_hex(8)
        self.settings = agreed(trainer.settings.config)
        self.trainer = trainer
        self.run = settle(trainer, model, data, algorithm, self.clients, "fit")
        if empty := [one for one in self.clients if not data.num_samples(one)]:
            say(f"client {called(data, empty[0])} has no training samples")
        self.federation = self.run.federation
        self.reports = {one: data.report(one, histogram) for one in self.clients}
        samples = {one: report.samples for one, report in self.reports.items()}
        self.withheld = Withheld(samples) if report == "aggregate" else None
        self._run_id = ""
        self._given: dict[str, Counter[tuple[object, ...]]] = {}  # by run: how often each piece of work was given
        self._errors: dict[str, int] = {}  # their numbers, by what the server is told of them
        self._heard = self._said = time.monotonic()
        self._at = "nothing yet"

    @contextmanager
    def at_work(self) -> Iterator[Node]:
        """Be ready to handle messages."""
        with ExitStack() as stack:
            stack.enter_context(for_nobody_else(self.folder))
            stack.enter_context(self.trainer.local.guard.on_duty(False))
            stack.enter_context(self.federation.session.at_work("fit"))
            yield self

    def idle(self) -> None:
        """Say, once a minute, that the server is silent; called as often as one likes by whoever waits for it."""
        now = time.monotonic()
        if now > max(self._heard, self._said) + _SAY_S:
            self._said = now
            self.say(
                f"waiting for the server, silent for {(now - self._heard) / 60:.0f} min; its last word: {self._at}"
            )

    def handle(self, blob: bytes) -> bytes:
        """Do what a message says; the answer. Whatever goes wrong is an answer too."""
        self._heard = time.monotonic()
        client_id, round_idx, message = -1, -1, None
        outcome: ClientUpdate | ClientFailure | None
        try:
            message = decode(blob, self.limit)
            if message.word == "hello":
                return encode(self._greet(message))
            if message.word == "held":
                return encode(self._tell_held(message))
            if message.word == "keep":
                return encode(self._keep(message))
            client_id, round_idx = message.get("client", int), message.get("round", int)
            if message.get("boot", str) != self.boot or client_id not in self.clients:
                cause = f"client {client_id} is not at home on this node, which was started since"
                return encode(self._failed(client_id, round_idx, cause, moved=True))
            broadcast = self._take_in(message, client_id, round_idx)
            outcome = self._train(client_id, broadcast) if message.word == "train" else self._ask(message, broadcast)
        except (Exception, SystemExit) as error:
            outcome = failure(client_id, round_idx, error)
        sums = {}
        if self.withheld is not None and message is not None and client_id in self.clients:
            try:
                sums = self.withheld.take(message, outcome)
            except Exception as error:  # a message may hold anything
                outcome = failure(client_id, round_idx, error)
        if not isinstance(outcome, ClientFailure):
            try:
                return encode(self._answer(client_id, round_idx, outcome, sums))
            except Exception as error:  # such as metrics too many for a message
                outcome = failure(client_id, round_idx, error)
        return encode(self._failed(client_id, round_idx, self._told(outcome), sums=sums))

    def _told(self, failed: ClientFailure) -> str:
        """What the server is told of a failure; all of it is said here, and in the log, by its number."""
        told = shown(failed.outline)
        if told == shown(failed.cause):
            self.say(str(failed))
            return told
        number = self._errors.setdefault(told, len(self._errors) + 1)
        self.say(f"error {number}: {failed}" + (f"; see {self.log.path}" if failed.details else ""))
        self.log.write(f"error {number}: {failed}\n{failed.details}".rstrip())
        return f"{told} (error {number} in the log of its node)"

    # ------------------------------------------------------------------ who lives here

    def _greet(self, message: Message) -> Message:
        from lit_fed import __version__

        theirs = message.get("version", str)
        if message.get("protocol", int) != PROTOCOL or theirs != __version__:
            cause = f"the node runs lit_fed {__version__} and the server {shown(theirs, 20)}; install the same on both"
        elif (odd := difference(self.settings, message.get("settings", dict))) is not None:
            cause = f"{odd}; start both with the same configuration"
        else:
            clients = {str(one): asdict(report) for one, report in self.reports.items()}
            self._say_where("known to the server")
            return Message("answer", {"boot": self.boot, "clients": clients, "sums": self.withheld is not None})
        self.say(f"refused the server: {cause}")
        return self._failed(-1, -1, shown(cause))

    def _tell_held(self, message: Message) -> Message:
        """Which versions of its clients' states it holds for a run."""
        self._open(message)
        files: VersionedFiles = self.federation.store.files
        own = {str(one) for one in self.clients}
        return Message("answer", {"held": [[name, at] for name, at in files.rounds() if name in own]})

    def _keep(self, message: Message) -> Message:
        """Keep the end of a run, by which clients predict and are tested later on."""
        round_idx, versions = message.get("round", int), message.get("versions", dict)
        if not 0 <= round_idx < self.run.max_rounds or versions.keys() != {str(one) for one in self.clients}:
            raise WireError("the end of a run is not that of these clients; both ends must run the same lit_fed")
        self._open(message)
        self._count("keep")
        payloads, frozen = dict[str, Payload](), dict[str, Payload]()
        for kind in {self.federation.kinds[one] for one in self.clients}:
            payloads[kind] = self.federation.channel.downlink.arrive(message.tensors.get(f"payload/{kind}", {})).payload
            frozen[kind] = message.tensors.get(f"frozen/{kind}", {})
            self._check(payloads[kind], round_idx, kind, "predict")
        found = {int(one): read_version(version) for one, version in versions.items()}
        Kept(self._run_id, round_idx, found, payloads, frozen).write(self.folder)
        self._say_where(f"the run has ended after round {round_idx + 1}; its model is kept in {self.folder}")
        return Message("answer", {})

    def _open(self, message: Message) -> None:
        run_id = message.get("run", str)
        if not RUN_ID.fullmatch(run_id):
            raise WireError(f"{shown(run_id, 40)!r} is no run's name; both ends must run the same lit_fed")
        if run_id != self._run_id:
            self._given.setdefault(run_id, Counter())
            if len(self._given) > _MOST_RUNS:
                del self._given[next(iter(self._given))]
            self.federation.store.open(self.folder / run_id)
            self._run_id = run_id

    # ------------------------------------------------------------------ one client's work

    def _take_in(self, message: Message, client_id: int, round_idx: int) -> Broadcast:
        """What the server sent, and the client's state as the server knows it; forget what it needs no more."""
        federation, store = self.federation, self.federation.store
        if not 0 <= round_idx < self.run.max_rounds:
            raise WireError(f"{round_idx} is no round; both ends must run the same lit_fed")
        self._open(message)
        version = read_version(message.fields.get("version"))
        dropped = message.get("drop", list)
        if len(dropped) > _MOST_DROPPED or not all(type(one) is int and 0 <= one < 2**32 for one in dropped):
            raise WireError(f"the server drops what cannot be dropped, or more than {_MOST_DROPPED:,} states at once")
        if version is not None and version[0] in dropped:
            raise WireError(f"the server drops the state of client {client_id} from which it is to go on")
        protocol = message.fields.get("protocol") if message.word == "ask" else None
        self._count(message.word, protocol if isinstance(protocol, str) else "", client_id, round_idx)
        self._say_where(f"round {round_idx + 1} of {self.run.max_rounds}")
        for one in dropped:
            store.files.delete(str(client_id), one)
        store.load_state_dict({} if version is None else {str(client_id): version}, round_idx)
        kind, device = federation.kinds[client_id], federation.fabric.device
        received: dict[str, dict[str, Any]] = {
            group: {name: tensor.to(device) for name, tensor in message.tensors.get(group, {}).items()}
            for group in ("payload", "frozen")
        }
        payload = federation.channel.downlink.arrive(received["payload"]).payload
        self._check(payload, round_idx, kind, "train" if message.word == "train" else "test")
        return Broadcast(round_idx, {kind: payload}, {kind: received["frozen"]})

    def _check(self, payload: Payload, round_idx: int, kind: str, stage: Stage) -> None:
        """Refuse to go on with less than a first broadcast of the round holds; a later one may hold more."""
        federation = self.federation
        federation.session.divide(round_idx)
        layout = layout_of(federation.algorithm.broadcast(federation.server, round_idx, kind, stage))
        check_payload({name: payload[name] for name in layout if name in payload}, layout, "the server")

    def _count(self, *work: object) -> None:
        """Refuse what a server has asked for again and again.

        Raises:
            WireError: If it has.
        """
        given = self._given[self._run_id]
        given[work] += 1
        if given[work] > _OFTEN:
            what = shown(work[1] if work[0] == "ask" else work[0], 40)
            raise WireError(f"the server asks for {what!r} in one round more often than {_OFTEN} times")

    def _say_where(self, at: str) -> None:
        """Say what the server wants, where it is news."""
        if at != self._at:
            self._at = at
            self.say(f"{time.strftime('%H:%M:%S')} {at}")

    def _train(self, client_id: int, broadcast: Broadcast) -> ClientUpdate | ClientFailure:
        (outcome,) = self.federation.executor.run([client_id], broadcast)
        return outcome

    def _ask(self, message: Message, broadcast: Broadcast) -> ClientUpdate | None:
        if message.word != "ask":
            raise WireError(f"nothing is known of {message.word!r} here; both ends must run the same lit_fed")
        name, subset = message.get("protocol", str), message.get("subset", str)
        settings = self.run.settings
        protocol = next((one for one in settings.protocols if one.name == name), None)
        if protocol is None or type(protocol).answer is Protocol.answer:
            raise WireError(
                f"trainer.protocols on the node has no {shown(name, 40)!r} that asks clients; start both with the same"
            )
        if subset != settings.evaluate_on:
            raise WireError(
                f"the server asks about the {shown(subset, 40)!r} data, and trainer.evaluate_on on the node is "
                f"{settings.evaluate_on!r}; start both with the same"
            )
        return protocol.answer(self.federation, message.get("client", int), broadcast, settings.evaluate_on)

    def _answer(self, client_id: int, round_idx: int, update: ClientUpdate | None, sums: Mapping[str, Any]) -> Message:
        fields: dict[str, Any] = {"client": client_id, "round": round_idx, "silent": update is None, "sums": sums}
        if update is None:
            return Message("answer", fields)
        fields |= {"weight": update.weight, "metrics": update.metrics}
        fields["version"] = self.federation.store.written(client_id)
        return Message("answer", fields, {"payload": self.federation.channel.uplink.pack(update.payload)})

    def _failed(
        self, client_id: int, round_idx: int, cause: str, moved: bool = False, sums: Mapping[str, Any] | None = None
    ) -> Message:
        fields = {"client": client_id, "round": round_idx, "cause": cause, "moved": moved, "sums": dict(sums or {})}
        return Message("failure", fields)


def settle(
    trainer: FederatedTrainer,
    model: Tasks,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    clients: Iterable[int],
    stage: TaskStage,
) -> Run:
    """Put the parts of a run together where only some clients' data are."""
    trainer.participation = FullParticipation()  # who takes part, the server says
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit", clients=clients)
    run = trainer.assemble(model, data, algorithm, stage)
    run.federation.store.keeper = VersionedFiles  # one client at a time: what it keeps is safe when it answers
    return run


@contextmanager
def for_nobody_else(folder: Path) -> Iterator[None]:
    """Make a folder, and whatever this process writes meanwhile, readable for its user alone."""
    before = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        yield
    finally:
        os.umask(before)


def read_version(version: Any) -> Version | None:
    """The version of a client's state, as a message says it.

    Raises:
        WireError: If it is none.
    """
    if version is None:
        return None
    if type(version) is not list or [type(part) for part in version] != [int, int] or min(version) < 0:
        raise WireError("the version of a client's state is none; both ends must run the same lit_fed")
    return version[0], version[1]
