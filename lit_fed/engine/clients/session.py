"""Being one client: enter, train, evaluate, predict.

A session holds one task for each kind of network, and a client is made of it by writing the client's tensors into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.local import LocalLoop, TaskStage
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, FineTuning, LocalWork, Pass, Phase, Stage, Tensors
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.finite import not_finite
from lit_fed.engine.wire.payload import Layout, Payload, add_prefix, layout_of, split_prefix
from lit_fed.errors import CheckpointError, NonFiniteUpdate

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

_STATE = "state/"  # in a client's file: what the method keeps, beside the personal tensors under their own names


class Session:
    """Enters clients, one after the other.

    Args:
        loops: Trains and evaluates the task of each kind.
        kinds: Which client has which.
        algorithm: The method.
        store: Where clients keep their state between rounds.
        data: The clients' data.
        work: How long clients train.
        seed: The seed of the run.
        guard: Stands beside clients that train.
        wrappers: What is around the method.
    """

    def __init__(
        self,
        loops: Mapping[str, LocalLoop],
        kinds: Kinds,
        algorithm: Algorithm[Any],
        store: ClientStore,
        data: FederatedDataModule,
        work: LocalWork,
        seed: int,
        guard: Guard | None = None,
        wrappers: Wrappers | None = None,
    ) -> None:
        self.loops = loops
        self.kinds = kinds
        self.algorithm = algorithm
        self.store = store
        self.data = data
        self.work = work
        self.seed = seed
        self.guard = Guard() if guard is None else guard
        self.wrappers = wrappers or Wrappers()
        self._taken: Broadcast | None = None
        self._fits: dict[str, Layout] = {}  # by kind: of a state that the method can go on with

    @contextmanager
    def at_work(self, stage: TaskStage | None = None) -> Iterator[None]:
        """The tasks belong to the federation for a while: clients are entered and run within.

        Args:
            stage: What for, which the tasks' hooks around it are told; None tells them nothing.
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
        """What trains and evaluates a client."""
        return self.loops[self.kinds[client.id]]

    def divide(self, round_idx: int) -> None:
        """Give every model the round's split."""
        for loop in self.loops.values():
            loop.model.divide(self.algorithm.split(loop.model, round_idx))

    def enter(
        self, client_id: int, broadcast: Broadcast, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> Client:
        """Become one client: its own state, or the initial one where it has none, and what the server sent.

        Raises:
            CheckpointError: If the client's state does not belong to this model.
        """
        client = self.admit(client_id, broadcast, stage, fine_tuning)
        self.loop(client).state.client = client
        client.model.renew()
        client.model.load(client.begun)
        return client

    def admit(
        self, client_id: int, broadcast: Broadcast, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> Client:
        """A client with all that it begins with, before its tensors are anybody's model."""
        client = self._meet(client_id, broadcast, stage, fine_tuning)
        client.begun = self.algorithm.start(client)
        return client

    def check_kept(self, broadcast: Broadcast) -> None:
        """Refuse states that the method cannot go on with, by one client of each kind: the others keep the same.

        Raises:
            CheckpointError: If a state lacks what the method begins with, or has it in another shape, or is damaged.
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
        """A client with what it keeps, or begins with, and what it received; not yet begun."""
        if self._taken is not broadcast:
            self.divide(broadcast.round_idx)
            for kind, frozen in broadcast.frozen.items():
                self.loops[kind].model.load(frozen)
            self._taken = broadcast
        kind = self.kinds[client_id]
        loop = self.loops[kind]
        model = loop.model
        client = Client(
            client_id, broadcast.round_idx, stage, self.seed, model, self.data, self.work, fine_tuning,
            received=broadcast.payloads[kind], objective=loop.objective, around=self.wrappers.loader_of(stage),
        )  # fmt: skip
        stored = self.store.get(client_id)
        client.is_new = stored is None
        names = model.personal_names
        if stored is None:
            client.own = {name: model.initial[name] for name in names}
            client.state = self.algorithm.initial_state(client)
        else:
            device = loop.fabric.device
            kept, own = split_prefix(_STATE, stored)
            client.state = _to(kept, device)
            if odd := sorted(own.keys() ^ set(names)):
                raise _foreign(client_id, odd[0])
            client.own = _to(own, device)
            if self.store.restored:
                _check_alike(client_id, client.own, {name: model.tensor(name) for name in names})
                if self._fits.get(kind) != (layout := layout_of(kept)):
                    _check_alike(client_id, client.state, self.algorithm.initial_state(client))
                    self._fits[kind] = layout  # as the next one's is, as a rule
        return client

    def phases(self, client: Client) -> list[Phase | Pass]:
        """The client's work in this stage."""
        return self.algorithm.phases(client)

    def train(self, client: Client) -> Meter:
        """Do the client's work."""
        return self.loop(client).train(client, self.phases(client))

    @contextmanager
    def prepared(self, client: Client) -> Iterator[None]:
        """The client after the work that its stage asks for, whose effects end with the context."""
        if not (phases := self.phases(client)):
            yield
            return
        with self.loop(client).model.preserved():
            self.loop(client).train(client, phases)
            yield

    def evaluate(self, client: Client, loader: Iterable[Any], subset: Literal["val", "test"]) -> dict[str, float]:
        """What the client's evaluation step logs over a loader."""
        return self.loop(client).evaluate(loader, subset)

    def predict(self, client: Client, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Every batch with what the client predicts for it."""
        return self.loop(client).predict(loader)

    def put_away(
        self, client: Client, metrics: Mapping[str, float], made: Payload, kept: Tensors, finite: bool
    ) -> None:
        """Keep what a client keeps, once all that it has made is known to be finite; see `check_finite`."""
        self.check_finite(client, metrics, made, kept, finite)
        if kept:
            self.store.put(client.id, kept)

    def check_finite(
        self, client: Client, metrics: Mapping[str, float], made: Payload, kept: Tensors, finite: bool = False
    ) -> None:
        """Refuse what a client has made where it is not finite.

        What it began with as infinite, such as the best loss so far, may stay so.

        Args:
            client: Trained.
            metrics: Of its training.
            made: Its update.
            kept: What it keeps.
            finite: Whether both are known to be.

        Raises:
            NonFiniteUpdate: If something is not; the client's stored state stays as it was.
        """
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not bad and not finite:
            bad = ["the update"] if not_finite(made) else self._newly_infinite(client, kept)
        if bad:
            raise NonFiniteUpdate(f"{', '.join(bad)} is not finite; try a smaller learning rate")

    def _newly_infinite(self, client: Client, kept: Tensors) -> list[str]:
        if not (odd := not_finite(kept)):
            return []
        begun = {n: t for n, t in client.model.initial.items() if n in odd}
        begun |= add_prefix(_STATE, self.algorithm.initial_state(client))
        found = [name for name in odd if name not in not_finite(begun)]
        return [f"what it keeps as {found[0].removeprefix(_STATE)}"] if found else []

    def kept(self, client: Client, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a client keeps until it next takes part: its personal tensors and what the method keeps."""
        model = client.model
        return {**model.tensors(model.personal_names), **add_prefix(_STATE, state)}


def _check_alike(client_id: int, kept: Payload, like: Payload) -> None:
    """Refuse what a client has kept where the method began it otherwise; what it came to keep later is not known."""
    for name, begun in like.items():
        if name not in kept or layout_of({name: kept[name]}) != layout_of({name: begun}):
            raise _foreign(client_id, name, kept.get(name), begun)


def _foreign(client_id: int, name: str, there: Tensor | None = None, here: Tensor | None = None) -> CheckpointError:
    how = ""
    if there is not None and here is not None:
        told = [f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in (there, here)]
        how = f", which is {told[0]} there and {told[1]} here"
    return CheckpointError(
        f"the state of client {client_id} belongs to another model or method: it differs in {name!r}{how}"
    )


def _to(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
