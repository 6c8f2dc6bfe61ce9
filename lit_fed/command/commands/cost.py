"""``lit-fed cost``: bytes that a run will send, or a paper's table of communication costs.

Nothing is trained. The run's parts are built, on torch's meta device if they allow it; an untrained client of every
kind makes its update, and the trainer's own channel counts its bytes.
"""

from __future__ import annotations

import inspect
import itertools
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning import Fabric, LightningModule
from torch import nn

from lit_fed.checks import check_range
from lit_fed.command.command import Call
from lit_fed.command.reading.parts import ReadParts, add_parts, build_parts, check_parts_given, instantiate
from lit_fed.engine.clients.executor import untrained_answer
from lit_fed.engine.lightning.compatibility import check_data, check_task
from lit_fed.engine.lightning.optimization import OptimizerFactory, state_of
from lit_fed.engine.lightning.task_trainer import TaskTrainer
from lit_fed.engine.loop.assemble import absent_of
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, Pass
from lit_fed.engine.method.kinds import ONLY
from lit_fed.engine.method.model import Model, Split
from lit_fed.engine.method.population import Population
from lit_fed.engine.wire.channel import Channel
from lit_fed.engine.wire.payload import Broadcast, Payload, num_bytes
from lit_fed.participation import Fate
from lit_fed.private_names import tree_leaves
from lit_fed.trainer import FederatedTrainer, Tasks

_MOST_ROUNDS = 10**6


class CostTable(ABC):
    """A paper's table of communication costs, from settings alone; see `lit_fed.studies.papers` for two."""

    @abstractmethod
    def text(self) -> str:
        """Format the table as lines of text."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one round, of the clients with one kind of network.

    Args:
        downloads: Number of clients that download.
        uploads: Number of updates that arrive.
        down: Bytes of one download.
        up: Bytes of one update.
        late: Bytes that arrive late, from the previous round.
    """

    downloads: int
    uploads: int
    down: int
    up: int
    late: int = 0

    @property
    def downlink(self) -> int:
        """Bytes down, over all clients: ``comm/downlink_bytes``."""
        return self.downloads * self.down

    @property
    def uplink(self) -> int:
        """Bytes up, over all clients: ``comm/uplink_bytes``."""
        return self.uploads * self.up + self.late


@dataclass(frozen=True)
class RunCost:
    """Traffic of a run.

    Args:
        rounds: Traffic by round, and by kind of network.
        fedavg: Bytes of FedAvg with the same networks, cohorts and codecs.
        frozen: Bytes of parameters that freeze after training, which a client needs once; not counted in ``rounds``.
        parameters: Number of a model's parameters, by kind.
        memory: Bytes of all parameters, and of those that train, by kind; only where the task froze some.
        server: Bytes of the server's first state, of a method that addresses clients one by one.
        disk: Bytes that a client keeps of its optimizers and of its uplink's codec, and the server of the client's
            uplink (EF21), after the client's first round, by kind.
    """

    rounds: list[dict[str, Traffic]]
    fedavg: int
    frozen: int
    parameters: dict[str, int]
    memory: dict[str, tuple[int, int]]
    server: int = 0
    disk: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes up and down."""
        return sum(traffic.downlink + traffic.uplink for kinds in self.rounds for traffic in kinds.values())

    @property
    def ratio(self) -> float:
        """Total relative to FedAvg."""
        return self.total / self.fedavg if self.fedavg else float("nan")


class _Counts:
    """A census without the files: every client has one sample."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def num_samples(self, client_id: int) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data.census, name)


class _Unloaded:
    """Population without its files: every client has one sample and no batches."""

    def __init__(self, data: Any) -> None:
        self._data, self.census = data, _Counts(data)

    def train_loader(self, *_: Any, **__: Any) -> list[Any]:
        return []

    calibration_loader = public_loader = train_loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def foresee(trainer: FederatedTrainer, tasks: Tasks, data: Any, algorithm: Algorithm[Any]) -> RunCost:
    """Forecast the traffic of a run from its parts.

    No client trains: the result of a phase or a pass is taken from its example, and broadcasts are
    `lit_fed.engine.method.algorithm.Algorithm.forecast`.

    Args:
        trainer: Trainer; its rounds, participation, kinds, codecs and buffer policy count.
        tasks: The task, by kind if there are several.
        data: Population; its files are read only if the participation, or the number of clients, depends on them.
        algorithm: Method.
    """
    participation, channel = trainer.participation, trainer.channel
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    speeds = participation.speeds
    timed = speeds is not None and bool(speeds.seconds_per_sample or speeds.trace)
    if participation.stragglers is None and (participation.one_model or not timed) and not data.counts_by_reading:
        data = _Unloaded(data)  # the cohort does not depend on clients' sizes, or the bytes do not depend on the cohort
    else:
        data.prepare_data()
        data.setup("fit")
        data.leave_out(absent_of(data, participation))
    kinds = trainer.kinds_of(tasks)
    kinds.check(data)
    participation.setup(data.num_clients, data.census.num_samples, trainer.settings.seed)
    participation.lose(absent_of(data, participation))
    every = tasks if isinstance(tasks, Mapping) else {ONLY: tasks}
    held = {kind: [one for one in every[kind].parameters() if not one.requires_grad] for kind in kinds.names}
    models = {kind: _model(every[kind], algorithm, data, trainer) for kind in kinds.names}
    server = algorithm.setup(models, Population(data, participation, kinds, trainer.settings.seed))
    whole = {kind: _fedavg(model, channel, held[kind]) for kind, model in models.items()}
    check_range("trainer.max_rounds", trainer.settings.max_rounds, most=_MOST_ROUNDS, why=", as each is looked at")
    rounds: list[dict[str, Traffic]] = []
    disk: dict[str, tuple[int, int, int]] = {}
    fedavg, frozen = 0, dict.fromkeys(models, 0)
    for round_idx in range(trainer.settings.max_rounds):
        plan = participation.plan(round_idx)
        late = [kinds[client_id] for client_id in participation.late(round_idx)]
        found = {}
        for kind, model in models.items():
            before = set(model.split.frozen)
            model.divide(algorithm.split(model, round_idx))
            if round_idx:  # clients have parameters that never trained from the start
                frozen[kind] += num_bytes(model.tensors(set(model.split.frozen) - before))
            mine = [one for one in plan if kinds[one.client_id] == kind]
            forecast = algorithm.forecast(server, round_idx, kind)
            sent = channel.downlink.cross(forecast, channel.down(round_idx, kind))
            example = next((one.client_id for one in mine), next(i for i in itertools.count() if kinds[i] == kind))
            client = Client(example, round_idx, "train", trainer.settings.seed, model, data, trainer.local.work)
            addressed = algorithm.address(server, example, round_idx, kind)
            addressed = {name: tensor for name, tensor in addressed.items() if name not in forecast}
            own = channel.downlink.cross(addressed, channel.down(round_idx, kind))
            client.received, client.addressed = {**sent.payload, **own.payload}, own.payload
            context = channel.up(example, Broadcast(round_idx, {kind: client.received}), kind, buffers=model.buffers)
            up = channel.uplink.cross(untrained_answer(client, algorithm), context).num_bytes
            if kind not in disk:
                optimizers = _kept_optimizers(client, algorithm, trainer)
                disk[kind] = (num_bytes(optimizers), num_bytes(context.memory), num_bytes(context.decoder))
            arrived = sum(one.fate not in (Fate.LOST_BEFORE, Fate.LOST_AFTER, Fate.LATE) for one in mine)
            older = late.count(kind) * rounds[-1][kind].up if rounds else 0
            found[kind] = Traffic(len(mine), arrived, sent.num_bytes + own.num_bytes, up, older)
            its_down, its_up = whole[kind]
            fedavg += len(mine) * its_down + (arrived + late.count(kind)) * its_up
        rounds.append(found)
    sizes = {kind: sum(tensor.numel() for tensor in model.parameters.values()) for kind, model in models.items()}
    memory = {
        kind: (num_bytes(model.parameters), num_bytes(model.parameters) - sum(tensor.nbytes for tensor in held[kind]))
        for kind, model in models.items()
        if held[kind]
    }
    entries = tree_leaves(server) if algorithm.addresses else []
    server_bytes = sum(leaf.nbytes for leaf in entries if isinstance(leaf, torch.Tensor))
    return RunCost(rounds, fedavg, max(frozen.values()), sizes, memory, server_bytes, disk)


def _model(task: LightningModule, algorithm: Algorithm[Any], data: Any, trainer: FederatedTrainer) -> Model:
    """A task as the engine holds it, adapted and checked by the method."""
    task.configure_model()
    algorithm.adapt(task)
    check_task(task, algorithm)
    check_data(task, algorithm, data)
    model = Model(task, trainer.local.buffers)
    model.divide(algorithm.split(model, 0))
    model.remember()
    return model


def _kept_optimizers(client: Client, algorithm: Algorithm[Any], trainer: FederatedTrainer) -> Payload:
    """State of the optimizers that a client keeps after its first round, with steps on gradients of zeros."""
    found: Payload = {}
    model, gradients = client.model, trainer.local.gradients
    if gradients.client_optimizer == "fresh":
        return found
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    clock = TaskTrainer(Fabric(accelerator="cpu", devices=1), trainer.settings.max_rounds, client.population, gradients)
    before = model.copy()  # weight decay moves weights without a gradient, too
    model.task.trainer = clock  # type: ignore[assignment]  # a Trainer in what it offers
    try:
        for phase in algorithm.phases(client):
            if isinstance(phase, Pass) or not phase.moves:
                continue
            model.set_trainable(phase.trains)
            for parameter in model.parameters.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            optimizers = OptimizerFactory(model.task, clock).make()[0]
            for optimizer in optimizers:
                with torch.device("cpu"):  # numbers of steps, which optimizers read
                    optimizer.step(lambda: 0.0)
            found = {**found, **state_of(optimizers, names, phase.name)}
    finally:
        model.task.trainer = None
        model.leave()
        model.load(before)
    return found


def _fedavg(model: Model, channel: Channel, held: Collection[nn.Parameter]) -> tuple[int, int]:
    """Bytes of FedAvg's download and upload: all parameters, and buffers by their policy.

    Parameters that the task itself froze do not travel. Parameters that the method froze count: FedAvg would send them.
    """
    frozen_ids = set(map(id, held))
    still = [name for name in model.fixed if id(model.parameters[name]) not in frozen_ids]
    before = model.split
    model.divide(Split(tuple(model.parameters)))
    sent, answer = (model.tensors([*model.shared_names(way), *still]) for way in ("down", "up"))
    arrived = channel.downlink.cross(sent, channel.down(0, ONLY))
    context = channel.up(0, Broadcast(0, {ONLY: arrived.payload}), ONLY, buffers=model.buffers)
    up = channel.uplink.cross(answer, context).num_bytes
    model.divide(before)
    return arrived.num_bytes, up


# ---------------------------------------------------------------------- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and ``cost`` instead of a run."""
    parser.add_argument("-c", "--config", action="config", help="configuration of a run, or of a table")
    add_parts(parser)
    parser.add_subclass_arguments(CostTable, "cost", required=False, help="a paper's table, instead of a run")


def run(call: Call) -> int:
    """Print a table, or the bytes that a run will send."""
    settings, parser = call.settings, call.parser
    if settings.cost is not None:
        print(instantiate(parser, Namespace(cost=settings.cost)).cost.text())
        return 0
    check_parts_given(settings)
    _leave_weights(settings)
    try:
        with torch.device("meta"):
            cost = _of_run(*build_parts(parser, settings))
    except Exception:  # a part reads values, which the meta device does not have; any other fault comes again
        cost = _of_run(*build_parts(parser, settings))
    print(report(cost))
    return 0


def _leave_weights(settings: Namespace) -> None:
    """Leave out pretrained weights: they may be elsewhere, or downloaded, and do not change the bytes."""
    bases = inspect.getmro(pkgutil.resolve_name(settings.model.class_path))
    given = next(filter(None, (inspect.signature(base).parameters.get("weights") for base in bases)), None)
    optional = given is not None and given.default is None
    for own in (settings.model.get("init_args"), *(settings.trainer.kinds or {}).values()):
        if not isinstance(own, Namespace | dict):
            continue
        if own.get("weights") and optional:
            own["weights"] = None
        network_args = own.get("network_args")
        if isinstance(network_args, dict) and network_args.get("pretrained"):
            network_args["pretrained"] = False


def _of_run(parts: ReadParts, settings: Namespace) -> RunCost:
    return foresee(FederatedTrainer(**settings.trainer), *parts)


def report(cost: RunCost) -> str:
    """Format a run's cost: consecutive rounds of the same cost are one line, or one per kind of network."""
    several = len(cost.parameters) > 1
    lines = [f"parameters {count:,}" + (f" of {kind}" if several else "") for kind, count in cost.parameters.items()]
    for kind, (whole, trained) in cost.memory.items():
        held = f"memory of a client{f' of {kind}' if several else ''}: {whole:,} bytes of parameters"
        lines.append(f"{held}, {trained:,} of gradients, {2 * trained:,} of Adam's moments")
    for kind, (optimizers, codec, decoder) in cost.disk.items():
        if optimizers or codec:
            held = f"disk of a client{f' of {kind}' if several else ''}: {optimizers:,} bytes of its optimizers' state"
            there = f"; {decoder:,} at the server for each client" * bool(decoder)
            lines.append(f"{held}, {codec:,} of its codec's memory{there}")
    if cost.server:
        lines.append(f"memory of the server: {cost.server:,} bytes, on every process and in every checkpoint")
    titles = ("down a client", "up a client", "down a round", "up a round")
    width = max(map(len, cost.parameters)) + 1 if several else 0
    heads = " ".join(f"{title:>15}" for title in titles)
    lines.append(f"{'rounds':12} {'kind' if several else '':{width}}{'clients':>7} {heads}")
    first = 0
    for kinds, group in itertools.groupby(cost.rounds):
        last = first + len(list(group)) - 1
        span = str(first) if first == last else f"{first}–{last}"
        for kind, traffic in kinds.items():
            numbers = " ".join(
                f"{number:15,}" for number in (traffic.down, traffic.up, traffic.downlink, traffic.uplink)
            )
            lines.append(f"{span:12} {kind if several else '':{width}}{traffic.downloads:7} {numbers}")
        first = last + 1
    lines.append(f"bytes in all {cost.total:,}; FedAvg {cost.fedavg:,}; cost ratio {cost.ratio:.4f}")
    if cost.frozen:
        lines.append(
            f"not counted: {cost.frozen:,} bytes of parameters that freeze after training, for each later client"
        )
    return "\n".join(lines)
