"""What `self.log` feeds during a client's work: running means that never synchronise the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fed.engine.metric_names import Direction
from lit_fed.engine.strategy import Workers
from lit_fed.errors import ConfigError


class Meter:
    """Sample-weighted means of logged values.

    Values stay on their device until `compute`; ``batch_size`` is what a value weighs unless `self.log` says otherwise.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._metrics: dict[str, Metric] = {}
        self.directions: dict[str, Direction] = {}

    def add(self, name: str, value: Any, batch_size: int | None = None) -> None:
        """Take in a number, a 0-d tensor or a torchmetrics ``Metric`` (computed once, at the end)."""
        if isinstance(value, Metric):
            self._metrics[name] = value
            if value.higher_is_better is not None:
                self.directions[name] = "max" if value.higher_is_better else "min"
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(f"self.log({name!r}, …) got {value.numel()} values; log one number, or their mean")
        count = self.batch_size if batch_size is None else batch_size
        weighted = (value.detach() if isinstance(value, Tensor) else float(value)) * count
        if name in self._sums:
            self._sums[name] = self._sums[name] + weighted
            self._counts[name] += count
        else:
            self._sums[name] = weighted
            self._counts[name] = count

    def totals(self) -> dict[str, tuple[float, int]]:
        """Sum of ``value * count`` and sum of ``count`` by name; one device synchronisation."""
        remote = [
            name for name, total in self._sums.items() if isinstance(total, Tensor) and total.device.type != "cpu"
        ]
        if remote:
            # The sums in `remote` are tensors, which the type of `_sums` cannot say.
            stacked = torch.stack([self._sums[name].reshape(()) for name in remote])  # type: ignore[union-attr]
            self._sums |= dict(zip(remote, stacked.tolist(), strict=True))
        return {name: (float(total), self._counts[name]) for name, total in self._sums.items()}

    def compute(self) -> dict[str, float]:
        """The mean of every logged value, and the value of every logged ``Metric``, which is then reset."""
        return _means(self.totals()) | self._compute_metrics(sync=False)

    def merged(self, workers: Workers, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """As `compute`, over what all processes logged; every process must call this.

        Args:
            workers: The processes.
            metrics: The task's metrics by place. One that a process did not log, because none of its batches was fit
                for it, takes part all the same, or the others would wait for it.
        """
        if workers.world_size == 1:
            return self.compute()
        merged: dict[str, tuple[float, int]] = {}
        for totals in workers.gather(self.totals()):
            for name, (total, count) in totals.items():
                before = merged.get(name, (0.0, 0))
                merged[name] = (before[0] + total, before[1] + count)
        places = {id(metric): place for place, metric in metrics.items()}
        own = {name: places[id(metric)] for name, metric in self._metrics.items() if id(metric) in places}
        found = {name: place for part in workers.gather(own) for name, place in part.items()}
        self._metrics = {**self._metrics, **{name: metrics[place] for name, place in found.items()}}
        self._metrics = dict(sorted(self._metrics.items()))  # in one order everywhere
        return _means(merged) | self._compute_metrics(sync=True)

    def _compute_metrics(self, sync: bool) -> dict[str, float]:
        values = {}
        for name, metric in self._metrics.items():
            metric.sync_on_compute = sync  # clients are spread over processes: their own metrics must not be merged
            values[name] = float(metric.compute())
            metric.reset()
        return values


def _means(totals: dict[str, tuple[float, int]]) -> dict[str, float]:
    return {name: total / max(count, 1) for name, (total, count) in totals.items()}
