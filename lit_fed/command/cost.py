"""``python cli.py cost``: what a run will send, or a paper's table of what runs send.

Nothing is trained. A run's parts are built, on torch's meta device where they allow it, and a client that has not
trained makes its update; the trainer's own channel counts its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_fed.engine.client import ClientContext, ClientModule
from lit_fed.command.cli import Parts, add_parts, build_parts
from lit_fed.command.explain import missing
from lit_fed.command.roots import PARTS
from lit_fed.command.table import Call
from lit_fed.errors import ConfigError
from lit_fed.participation import Fate
from lit_fed.payload import Channel, num_bytes
from lit_fed.trainer import FederatedTrainer


class CostTable(ABC):
    """A paper's table of what runs send, from their settings alone; see `lit_fed.studies.tables` for two."""

    @abstractmethod
    def text(self) -> str:
        """The table as lines of text."""


@dataclass(frozen=True)
class RoundCost:
    """One round's traffic.

    Args:
        round_idx: The round, counted from 0.
        downloads: Clients that download.
        uploads: Updates that arrive.
        down: Bytes of one download.
        up: Bytes of one update.
        late: Bytes that arrive from the round before.
    """

    round_idx: int
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
    """A run's traffic.

    Args:
        rounds: By round.
        fedavg: Bytes of FedAvg with the same network, cohorts and codecs.
        frozen: Bytes that a client needs once when parameters freeze after they trained, and that are not counted.
        parameters: The model's parameters.
    """

    rounds: list[RoundCost]
    fedavg: int
    frozen: int
    parameters: int

    @property
    def total(self) -> int:
        """Bytes up and down."""
        return sum(one.downlink + one.uplink for one in self.rounds)

    @property
    def ratio(self) -> float:
        """To FedAvg."""
        return self.total / self.fedavg if self.fedavg else float("nan")


class _Unloaded:
    """A population whose files are not read: every client has one sample."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def num_samples(self, client_id: int) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def foresee(trainer: Any, module: ClientModule, data: Any, algorithm: Any) -> RunCost:
    """The traffic of a run, from its parts as they were built.

    A module whose updates need training or data to exist gives their names and shapes in
    `ClientModule.example_payload`.

    Args:
        trainer: Its rounds, participation, codecs and buffer policy count.
        module: The clients' half.
        data: The population; its files are read only where the participation depends on them.
        algorithm: The server's half.
    """
    participation, channel = trainer.participation, trainer.channel
    if getattr(participation, "stragglers", None) is None:
        data = _Unloaded(data)  # who takes part does not depend on the clients' sizes, or does not change the bytes
    else:
        data.prepare_data()
        data.setup("fit")
    participation.setup(data.num_clients, data.num_samples, trainer.seed)
    module.buffer_policy = trainer.buffers
    module.work.ctx = ClientContext(0, 0, "train", trainer.seed, data)
    module.prepare_round(0)
    algorithm.setup(module, data, trainer.fabric)
    whole = {name: module.tensor(name) for name in module.layout.parameters}
    averages = module.tensors(module.layout.buffers)
    rounds: list[RoundCost] = []
    fedavg = frozen = previous = 0
    for round_idx in range(trainer.max_rounds):
        before = set(module.layout.split.frozen)
        module.prepare_round(round_idx)
        if round_idx:  # what never trained is every client's from the start
            newly = set(module.layout.split.frozen) - before
            frozen += num_bytes(module.tensors(newly))
        broadcast, down = channel.down(algorithm.example_broadcast(round_idx))
        plan = participation.plan(round_idx)
        client_id = plan[0].client_id if plan else 0
        ctx = ClientContext(client_id, round_idx, "train", trainer.seed, data)
        module.enter(ctx, None, broadcast)
        up = channel.up(module.example_payload(ctx))[1]
        late = len(participation.late(round_idx)) * previous
        arrived = sum(one.fate not in (Fate.LOST_BEFORE, Fate.LOST_AFTER, Fate.LATE) for one in plan)
        rounds.append(RoundCost(round_idx, len(plan), arrived, down, up, late))
        previous = up
        fedavg += _fedavg(channel, whole, averages, trainer.buffers, rounds[-1], len(participation.late(round_idx)))
    return RunCost(rounds, fedavg, frozen, sum(parameter.numel() for parameter in module.parameters()))


def _fedavg(channel: Channel, whole: Any, buffers: Any, policy: str, cost: RoundCost, late: int) -> int:
    """Bytes that FedAvg would send in a round: all parameters, both ways, and buffers as their policy says."""
    down = channel.down(whole | (buffers if policy in ("average", "server") else {}))[1]
    up = channel.up(whole | (buffers if policy == "average" else {}))[1]
    return cost.downloads * down + (cost.uploads + late) * up


# ---------------------------------------------------------------------- the command


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options: those of a run, and ``cost`` in their place."""
    parser.add_argument("-c", "--config", action="config", help="configuration of a run, or of a table")
    add_parts(parser, required=False)
    parser.add_subclass_arguments(CostTable, "cost", required=False, help="a paper's table, in place of a run")


def run(call: Call) -> int:
    """Print a table, or what a run will send.

    Args:
        call: Its settings.

    Raises:
        ConfigError: If parts of the run are missing.
    """
    settings, parser = call.settings, call.parser
    if settings.cost is not None:
        print(parser.instantiate(Namespace(cost=settings.cost)).cost.text())
        return 0
    if absent := [name for name in PARTS if settings[name] is None]:
        raise ConfigError(missing(absent))
    network_args = settings.model.get("init_args", Namespace()).get("network_args")
    if isinstance(network_args, dict) and network_args.get("pretrained"):
        network_args["pretrained"] = False  # weights would cost a download and change no byte
    try:
        with torch.device("meta"):
            cost = _of_run(*build_parts(parser, settings))
    except (NotImplementedError, RuntimeError):  # something asks for a number, which the meta device does not have
        cost = _of_run(*build_parts(parser, settings))
    print(report(cost))
    return 0


def _of_run(parts: Parts, settings: Namespace) -> RunCost:
    return foresee(FederatedTrainer(**settings.trainer), *parts)


def report(cost: RunCost) -> str:
    """A run's cost as lines of text; rounds that cost the same are one line."""
    lines = [
        f"parameters {cost.parameters:,}",
        f"{'rounds':12} {'clients':>7} "
        + " ".join(f"{title:>15}" for title in ("down a client", "up a client", "down a round", "up a round")),
    ]
    first = 0
    for last, one in enumerate(cost.rounds):
        after = cost.rounds[last + 1] if last + 1 < len(cost.rounds) else None
        if after is not None and _same(one, after):
            continue
        span = str(first) if first == last else f"{first}–{last}"
        numbers = (one.down, one.up, one.downlink, one.uplink)
        lines.append(f"{span:12} {one.downloads:7} " + " ".join(f"{number:15,}" for number in numbers))
        first = last + 1
    lines.append(f"bytes in all {cost.total:,}; FedAvg {cost.fedavg:,}; cost ratio {cost.ratio:.4f}")
    if cost.frozen:
        lines.append(
            f"not counted: what freezes after training, {cost.frozen:,} bytes, which a client of later rounds needs"
        )
    return "\n".join(lines)


def _same(one: RoundCost, other: RoundCost) -> bool:
    keys = ("downloads", "down", "up", "downlink", "uplink")
    return all(getattr(one, key) == getattr(other, key) for key in keys)
