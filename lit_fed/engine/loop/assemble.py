"""Joins the parts of a run, once, before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed
from lightning import Fabric, LightningModule
from torch import Tensor

from lit_fed.checks import check_range
from lit_fed.data.population.naming import Keys, NamedClients, clients_of
from lit_fed.engine.clients import graphs
from lit_fed.engine.clients.executor import Executor, SequentialExecutor, layouts_of
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.server_training import ServerLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.clients.trial import extremes, length_line, schedule_line, try_out, try_test
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.lightning.compatibility import (
    check_data,
    check_optimization,
    check_participation,
    check_task,
    probe,
    whose,
)
from lit_fed.engine.lightning.task_trainer import TaskTrainer
from lit_fed.engine.loop.settings import LocalSettings, RunParts, RunSettings
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Phase
from lit_fed.engine.method.model import BufferPolicy, Model
from lit_fed.engine.method.population import Population
from lit_fed.engine.method.wrapper import WrappedRun
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
from lit_fed.engine.wire.channel import Channel
from lit_fed.engine.wire.payload import Broadcast, Layout, num_bytes
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.machine import keep_freed_memory
from lit_fed.networks.base import file_of, shared
from lit_fed.participation import Participation
from lit_fed.tensors import map_tensors

ExecutorName = Literal["sequential", "vectorized", "auto"]

EXECUTORS: dict[str, Callable[..., Executor]] = {
    "sequential": SequentialExecutor,
    "vectorized": VectorizedExecutor,
    "auto": AutoExecutor,
}


def executor_maker(name: str, group_size: int | None) -> Callable[[Session], Executor]:
    """Maker of a session's executor.

    Args:
        name: A key of `EXECUTORS`.
        group_size: Clients in a group; None leaves it to the executor.
    """
    if group_size is None:
        return EXECUTORS[name]
    check_range("trainer.group_size", group_size, least=1)
    if name == "sequential":
        raise ConfigError(
            f"trainer.group_size is {group_size!r}, but trainer.executor=sequential trains one client after the other; "
            "set trainer.executor to vectorized or auto, or leave trainer.group_size out"
        )
    return partial(EXECUTORS[name], group_size=group_size)


def wrapped_run(federation: Federation, settings: RunSettings) -> WrappedRun:
    """Describe an assembled federation, whose session is at work."""
    kinds = federation.kinds
    client = next((one for one in federation.data.census.clients if kinds[one] == kinds.names[0]), 0)

    def layout(broadcast: Broadcast) -> Layout:
        return layouts_of(federation.session, [client], broadcast)[kinds.names[0]]

    def common_places(broadcast: Broadcast, layout: Layout) -> Tensor | None:
        context = federation.channel.up(client, broadcast, kinds.names[0], buffers=first.model.buffers)
        return federation.channel.common_places(layout, context)

    first = next(iter(federation.loops.values()))
    averaged = first.model.buffers.keys() & set(first.model.shared_names("up"))
    return WrappedRun(
        algorithm=federation.algorithm,
        server=federation.server,
        data=federation.data,
        participation=federation.participation,
        broadcast=federation.broadcast(0),
        layout=layout,
        common_places=common_places,
        loops=federation.loops,
        work=federation.session.work,
        protocols=tuple(settings.protocols),
        averaged=frozenset(averaged),
        max_rounds=settings.max_rounds,
        on_client_failure=settings.on_client_failure,
        seed=federation.seed,
        fabric=federation.fabric,
    )


def assemble(
    fabric: Fabric,
    parts: RunParts,
    local: LocalSettings,
    settings: RunSettings,
    channel: Channel,
    store: ClientStore,
    stage: str = "fit",
) -> Federation:
    """Check that the parts fit, set them up in order, and join them.

    Args:
        fabric: Launched.
        parts: To be joined.
        local: Settings of the clients' training.
        settings: Used for rounds and the seed.
        channel: The wire.
        store: Keeps the clients' states.
        stage: ``fit``, ``validate``, ``test`` or ``predict``; the tasks are set up for it.
    """
    keep_freed_memory()
    workers, algorithm, data, kinds, max_rounds = (
        Workers(fabric), parts.algorithm, parts.data, parts.kinds, settings.max_rounds
    )  # fmt: skip
    _set_up_population(fabric, workers, parts, settings.seed)
    models, shown = {}, local.wrappers.visible_data(data) if stage == "fit" else data
    for kind, task in parts.tasks.items():
        _set_up(task, TaskTrainer(fabric, max_rounds, shown, local.gradients, workers.data_parallel), stage)
        models[kind] = _adapted(task, parts, local.buffers)
    population = Population(data, parts.participation, kinds, settings.seed)
    if stage == "fit":
        population.say = fabric.print
        if not local.wrappers.withhold and (line := data.census.untaught()) is not None:
            fabric.print(line)
    loops = {
        kind: LocalLoop(
            fabric, model, algorithm, workers, local.gradients, local.watchers, max_rounds, shown,
            local.networks.channels_last,
        )
        for kind, model in models.items()
    }  # fmt: skip
    population.server_loop = ServerLoop(fabric, loops)
    session = Session(
        loops, kinds, algorithm, store, data, local.work, settings.seed, local.guard, local.wrappers, channel
    )
    with session.at_work():
        for kind in models:
            tested = bool(settings.evaluate_every) and settings.evaluate_on == "test"
            _prepare_kind(kind, loops[kind], parts, local, max_rounds, stage, tested)
        if stage == "fit" and "levels" in algorithm.all_needs:
            _check_levels(loops, parts)
        server = map_tensors(algorithm.setup(models, population), lambda tensor: tensor.to(fabric.device))
        server = shared(server, [model.base for model in models.values()])
    federation = Federation(
        fabric, workers, algorithm, server, data, parts.participation, kinds, channel, store, session,
        local.executor(session), settings.seed, settings.on_client_failure == "skip",
    )  # fmt: skip
    if (speeds := parts.participation.speeds) is not None and speeds.trace is not None:
        with session.at_work():
            parts.participation.payload_bytes = _crossing(federation)
    if local.wrappers.stack:
        with session.at_work():
            local.wrappers.setup(wrapped_run(federation, settings))
    with session.at_work():
        federation.begun_infinite = frozenset(federation.not_finite(0))
        if stage == "fit":
            federation.executor.prepare(federation.broadcast(0))
            if local.networks.compile == "graph":
                graphs.try_out(session, federation.broadcast(0))
    return federation


def _crossing(federation: Federation) -> Callable[[int], tuple[int, int]]:
    """The bytes of a client's download and upload in round 0, by its id, as its kind's."""
    broadcast, kinds = federation.broadcast(0), federation.kinds
    clients = [next(one for one in federation.data.census.clients if kinds[one] == kind) for kind in kinds.names]
    channel, down, up = federation.channel, dict[str, int](), dict[str, int]()
    layouts = layouts_of(federation.session, clients, broadcast)
    for kind, client_id in zip(kinds.names, clients, strict=True):
        context = channel.up(client_id, broadcast, kind, buffers=federation.loops[kind].model.buffers)
        zeros = {name: torch.zeros(size, dtype=dtype) for name, (dtype, size) in layouts[kind].items()}
        down[kind] = broadcast.bytes_down(client_id, kind)
        up[kind] = num_bytes(channel.uplink.pack(zeros, context))
    return lambda client_id: (down[kinds[client_id]], up[kinds[client_id]])


def absent_of(data: NamedClients, participation: Participation) -> list[int]:
    """The clients that a participation names as absent."""
    keys = Keys("participation.absent", "participation.absent_positions")
    return clients_of(data, keys, participation.absent, participation.absent_positions) or []


def _set_up_population(fabric: Fabric, workers: Workers, parts: RunParts, seed: int) -> None:
    """Prepare the data and the participation, and check that the cohort keeps all processes busy."""
    data, algorithm, participation = parts.data, parts.algorithm, parts.participation
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup("fit")
    data.move_to(fabric.device)
    parts.kinds.check(data)
    absent = absent_of(data, participation)
    data.leave_out(absent)
    participation.setup(data.num_clients, data.census.num_samples, seed)
    participation.lose(absent)
    check_participation(algorithm, participation)
    if participation.nominal_cohort_size < workers.world_size:
        raise ConfigError(
            f"a cohort of {participation.nominal_cohort_size} clients cannot keep {workers.world_size} processes busy;"
            " use fewer devices, a larger cohort, or strategy=ddp"
        )


def _set_up(task: LightningModule, trainer: TaskTrainer, stage: str) -> None:
    """Call a task's set-up hooks in Lightning's order, with ``self.trainer`` in place."""
    task.trainer = trainer  # type: ignore[assignment]  # a Trainer in what it offers
    try:
        with trainer.fabric.rank_zero_first(local=True):
            if trainer.fabric.local_rank == 0:
                task.prepare_data()
        task.setup(stage)
        task.configure_model()
    finally:
        task.trainer = None


def _adapted(task: LightningModule, parts: RunParts, buffers: BufferPolicy) -> Model:
    """The model of a task after the method's `adapt`, with the parameters that the method froze."""
    frozen = {id(parameter) for parameter in task.parameters() if not parameter.requires_grad}
    check_data(task, parts.algorithm, parts.data)
    parts.algorithm.adapt(task)
    check_task(task, parts.algorithm)
    model = Model(task, buffers)
    model.frozen_by_method = frozenset(name for name in model.fixed if id(model.parameters[name]) not in frozen)
    found = {name: file_of(model.parameters[name]) for name in model.fixed if name not in model.frozen_by_method}
    model.files = {name: file for name, file in found.items() if file is not None}
    return model


def _prepare_kind(
    kind: str, loop: LocalLoop, parts: RunParts, local: LocalSettings, max_rounds: int, stage: str, tested: bool
) -> None:
    """Give every process the same start of one kind, check its optimization, try it out, compile it."""
    model, algorithm, work = loop.model, parts.algorithm, local.work
    model.divide(algorithm.split(model, 0))
    _same_start_everywhere(model, loop.fabric)
    model.staying = _staying(model, algorithm, max_rounds)
    model.remember(_first_tensors(model, algorithm))
    loader = work.limited(_some_batches(parts, kind))
    loop.expect(Phase("train", loader, work.epochs, work.steps))
    model.optimizer = check_optimization(loop.objective, algorithm, loop.workers.data_parallel, local.gradients)
    probe(loop.objective, algorithm, loop.batches(loader))
    if stage == "fit" and (sizes := extremes(parts.data, parts.kinds, kind, work)) is not None:
        try_out(loop, parts.data, sizes, work, max_rounds)
        if tested:
            try_test(loop, parts.data, sizes.client_id)
        for line in filter(None, (length_line(loop), schedule_line(loop, parts.data, sizes, work))):
            loop.fabric.print(line)
    compile = local.networks.compile
    if compile == "graph":
        loop.replays = graphs.Graphs(loop)
    elif compile:
        for child in model.task.children():
            if any(True for _ in child.parameters()):
                child.compile(mode=None if compile is True else compile)


def _staying(model: Model, algorithm: Algorithm[Any], max_rounds: int) -> frozenset[str]:
    """Names of tensors that do not travel in every round: a new client begins with the first model's."""
    splits = [algorithm.split(model, round_idx) for round_idx in range(max(1, max_rounds))]
    travels = set.intersection(*(set(one.shared) for one in splits)).difference(model.fixed)
    if all(one.shared for one in splits) and model.buffer_policy != "local":
        travels.update(set(model.buffers).difference(*(one.buffers for one in splits)))
    return frozenset(model.names) - travels


def _first_tensors(model: Model, algorithm: Algorithm[Any]) -> list[str]:
    """Names of the first model's tensors that may be needed later, to save the memory of the others."""
    every = type(algorithm).initial_state is not Algorithm.initial_state
    return [name for name in model.names if every or name in model.staying]


def _some_batches(parts: RunParts, kind: str) -> Iterable[Any]:
    """Batches of the first client of a kind that has data."""
    for client_id in parts.data.census.clients:
        if parts.kinds[client_id] == kind and parts.data.census.num_samples(client_id):
            return parts.data.train_loader(client_id, torch.Generator().manual_seed(0))
    return []


def _check_levels(loops: dict[str, LocalLoop], parts: RunParts) -> None:
    """Refuse data without a lower resolution at any client, where all clients are here."""
    census, kinds = parts.data.census, parts.kinds
    if len(census.clients) < parts.data.num_clients:
        return
    for client_id in filter(census.num_samples, census.clients):
        loop = loops[kinds[client_id]]
        loader = parts.data.train_loader(client_id, torch.Generator().manual_seed(0))
        if loop.model.task.levels(next(iter(loop.batches(loader)))):  # type: ignore[operator]  # declared in `needs`
            return
    raise ConfigError(
        f"{whose(parts.algorithm, 'levels')} needs several resolutions of a batch, and no client has any but its "
        "lowest; give clients a higher one, such as by data.clients_per_level, or choose a method without levels"
    )


def _same_start_everywhere(model: Model, fabric: Fabric) -> None:
    """Overwrite every process's weights with the first one's."""
    if fabric.world_size > 1:
        for tensor in model.tensors().values():
            torch.distributed.broadcast(tensor, src=0)
