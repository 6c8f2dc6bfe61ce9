"""A session with one client: enter, train, evaluate, predict, answer.

A session holds one task for each kind of network, and loads it with the tensors of the client that is entered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.local import LocalLoop, TaskStage
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, FineTuning, LocalWork, Pass, Phase, Stage, Tensors
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.model import ModelView
from lit_fed.engine.method.task_run import TaskRunOn
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.channel import NOT_FINITE, Channel
from lit_fed.engine.wire.payload import (
    Broadcast,
    ClientUpdate,
    Flat,
    FlatPayload,
    Layout,
    Payload,
    add_prefix,
    are_finite,
    layout_of,
    not_finite,
    split_prefix,
)
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import CheckpointError, NonFiniteUpdate
from lit_fed.seeding import seed_device

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

_STATE = "state/"  # prefix of the method's state in a client's file, beside the personal tensors' own names
_OPTIMIZER = "optimizer/"  # prefix of what its optimizers keep
_CODEC = "codec/"  # prefix of what the uplink's codec keeps there


class Answer(NamedTuple):
    """Tensors that a client sends and keeps.

    Args:
        payload: Sent.
        local_state: Kept until the client next takes part: personal tensors and the method's state.
        weight: Weight in a weighted mean; None for the number of samples.
        flat: The payload as one vector, where it can be one.
        finite: Whether all of them are finite, as far as a sum of each tensor tells.
    """

    payload: Payload
    local_state: Tensors
    weight: float | None
    flat: Flat | None
    finite: bool


class Answers(NamedTuple):
    """Answers of several clients of one kind, each as in `Answer`.

    Args:
        payloads: Empty where `vectors` has them.
        local_states: By client.
        weights: By client.
        vectors: The payloads as the rows of a matrix, where they can be.
        finite: By client.
    """

    payloads: Sequence[Payload]
    local_states: Sequence[Tensors]
    weights: Sequence[float | None]
    vectors: Flat | None
    finite: Sequence[bool]

    @classmethod
    def of(cls, answer: Answer) -> Answers:
        """A table of one client's."""
        flat = answer.flat
        vectors = None if flat is None else Flat(flat.layout, flat.values.unsqueeze(0))
        return cls([answer.payload], [answer.local_state], [answer.weight], vectors, [answer.finite])

    def only(self, chosen: Sequence[int]) -> Answers:
        """Those at some positions, ascending."""
        vectors = None if self.vectors is None else Flat(self.vectors.layout, self.vectors.values[list(chosen)])
        payloads = [self.payloads[idx] for idx in chosen] if self.vectors is None else []
        kept, weights = [self.local_states[idx] for idx in chosen], [self.weights[idx] for idx in chosen]
        return Answers(payloads, kept, weights, vectors, [self.finite[idx] for idx in chosen])

    def of_client(self, idx: int) -> Answer:
        """One client's."""
        kept, weight, finite = self.local_states[idx], self.weights[idx], self.finite[idx]
        if self.vectors is None:
            return Answer(self.payloads[idx], kept, weight, None, finite)
        flat = Flat(self.vectors.layout, self.vectors.values[idx])
        return Answer(FlatPayload(flat), kept, weight, flat, finite)


@dataclass(eq=False)
class Session:
    """Enters clients, one at a time.

    Args:
        loops: Trains and evaluates the task of each kind.
        kinds: Kind of every client's network.
        algorithm: The method.
        store: Clients' state between rounds.
        data: The clients' data.
        work: Length of clients' training.
        seed: The run's.
        guard: Limits a client's time.
        wrappers: Wrappers around the method.
        channel: The wire, of which the session has the clients' ends.
    """

    loops: Mapping[str, LocalLoop]
    kinds: Kinds
    algorithm: Algorithm[Any]
    store: ClientStore
    data: FederatedDataModule
    work: LocalWork
    seed: int
    guard: Guard = field(default_factory=Guard)
    wrappers: Wrappers = field(default_factory=Wrappers)
    channel: Channel = field(default_factory=Channel)

    def __post_init__(self) -> None:
        self._starts_itself = type(self.algorithm).start is not Algorithm.start
        self._keeps_state = type(self.algorithm).initial_state is not Algorithm.initial_state
        self._taken: Broadcast | None = None
        self._memories: dict[int, Tensors] = {}  # by client: what the codec keeps, from entering to sending
        self._starts: dict[str, Tensors] = {}  # by kind: start of clients that keep nothing of the model
        self._fits: dict[str, Layout] = {}  # by kind: layout of a state that the method can continue from
        self._layout: Mapping[str, torch.Size] = {}  # of the last payload, shared by equal ones

    @contextmanager
    def at_work(self, stage: TaskStage | None = None) -> Iterator[None]:
        """Lend the tasks to the federation; clients are entered within.

        Args:
            stage: Stage for the tasks' ``setup`` and ``teardown`` hooks; None calls none.
        """
        with ExitStack() as stack:
            for loop in self.loops.values():
                stack.enter_context(loop.at_work())
                if stage is not None:
                    loop.begin(stage)
            yield
            if stage is not None:
                for loop in self.loops.values():
                    loop.end(stage)

    def loop(self, client: Client) -> LocalLoop:
        """The loop that trains and evaluates a client."""
        return self.loops[self.kinds[client.id]]

    def divide(self, round_idx: int) -> None:
        """Apply the round's split to every model."""
        for loop in self.loops.values():
            loop.model.divide(self.algorithm.split(loop.model, round_idx))

    def enter(
        self, client_id: int, broadcast: Broadcast, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> Client:
        """Load one client into its task: its stored or initial state, and the broadcast.

        Raises:
            CheckpointError: If the client's state does not belong to this model.
        """
        client = self.admit(client_id, broadcast, stage, fine_tuning)
        self.become(client)
        return client

    def restore(self, unmoved: ClientUpdate, broadcast: Broadcast) -> None:
        """Store, as a new version, the state with which a client begins to train on a broadcast.

        Args:
            unmoved: The update of a client that stays at the broadcast, by which a codec begins its memory.
            broadcast: The broadcast.
        """
        client_id = unmoved.client_id
        client = self._meet(client_id, broadcast, "train")
        if (memory := self._memories.pop(client_id, None)) is None:
            memory, buffers = dict[str, Tensor](), self.loop(client).model.buffers
            context = self.channel.up(client_id, broadcast, unmoved.kind, buffers=buffers, memory=memory)
            self.channel.uplink.pack(unmoved.payload, context)
        kept = add_prefix(_STATE, client.state) | add_prefix(_OPTIMIZER, client.optimizers)
        kept |= add_prefix(_CODEC, memory)
        if kept := {**client.own, **kept}:
            self.store.put(client_id, kept)

    def become(self, client: Client) -> None:
        """Load the client's task with the tensors that it starts from."""
        loop = self.loop(client)
        client.model, client.task_run, loop.state.client = loop.model, loop.state.task_run, client
        client.model.renew()
        client.model.load(client.begun)

    def leave(self) -> None:
        """Hold no tensor of the last client and of its broadcast."""
        self._taken, self._starts, self._memories = None, {}, {}
        for loop in self.loops.values():
            loop.state.client = Client(0, 0, "train", 0, loop.model, task_run=loop.state.task_run)

    def admit(
        self, client_id: int, broadcast: Broadcast, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> Client:
        """A client with the tensors that it starts from, not yet loaded into the task."""
        client = self._meet(client_id, broadcast, stage, fine_tuning)
        if self._starts_itself:  # it may run the task, which may draw random numbers
            seed_device(client.derive_seed("start"), self.loop(client).fabric.device)
        if client.own or client.addressed or self._starts_itself:
            client.begun = self.algorithm.start(client)
        else:  # one mapping for all clients of the kind
            kind = self.kinds[client_id]
            if kind not in self._starts:
                self._starts[kind] = self.algorithm.start(client)
            client.begun = self._starts[kind]
        return client

    def check_kept(self, broadcast: Broadcast) -> None:
        """Refuse states that the method cannot continue from, by one client of each kind.

        Raises:
            CheckpointError: If a state lacks a tensor of the initial one, has another shape, or is damaged.
        """
        checked = set()
        for client_id in self.store.clients():
            if client_id >= self.data.num_clients or (kind := self.kinds[client_id]) in checked:
                continue
            checked.add(kind)
            client = self._meet(client_id, broadcast, "train")
            _check_alike(client_id, client.state, self.algorithm.initial_state(client))

    def _meet(
        self, client_id: int, broadcast: Broadcast, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> Client:
        """A client with its stored or initial state and the broadcast, before `Algorithm.start`."""
        if self._taken is not broadcast:
            self.divide(broadcast.round_idx)
            for kind, frozen in broadcast.frozen.items():
                self.loops[kind].model.load(frozen)
            self._taken, self._starts, self._memories = broadcast, {}, {}
        kind = self.kinds[client_id]
        loop = self.loops[kind]
        model = loop.model
        client = Client(
            client_id, broadcast.round_idx, stage, self.seed, model, self.data, self.work, fine_tuning,
            received=broadcast.received(client_id, kind), wrap_loader=self.wrappers.loader_of(stage),
        )  # fmt: skip
        if broadcast.addressed is not None:
            client.addressed = broadcast.addressed[client_id].payload
        if self._starts_itself or self._keeps_state:
            frozen = broadcast.frozen.get(kind, {})  # the task may hold what another client began with
            client.model = ModelView(
                model, lambda name: _first(name, client.own, client.received, frozen, model.initial)
            )
            client.task_run = TaskRunOn(loop.state.task_run, client.model)
        stored = self.store.get(client_id) or {}
        if stored:
            memory, stored = split_prefix(_CODEC, stored)
            if memory and stage == "train":
                self._memories[client_id] = memory
            client.optimizers, stored = split_prefix(_OPTIMIZER, stored)
            if client.optimizers and stage == "train" and loop.gradients.client_optimizer == "fresh":
                raise CheckpointError(
                    f"client {client_id} keeps the state of its optimizer; set trainer.client_optimizer to kept"
                )
        client.is_new = not stored
        names = model.personal_names
        if not stored:
            client.own = {name: model.initial[name] for name in names}
            client.state = self.algorithm.initial_state(client) if self._keeps_state else {}
        else:
            device = loop.fabric.device
            kept, kept_own = split_prefix(_STATE, stored)
            client.state = _to(kept, device)
            if odd := sorted(kept_own.keys() ^ set(names)):
                raise _foreign(client_id, odd[0])
            client.own = _to(kept_own, device)
            if self.store.restored:
                _check_alike(client_id, client.own, {name: model.tensor(name) for name in names})
                if self._fits.get(kind) != (layout := layout_of(kept)):
                    _check_alike(client_id, client.state, self.algorithm.initial_state(client))
                    self._fits[kind] = layout  # most clients' states have the same
        return client

    def phases(self, client: Client) -> list[Phase | Pass]:
        """The client's local work in this stage."""
        return self.algorithm.phases(client)

    def train(self, client: Client) -> Meter:
        """Run the client's local work."""
        return self.loop(client).train(client, self.phases(client))

    @contextmanager
    def prepared(self, client: Client) -> Iterator[None]:
        """Run the work of the client's stage, and undo it on leaving."""
        if not (phases := self.phases(client)):
            yield
            return
        with self.loop(client).model.preserved():
            self.loop(client).train(client, phases)
            yield

    def evaluate(self, client: Client, loader: Iterable[Any], subset: Literal["val", "test"]) -> dict[str, float]:
        """Means that the client's evaluation step logs over a loader."""
        return self.loop(client).evaluate(loader, subset)

    def predict(self, client: Client, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch with the client's predictions."""
        return self.loop(client).predict(loader)

    def answer(self, client: Client) -> Answer:
        """The method's answer for a trained client."""
        made = self.algorithm.finish(client)
        flat = Flat.copy_of(made.payload, self._layout)
        if flat is not None:
            self._layout = flat.layout
        kept = self.local_state(client, made.state)
        sent = made.payload.values() if flat is None else [flat.values]
        return Answer(made.payload, kept, made.weight, flat, are_finite([*sent, *kept.values()]))

    def take(self, clients: Sequence[Client], answers: Answers, metrics: Sequence[dict[str, float]]) -> Updates:
        """Make updates of clients of one kind whose answers are finite, for `send`.

        The metrics gain the learning rate of the round.
        """
        first = clients[0]
        if (rate := self.loop(first).optimizers.rate_of(first.round_idx)) is not None:
            for logged in metrics:
                logged["lr"] = rate
        ids, kind = [client.id for client in clients], self.kinds[first.id]
        pairs = zip(answers.weights, self.data.census.samples(ids), strict=True)
        weights: list[float] = [count if weight is None else weight for weight, count in pairs]
        if answers.vectors is not None:
            return Updates(ids, kind, weights, list(metrics), answers.vectors)
        rows = zip(ids, answers.payloads, weights, metrics, strict=True)
        return Updates.of([ClientUpdate(*row, kind) for row in rows])

    def is_done(self, local_states: Sequence[Tensors]) -> bool:
        """Whether updates go out as `take` made them: nothing wraps or packs them, and nothing is stored with them."""
        packs = self.channel.uplink.codec is not None or bool(self._memories)
        return not packs and not self.wrappers.stack and not any(local_states)

    def send(self, update: ClientUpdate, client: Client, kept: Tensors) -> ClientUpdate:
        """Pack a client's update for the wire, after `Wrappers.on_clients`, and store the client's state.

        Raises:
            NonFiniteUpdate: If the uplink's codec would keep NaN or infinity; the stored state stays unchanged.
        """
        if self._memories or self.channel.uplink.codec is not None:
            memory = dict(self._memories.pop(client.id, {}))
            if self.channel.uplink.codec is not None and self._taken is not None:
                known: dict[str, Any] = {"buffers": self.loop(client).model.buffers, "memory": memory}
                if self.channel.uplink.codec.feedback == "ef21":  # a node has the client's end alone
                    known["decoder"] = dict(self.store.decoder(client.id) or memory)
                context = self.channel.up(client.id, self._taken, update.kind, **known)
                update.arrival = self.channel.uplink.cross(update.payload, context)
                if not are_finite(memory.values()):
                    raise NonFiniteUpdate(f"its update {NOT_FINITE}")
            kept = {**kept, **add_prefix(_CODEC, memory)}
        if kept:
            self.store.put(client.id, kept)
        return update

    def check_finite(self, client: Client, metrics: Mapping[str, float], answer: Answer) -> None:
        """Refuse a trained client's metrics and answer where they are not finite.

        A kept tensor that was infinite at first, such as the best loss so far, may stay so.

        Raises:
            NonFiniteUpdate: Naming them; the client's stored state stays unchanged.
        """
        if answer.finite and all(map(math.isfinite, metrics.values())):
            return
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not bad:
            bad = ["the update"] if not_finite(answer.payload) else self._newly_infinite(client, answer.local_state)
        if bad:
            raise NonFiniteUpdate(f"{', '.join(bad)} is not finite; try a smaller learning rate")

    def _newly_infinite(self, client: Client, local_state: Tensors) -> list[str]:
        if not (odd := not_finite(local_state)):
            return []
        begun = {n: t for n, t in client.model.initial.items() if n in odd}
        begun |= add_prefix(_STATE, self.algorithm.initial_state(client))
        spoiled = [name for name in odd if name not in not_finite(begun)]
        return [f"its kept {spoiled[0].removeprefix(_STATE)}"] if spoiled else []

    def local_state(self, client: Client, method_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that a client keeps until it next takes part: personal ones, the method's and optimizers' state."""
        model = client.model
        kept = {**model.tensors(model.personal_names), **add_prefix(_STATE, method_state)}
        return {**kept, **add_prefix(_OPTIMIZER, client.optimizers)} if client.optimizers else kept


def _first(name: str, *held: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor of a name in the first mapping that has it."""
    return next((tensors[name] for tensors in held if name in tensors), None)


def _check_alike(client_id: int, stored: Payload, initial: Payload) -> None:
    """Refuse kept tensors that differ in layout from the initial ones; tensors added later are not checked."""
    for name, tensor in initial.items():
        if name not in stored or layout_of({name: stored[name]}) != layout_of({name: tensor}):
            raise _foreign(client_id, name, stored.get(name), tensor)


def _foreign(client_id: int, name: str, there: Tensor | None = None, here: Tensor | None = None) -> CheckpointError:
    how = ""
    if there is not None and here is not None:
        forms = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in (there, here)]
        how = f": {forms[0]} there, {forms[1]} here"
    return CheckpointError(
        f"the state of client {client_id} belongs to another model or method; it differs in {name!r}{how}"
    )


def _to(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
