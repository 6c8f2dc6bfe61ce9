"""Direction of metrics, and the metric that chooses the best round: as the task declares, else by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Direction = Literal["max", "min"]
_LOWER_IS_BETTER = {"error", "err", "nll", "mse", "rmse", "mae", "perplexity", "ppl", "ece", "brier", "wer", "cer"}
OVER_CLIENTS = ("_mean", "_weighted", "_std", "_p10", "_min", "_worst", "_worst10", "_missing")
"""Ends of the names of `lit_fed.protocols.spread`'s statistics."""
ON_VALIDATION = "val/"
"""Prefix of a protocol's metric on validation data in a run that reports test metrics: ``val/global/acc``."""
_STAGE = re.compile(r"^(train|val|test)[/_]")


@cache
def plain_name(name: str) -> str:
    """A logged name without a leading ``train``, ``val`` or ``test`` and its ``/`` or ``_``."""
    return _STAGE.sub("", name)


def lower_is_better(name: str) -> bool:
    """Whether a metric is loss-like, by the words of its name after the prefix, such as ``loss`` or ``rmse``."""
    words = name.rpartition("/")[2].lower().split("_")
    return any(word in _LOWER_IS_BETTER or word.endswith("loss") for word in words)


def base_name(name: str) -> str:
    """A metric's name as the task logs it: without the protocol's prefix and the suffix of a statistic over clients."""
    prefix, _, plain = name.removeprefix(ON_VALIDATION).partition("/")
    if not plain:
        return prefix
    if prefix not in ("global", "train") and not prefix.startswith("global_"):
        for suffix in OVER_CLIENTS:
            plain = plain.removesuffix(suffix)
    return plain


@dataclass(slots=True)
class MetricNames:
    """A run's metrics.

    Args:
        directions: ``max`` or ``min`` by the task's own name of the metric, the most important first.
        declared: Whether the task declared its metrics.
        monitor: The most important metric, once an evaluation has reported one.
        promised: Metrics that the task declares, by its own names.
        choice: The metric that chooses the best round by default, once known: the monitor or, on validation data, a
            metric such as ``val/global/acc``.
    """

    directions: dict[str, Direction] = field(default_factory=dict)
    chosen: dict[str, Direction] = field(default_factory=dict)
    declared: bool = False
    monitor: str | None = None
    promised: set[str] = field(default_factory=set)
    choice: str | None = None

    def declare(self, task: Any) -> None:
        """Add a task's declaration: a mapping ``metrics`` from names to ``max`` or ``min``."""
        said = getattr(task, "metrics", None)
        if isinstance(said, Mapping) and all(value in ("max", "min") for value in said.values()):
            self.directions.update(said)
            self.declared = self.declared or bool(said)
            self.promised.update(said)

    def observe(self, directions: Mapping[str, Direction]) -> None:
        """Add the directions of logged torchmetrics objects (``higher_is_better``)."""
        for name, direction in directions.items():
            self.directions.setdefault(name, direction)

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the most important of a round's metrics as the monitor."""
        if self.monitor is None:
            self.monitor = self.best_of(metrics)

    def choose(self, name: str | None, mode: Direction | Literal["auto"]) -> None:
        """Take a metric's direction as the user set it beside a monitor."""
        if name not in (None, "auto") and mode != "auto":
            self.chosen[base_name(name)] = mode

    def direction(self, name: str) -> Direction:
        """Whether larger (``max``) or smaller (``min``) values of a metric are better."""
        said = (self.directions | self.chosen).get(base_name(name))
        return said if said is not None else "min" if lower_is_better(name) else "max"

    def is_declared(self, name: str) -> bool:
        """Whether the task declared a metric."""
        return self.declared and base_name(name) in self.directions

    def best_of(self, metrics: Mapping[str, float]) -> str | None:
        """The most important of a round's metrics; None without one of the global model or of clients."""
        on_server = [name for name in metrics if name.startswith("global/")]
        on_clients = [name for name in metrics if name.startswith("clients/") and name.endswith("_mean")]
        of_kinds = [name for name in metrics if name.startswith("global_")]  # models of single kinds
        candidates = on_server + on_clients + of_kinds
        if self.declared:
            order = list(self.directions)
            for group in (on_server, on_clients, of_kinds):
                known = [name for name in group if base_name(name) in order]
                if known:
                    return min(known, key=lambda name: order.index(base_name(name)))
        return candidates[0] if candidates else None
