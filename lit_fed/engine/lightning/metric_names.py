"""Which metric is better which way, and which one names the best round: the task's word, else what can be seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Direction = Literal["max", "min"]
_LOWER_IS_BETTER = {"error", "err", "nll", "mse", "rmse", "mae", "perplexity", "ppl", "ece", "brier", "wer", "cer"}
_OVER_CLIENTS = ("_mean", "_std", "_p10", "_min")
_STAGE = re.compile(r"^(train|val|test)[/_]")


@cache
def plain_name(name: str) -> str:
    """A logged name without a leading ``train``, ``val`` or ``test`` and its ``/`` or ``_``."""
    return _STAGE.sub("", name)


def lower_is_better(name: str) -> bool:
    """Whether a metric is loss-like, judged by the words of its name after the prefix, such as ``loss`` or ``rmse``."""
    words = name.rpartition("/")[2].lower().split("_")
    return any(word in _LOWER_IS_BETTER or word.endswith("loss") for word in words)


def base_name(name: str) -> str:
    """A metric's name as the task logs it: without the protocol before it and the statistic over clients after it."""
    prefix, _, plain = name.partition("/")
    if not plain:
        return prefix
    if prefix not in ("global", "train") and not prefix.startswith("global_"):
        for suffix in _OVER_CLIENTS:
            plain = plain.removesuffix(suffix)
    return plain


@dataclass(slots=True)
class MetricNames:
    """What is known about a run's metrics.

    Args:
        directions: ``max`` or ``min`` by the task's own name of the metric, the most important first.
        declared: Whether the task itself said what is important.
        monitor: The metric that names the best round, once it has been seen.
        promised: The metrics that the task says it logs, by its own names.
    """

    directions: dict[str, Direction] = field(default_factory=dict)
    declared: bool = False
    monitor: str | None = None
    promised: set[str] = field(default_factory=set)

    def declare(self, task: Any) -> None:
        """Take in what a task says: a mapping ``metrics`` from names to ``max`` or ``min``."""
        said = getattr(task, "metrics", None)
        if isinstance(said, Mapping) and all(value in ("max", "min") for value in said.values()):
            self.directions.update(said)
            self.declared = self.declared or bool(said)
            self.promised.update(said)

    def observe(self, directions: Mapping[str, Direction]) -> None:
        """Take in what logged torchmetrics objects say of themselves (``higher_is_better``)."""
        for name, direction in directions.items():
            self.directions.setdefault(name, direction)

    def see(self, metrics: Mapping[str, float]) -> None:
        """Choose the metric that names the best round from those that a round reports."""
        if self.monitor is None:
            self.monitor = self._choose(metrics)

    def direction(self, name: str) -> Direction:
        """Whether larger or smaller values of a metric are better."""
        said = self.directions.get(base_name(name))
        return said if said is not None else "min" if lower_is_better(name) else "max"

    def is_declared(self, name: str) -> bool:
        """Whether the task itself said that a metric is important."""
        return self.declared and base_name(name) in self.directions

    def _choose(self, metrics: Mapping[str, float]) -> str | None:
        on_server = [name for name in metrics if name.startswith("global/")]
        on_clients = [name for name in metrics if name.startswith("clients/") and name.endswith("_mean")]
        of_kinds = [name for name in metrics if name.startswith("global_")]  # one kind's model does not speak for all
        candidates = on_server + on_clients + of_kinds
        if self.declared:
            order = list(self.directions)
            for group in (on_server, on_clients, of_kinds):
                known = [name for name in group if base_name(name) in order]
                if known:
                    return min(known, key=lambda name: order.index(base_name(name)))
        return candidates[0] if candidates else None
