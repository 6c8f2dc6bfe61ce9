"""What a run will send: ``python cli.py cost --config …``.

Nothing is trained. A run's parts are built, on torch's meta device where they allow it, and a client that has not
trained makes its update; the trainer's own channel counts its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lit_fed.client import ClientContext, ClientModule
from lit_fed.errors import ConfigError
from lit_fed.networks.attention import separate_attention
from lit_fed.networks.blueprints import build_blueprint
from lit_fed.participation import Fate
from lit_fed.payload import Channel, num_bytes


@dataclass(frozen=True)
class Groups:
    """Parameters of a network by group.

    Args:
        kernel: Of queries and keys, biases included.
        values: Of values.
        unique: All of them, each once.
        counted: All of them, shared ones as often as modules hold them: the denominator of FedFrozen's percentages.
    """

    kernel: int
    values: int
    unique: int
    counted: int

    @property
    def percentages(self) -> tuple[float, float]:
        """Queries and keys, and those and values, per hundred parameters."""
        return 100 * self.kernel / self.counted, 100 * (self.kernel + self.values) / self.counted


def count(network: nn.Module) -> Groups:
    """Count a network's parameters by group; its fused projections are split on the way."""
    try:
        names = separate_attention(network)
    except ConfigError:  # no attention, or none that can be told apart: then nothing of it is counted apart
        names = None
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    kernel, values = ([], []) if names is None else (names.kernel, names.value)
    counted = sum(parameter.numel() for _, parameter in network.named_parameters(remove_duplicate=False))
    return Groups(sum(map(sizes.get, kernel)), sum(map(sizes.get, values)), sum(sizes.values()), counted)  # type: ignore[arg-type]


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
        groups: The network's parameters.
    """

    rounds: list[RoundCost]
    fedavg: int
    frozen: int
    groups: Groups

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
    return RunCost(rounds, fedavg, frozen, count(module))


def _fedavg(channel: Channel, whole: Any, buffers: Any, policy: str, cost: RoundCost, late: int) -> int:
    """Bytes that FedAvg would send in a round: all parameters, both ways, and buffers as their policy says."""
    down = channel.down(whole | (buffers if policy in ("average", "server") else {}))[1]
    up = channel.up(whole | (buffers if policy == "average" else {}))[1]
    return cost.downloads * down + (cost.uploads + late) * up


# ---------------------------------------------------------------------- the command


def run(args: Sequence[str]) -> None:
    """``cost --config …``: of a run's configuration, or of the architectures or exchanges a file names under ``cost``.

    Raises:
        ConfigError: For a file that is neither.
    """
    files = [args[i + 1] for i, word in enumerate(args[:-1]) if word in ("-c", "--config")]
    if len(files) == 1 and len(args) == 2:
        table = _read(Path(files[0]))
        if isinstance(table, dict) and isinstance(wanted := table.get("cost"), dict):
            print(exchanges(wanted["exchanges"]) if "exchanges" in wanted else architectures(**wanted))
            return
    print(report(_parts(args)))


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None


def architectures(models: dict[str, str], rounds: int = 10, warmup_rounds: int = 2) -> str:
    """Table 2 of FedFrozen: what freezing saves, from the architectures' parameter counts alone.

    Args:
        models: Blueprint by the name to print.
        rounds: Rounds of a run.
        warmup_rounds: Rounds in which everything travels.

    Note:
        Percentages are of the parameters that modules hold, where T5's and BART's token embedding counts three
        times; the ratio is of what is sent, where it counts once. So the paper's numbers come out.
    """
    if not 0 <= warmup_rounds <= rounds or not rounds:
        raise ConfigError(f"cost.warmup_rounds is {warmup_rounds}; it must be from 0 to cost.rounds, {rounds}")
    lines = [f"{'model':14} {'QK':>12} {'all':>12} {'QK %':>6} {'QKV %':>6} {'unique':>12} {'cost ratio':>10}"]
    for title, name in models.items():
        groups = count(build_blueprint(name))
        kernel, attention = groups.percentages
        ratio = 1 - (rounds - warmup_rounds) / rounds * groups.kernel / groups.unique
        lines.append(
            f"{title:14} {groups.kernel:12,} {groups.counted:12,} {kernel:6.2f} {attention:6.2f} {groups.unique:12,}"
            f" {ratio:10.4f}"
        )
    return "\n".join([*lines, f"queries and keys frozen in {rounds - warmup_rounds} of {rounds} rounds"])


def exchanges(runs: dict[str, dict[str, int]]) -> str:
    """What a client sends in whole runs, in one direction, from their settings alone.

    Args:
        runs: By the name to print either ``rounds``, ``parameters`` and ``models`` (how many models' worth of them are
            sent a round), or ``rounds``, ``public`` samples and ``classes``; every number takes 4 bytes.

    Raises:
        ConfigError: For other settings.
    """
    width = max(map(len, runs))
    lines = []
    for title, settings in runs.items():
        if settings.keys() == {"rounds", "parameters", "models"}:
            numbers = settings["parameters"] * settings["models"]
        elif settings.keys() == {"rounds", "public", "classes"}:
            numbers = settings["public"] * settings["classes"]
        else:
            raise ConfigError(
                f"cost.exchanges {title!r} needs rounds, parameters and models, or rounds, public and classes; it has "
                f"{', '.join(settings)}"
            )
        lines.append(f"{title:{width}} {4 * numbers * settings['rounds'] / 1e6:8.2f} MB")
    return "\n".join(lines)


def _parts(args: Sequence[str]) -> RunCost:
    from lit_fed.cli import FederatedCLI

    class Parts(FederatedCLI):
        """A run's parts, built and not run; pretrained weights would cost a download and change no byte."""

        def instantiate_classes(self) -> None:
            assert self.subcommand is not None
            network_args = self.config[self.subcommand].model.init_args.get("network_args")
            if isinstance(network_args, dict) and network_args.get("pretrained"):
                network_args["pretrained"] = False
            super().instantiate_classes()

        def _run_subcommand(self, subcommand: str) -> None:
            self.cost = foresee(self.trainer, self.model, self.datamodule, self.config_init[subcommand].algorithm)

    try:
        with torch.device("meta"):
            return Parts(["fit", *args]).cost
    except (NotImplementedError, RuntimeError):  # something asks for a number, which the meta device does not have
        return Parts(["fit", *args]).cost


def report(cost: RunCost) -> str:
    """A run's cost as lines of text; rounds that cost the same are one line."""
    groups = cost.groups
    kernel, attention = groups.percentages
    lines = [
        f"parameters         {groups.unique:15,}",
        f"  queries, keys    {groups.kernel:15,}  {kernel:5.2f} %",
        f"  and values       {groups.kernel + groups.values:15,}  {attention:5.2f} %",
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
