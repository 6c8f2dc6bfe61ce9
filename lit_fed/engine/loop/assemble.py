"""Everything that takes part in a run, put together once before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from lightning import Callback as LightningCallback
from lightning import Fabric, LightningModule

from lit_fed.engine.clients.executor import Executor
from lit_fed.engine.clients.guard import Guard
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.server_training import ServerLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.clients.trial import extremes, try_out
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.lightning.compatibility import (
    check_data,
    check_optimization,
    check_participation,
    check_task,
    probe,
)
from lit_fed.engine.lightning.options import GradientOptions, NetworkOptions
from lit_fed.engine.lightning.task_trainer import TaskTrainer
from lit_fed.engine.loop.surroundings import surroundings
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import LocalWork, Phase
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.model import BufferPolicy, Model
from lit_fed.engine.method.population import Population
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.payload import Channel
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.machine import keep_freed_memory
from lit_fed.participation import Participation
from lit_fed.tensors import map_tensors

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


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
    wrappers: Wrappers,
    protocols: Sequence[Protocol],
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
    session = Session(loops, kinds, algorithm, store, data, work, seed, guard, wrappers)
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
    if wrappers.stack:
        with session.at_work():
            wrappers.around = surroundings(federation, protocols, max_rounds)
        wrappers.setup()
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
