"""Table 2 of FedFrozen: the savings of freezing queries and keys, from parameter counts of architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from lit_fed.command.commands.cost import CostTable
from lit_fed.errors import ConfigError
from lit_fed.methods.attention_freezing.projections import separate_attention
from lit_fed.studies.papers.fedfrozen.blueprints import build_blueprint


@dataclass(frozen=True)
class Groups:
    """Numbers of a network's parameters by group.

    Args:
        kernel: Parameters of queries and keys, biases included.
        values: Parameters of values.
        unique: All parameters, shared ones once.
        counted: All parameters, shared ones once per module: the denominator of FedFrozen's percentages.
    """

    kernel: int
    values: int
    unique: int
    counted: int

    @property
    def percentages(self) -> tuple[float, float]:
        """Percentages of queries and keys, and of queries, keys and values."""
        return 100 * self.kernel / self.counted, 100 * (self.kernel + self.values) / self.counted


def count(network: nn.Module) -> Groups:
    """Count a network's parameters by group; fused projections are split in place."""
    try:
        names = separate_attention(network)
    except ConfigError:  # without separable attention, the groups are empty
        names = None
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    kernel, values = ([], []) if names is None else (names.kernel, names.value)
    counted = sum(parameter.numel() for _, parameter in network.named_parameters(remove_duplicate=False))
    return Groups(sum(map(sizes.get, kernel)), sum(map(sizes.get, values)), sum(sizes.values()), counted)  # type: ignore[arg-type]


class AttentionShares(CostTable):
    """The traffic of a run that freezes queries and keys, relative to a run that does not, by architecture.

    Args:
        models: Blueprints by printed name.
        rounds: Rounds of a run.
        warmup_rounds: Rounds that send all parameters.

    Note:
        The percentages refer to the modules' parameters, where the token embedding of T5 and BART counts three times;
        the ratio refers to the traffic, where it counts once. With this reading the paper's numbers come out.
    """

    def __init__(self, models: Mapping[str, str], rounds: int = 10, warmup_rounds: int = 2) -> None:
        if not 0 <= warmup_rounds <= rounds or not rounds:
            raise ConfigError(f"cost.warmup_rounds is {warmup_rounds}; it must be from 0 to cost.rounds, {rounds}")
        self.rounds, self.frozen_rounds = rounds, rounds - warmup_rounds
        self.groups = {title: count(build_blueprint(name)) for title, name in models.items()}

    @override
    def text(self) -> str:
        lines = [f"{'model':14} {'QK':>12} {'all':>12} {'QK %':>6} {'QKV %':>6} {'unique':>12} {'cost ratio':>10}"]
        for title, groups in self.groups.items():
            kernel, attention = groups.percentages
            ratio = 1 - self.frozen_rounds / self.rounds * groups.kernel / groups.unique
            sizes = f"{groups.kernel:12,} {groups.counted:12,} {kernel:6.2f} {attention:6.2f} {groups.unique:12,}"
            lines.append(f"{title:14} {sizes} {ratio:10.4f}")
        return "\n".join([*lines, f"queries and keys frozen in {self.frozen_rounds} of {self.rounds} rounds"])
