"""Everything that takes part in a run, put together once before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from lightning import Callback as LightningCallback
from lightning import Fabric, LightningModule
from torch import Tensor

from lit_fed.engine.algorithm import Algorithm, Server, global_model
from lit_fed.engine.client import LocalWork, Phase, Stage
from lit_fed.engine.compatibility import check_data, check_optimization, check_participation, check_task, probe
from lit_fed.engine.executor import Executor
from lit_fed.engine.finite import not_finite
from lit_fed.engine.guard import Guard
from lit_fed.engine.kinds import Kinds
from lit_fed.engine.local import LocalLoop
from lit_fed.engine.local_batches import map_tensors
from lit_fed.engine.model import BufferPolicy, Model
from lit_fed.engine.options import GradientOptions, NetworkOptions
from lit_fed.engine.participation import Participation
from lit_fed.engine.payload import Channel, decoded, encoded, num_bytes
from lit_fed.engine.population import Population
from lit_fed.engine.server_training import ServerLoop
from lit_fed.engine.session import Broadcast, Session
from lit_fed.engine.store import ClientStore
from lit_fed.engine.strategy import Workers
from lit_fed.engine.task_trainer import TaskTrainer
from lit_fed.engine.trial import extremes, try_out
from lit_fed.errors import ConfigError, NonFiniteServer
from lit_fed.machine import keep_freed_memory

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

_GLOBAL = "the global model"


@dataclass(slots=True)
class Federation:
    """The parts of a running federation.

    Args:
        fabric: Launched.
        workers: The processes over which clients are spread.
        algorithm: The method.
        server: The server's state.
        data: The population's data.
        participation: Who takes part.
        kinds: Which client has which network.
        channel: The wire.
        store: The clients' states.
        session: Enters clients.
        executor: Trains cohorts.
        seed: The seed of the run.
        begun_infinite: Names of what of the server was not finite before the first round.
    """

    fabric: Fabric
    workers: Workers
    algorithm: Algorithm[Any]
    server: Server
    data: FederatedDataModule
    participation: Participation
    kinds: Kinds
    channel: Channel
    store: ClientStore
    session: Session
    executor: Executor
    seed: int
    begun_infinite: frozenset[str] = frozenset()

    @property
    def loops(self) -> Mapping[str, LocalLoop]:
        """What trains and evaluates the task of each kind."""
        return self.session.loops

    def broadcast(self, round_idx: int, stage: Stage = "train") -> Broadcast:
        """What clients receive in a round, after the wire."""
        self.session.divide(round_idx)
        payloads, sizes, wire, codec = {}, {}, {}, self.channel.downlink
        for kind in self.kinds.names:
            sent = self.algorithm.broadcast(self.server, round_idx, kind, stage)
            wire[kind] = encoded(sent, codec)
            payloads[kind], sizes[kind] = decoded(wire[kind], codec), num_bytes(wire[kind])
            if codec is not None and (odd := not_finite(payloads[kind], not_finite(sent))):
                raise NonFiniteServer(
                    f"{odd[0]} of what the server sends in round {round_idx} is no longer finite after "
                    "trainer.downlink_codec; choose one with a wider range"
                )
        frozen = {}
        for kind, loop in self.loops.items():
            names = loop.model.split.frozen
            held = self.global_model(round_idx, kind) if names else {}
            frozen[kind] = {name: held[name] for name in names if name in held}
        return Broadcast(round_idx, payloads, frozen, sizes, wire)

    def not_finite(self, round_idx: int) -> list[str]:
        """Names of what the server holds, its global models included, that is NaN or infinite.

        What the method itself began as such, like the best loss so far or a mask of attention, is its own business.

        Args:
            round_idx: The round that was run last.
        """
        held = {**self.server, _GLOBAL: self.global_models(round_idx)}
        return not_finite(held, self.begun_infinite)

    def global_model(self, round_idx: int, kind: str | None = None) -> dict[str, Tensor]:
        """The global model of a kind, or of the first one; empty for methods without one."""
        return global_model(self.algorithm, self.server, round_idx, kind or self.kinds.names[0])

    def global_models(self, round_idx: int) -> dict[str, dict[str, Tensor]]:
        """The global model of every kind that has one."""
        found = {kind: self.global_model(round_idx, kind) for kind in self.kinds.names}
        return {kind: model for kind, model in found.items() if model}


def assemble(
    fabric: Fabric,
    tasks: Mapping[str, LightningModule],
    kinds: Kinds,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    *,
    participation: Participation,
    work: LocalWork,
    gradients: GradientOptions,
    channel: Channel,
    store: ClientStore,
    executor: Callable[[Session], Executor],
    buffers: BufferPolicy,
    networks: NetworkOptions,
    watchers: Iterable[LightningCallback],
    max_rounds: int,
    seed: int,
    guard: Guard,
    stage: str = "fit",
) -> Federation:
    """Check that the parts fit, set them up in order, and join them.

    The task is set up for a stage: ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigError: For parts that cannot work together; nothing has been trained yet.
    """
    keep_freed_memory()
    workers = Workers(fabric)
    if not hasattr(data, "reserve"):
        name = type(data).__name__
        raise ConfigError(f"datamodule is a {name}, which knows no clients; wrap it: lit_fed.data.Wrapped({name}(…))")
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup("fit")
    data.move_to(fabric.device)
    kinds.check(data)
    participation.setup(data.num_clients, data.num_samples, seed)
    check_participation(algorithm, participation)
    if participation.nominal_cohort_size < workers.world_size:
        raise ConfigError(
            f"a cohort of {participation.nominal_cohort_size} clients cannot keep {workers.world_size} processes busy;"
            " use fewer devices, a larger cohort, or strategy=ddp"
        )
    models = {}
    for kind, task in tasks.items():
        _set_up(task, TaskTrainer(fabric, max_rounds, data, gradients, workers.data_parallel), stage)
        own = {id(parameter) for parameter in task.parameters() if not parameter.requires_grad}
        check_data(task, algorithm, data)
        algorithm.adapt(task)
        check_task(task, algorithm)
        model = models[kind] = Model(task, buffers)
        model.frozen_by_method = frozenset(name for name in model.fixed if id(model.parameters[name]) not in own)
    population = Population(data, participation, kinds, seed)
    loops = {
        kind: LocalLoop(
            fabric, model, algorithm, workers, gradients, watchers, max_rounds, data, networks.channels_last
        )
        for kind, model in models.items()
    }
    population.server_loop = ServerLoop(fabric, loops)
    session = Session(loops, kinds, algorithm, store, data, work, seed, guard)
    with session.at_work():
        for kind, model in models.items():
            model.divide(algorithm.split(model, 0))
            _same_start_everywhere(model, fabric)
            model.staying = _staying(model, algorithm, max_rounds)
            model.remember(_first_tensors(model, algorithm))
            loop, loader = loops[kind], _some_batches(data, kinds, kind)
            loop.expect(Phase("train", loader, work.epochs, work.steps))
            check_optimization(loop.objective, algorithm, workers.data_parallel, gradients)
            probe(loop.objective, algorithm, loop.batches(loader))
            if stage == "fit" and (found := extremes(data, kinds, kind, work)) is not None:
                try_out(loop, data, found, work, max_rounds)
            if networks.compile:
                for child in model.task.children():
                    if any(True for _ in child.parameters()):
                        child.compile()
        server = map_tensors(algorithm.setup(models, population), lambda tensor: tensor.to(fabric.device))
    federation = Federation(
        fabric, workers, algorithm, server, data, participation, kinds, channel, store, session,
        executor(session), seed,
    )  # fmt: skip
    with session.at_work():
        federation.begun_infinite = frozenset(federation.not_finite(0))
        if stage == "fit":
            federation.executor.prepare(federation.broadcast(0))
    return federation


def _staying(model: Model, algorithm: Algorithm[Any], max_rounds: int) -> frozenset[str]:
    """Names of tensors that do not travel in every round: a client that is new begins with the first model's."""
    shared = [set(algorithm.split(model, round_idx).shared) for round_idx in range(max(1, max_rounds))]
    travels = set.intersection(*shared).difference(model.fixed)
    if all(shared) and model.buffer_policy != "local":
        travels.update(model.buffers)
    return frozenset(model.names) - travels


def _first_tensors(model: Model, algorithm: Algorithm[Any]) -> list[str]:
    """Names of the tensors of the first model that somebody may ask for; a large one is not kept for nothing."""
    every = type(algorithm).initial_state is not Algorithm.initial_state
    return [name for name in model.names if every or name in model.staying]


def _set_up(task: LightningModule, trainer: TaskTrainer, stage: str) -> None:
    """Let a task prepare itself, in Lightning's order; ``self.trainer`` is there."""
    task.trainer = trainer  # type: ignore[assignment]  # a Trainer in what it offers
    try:
        with trainer.fabric.rank_zero_first(local=True):
            if trainer.fabric.local_rank == 0:
                task.prepare_data()
        task.setup(stage)
        task.configure_model()
    finally:
        task.trainer = None


def _some_batches(data: FederatedDataModule, kinds: Kinds, kind: str) -> Iterable[Any]:
    """Batches of the first client of a kind that has data."""
    for client_id in data.clients:
        if kinds[client_id] == kind and data.num_samples(client_id):
            return data.train_loader(client_id, torch.Generator().manual_seed(0))
    return []


def _same_start_everywhere(model: Model, fabric: Fabric) -> None:
    """Every process starts from the first one's weights, whatever it drew itself."""
    if fabric.world_size > 1:
        for tensor in model.tensors().values():
            torch.distributed.broadcast(tensor, src=0)
