"""Logged values of clients' work: running means, of one client or of a group, without device synchronization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from lit_fed.engine.lightning.metric_names import Direction
from lit_fed.engine.lightning.undefined import is_undefined, value_of
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ConfigError
from lit_fed.private_names import computed_value, merge_states, share
from lit_fed.tensors import map_tensors


class WeightedSums:
    """Sums of ``weight * value`` and of weights by name; values are numbers or tensors of one shape a name."""

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {}
        self.weights: dict[str, int] = {}

    def add(self, name: str, value: Tensor | float, weight: int) -> None:
        """Add a value; no device synchronization."""
        weighted = value * weight
        if name in self.totals:
            self.totals[name] = self.totals[name] + weighted
            self.weights[name] += weight
        else:
            self.totals[name], self.weights[name] = weighted, weight

    def numbers(self) -> dict[str, tuple[float, int]]:
        """Sum of ``weight * value``, of single values, and sum of weights by name; one device synchronization."""
        remote = [n for n, total in self.totals.items() if isinstance(total, Tensor) and total.device.type != "cpu"]
        if remote:
            stacked = torch.stack([self.totals[name].reshape(()) for name in remote])
            self.totals |= dict(zip(remote, stacked.tolist(), strict=True))
        return {name: (float(total), self.weights[name]) for name, total in self.totals.items()}


def means(numbers: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Means by name from `WeightedSums.numbers`."""
    return {name: total / max(weight, 1) for name, (total, weight) in numbers.items()}


class StackedSums:
    """`WeightedSums` of every client of a group.

    Args:
        num_clients: Clients in the group.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.totals: dict[str, Tensor] = {}
        self.weights: dict[str, NDArray[np.int64]] = {}

    def add(
        self, name: str, values: Tensor, weights: Tensor | int, sizes: Sequence[int] | int, rows: slice | Tensor
    ) -> None:
        """Add a value of each of some clients.

        Args:
            name: The value's.
            values: (k, …).
            weights: Of each, in a shape that broadcasts over `values`.
            sizes: The same weights as numbers.
            rows: The k clients, each once.
        """
        weighted = values.detach() * weights
        if name not in self.totals:
            self.totals[name] = weighted.new_zeros(self.num_clients, *weighted.shape[1:])
            self.weights[name] = np.zeros(self.num_clients, dtype=np.int64)
        self.totals[name][rows] += weighted
        self.weights[name][rows if isinstance(rows, slice) else rows.cpu().numpy()] += sizes

    def means(self) -> list[dict[str, float]]:
        """Every client's means by name; one device synchronization a name."""
        metrics_by_client: list[dict[str, float]] = [{} for _ in range(self.num_clients)]
        for name, totals in self.totals.items():
            for metrics, total, weight in zip(
                metrics_by_client, totals.tolist(), self.weights[name].tolist(), strict=True
            ):
                if weight:
                    metrics[name] = total / weight
        return metrics_by_client


_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Meter:
    """Sample-weighted means of logged values.

    Values on an accelerator stay there until `compute`; ``batch_size`` is the default weight of a value. ``names`` has
    the names that the task gave to ``self.log``, by those of the columns, in the order of the first calls.

    Args:
        task_metrics: The task's metrics, whose computed values may be logged in place of the objects.
    """

    def __init__(self, task_metrics: Sequence[Metric] = ()) -> None:
        self.task_metrics = task_metrics
        self.batch_size = 1
        self.names: dict[str, str] = {}
        self._sums = WeightedSums()
        self._folded: dict[str, tuple[str, Tensor]] = {}
        self._metrics: dict[str, Metric] = {}
        self.directions: dict[str, Direction] = {}

    def add(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:
        """Add a number, a 0-d tensor or a torchmetrics ``Metric`` (computed once, at the end).

        Args:
            name: The value's.
            value: The batch's.
            batch_size: Weight in the mean; None for the number of samples.
            reduce_fx: ``mean`` of the batches' values, ``sum``, ``min`` or ``max``, or torch's function of that name.
        """
        is_tensor = isinstance(value, Tensor)
        if is_tensor and any(value is computed_value(one) and is_undefined(one) for one in self.task_metrics):
            value = torch.full_like(value, torch.nan, dtype=torch.get_default_dtype())
        if is_tensor and value.numel() != 1:
            raise ConfigError(f"self.log({name!r}, …) got {value.numel()} values; log one number, or their mean")
        if not is_tensor and isinstance(value, Metric):
            self._metrics[name] = value
            if value.higher_is_better is not None:
                self.directions[name] = "max" if value.higher_is_better else "min"
            return
        if reduce_fx != "mean" and reduce_fx is not torch.mean:
            self._fold(name, value, reduce_fx)
            return
        count = self.batch_size if batch_size is None else batch_size
        number = float(value) if not is_tensor else value.item() if value.is_cpu else value.detach()
        self._sums.add(name, number, count)

    def _fold(self, name: str, value: Any, reduce_fx: Any) -> None:
        how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if how not in _FOLDS or (callable(reduce_fx) and reduce_fx is not getattr(torch, how, None)):
            raise ConfigError(f"self.log({name!r}, …) has reduce_fx={reduce_fx!r}; it must be mean, sum, min or max")
        new = value.detach().reshape(()) if isinstance(value, Tensor) else torch.as_tensor(float(value))
        before = self._folded.get(name)
        self._folded[name] = (how, new if before is None else _FOLDS[how](before[1], new.to(before[1])))

    def folded(self) -> dict[str, tuple[str, Tensor]]:
        """Reduction and current value by name, of values that are not means."""
        return {name: (how, value.cpu()) for name, (how, value) in self._folded.items()}

    def compute(self) -> dict[str, float]:
        """Mean of every logged value, and value of every logged ``Metric``, which is then reset."""
        logged = means(self._sums.numbers())
        return logged | _numbers(self.folded()) | self._compute_metrics() if self._folded or self._metrics else logged

    def so_far(self) -> dict[str, float]:
        """`compute` of this process's values, which leaves every ``Metric`` as it is."""
        values = means(self._sums.numbers()) | _numbers(self.folded())
        for name, metric in self._metrics.items():
            if metric.update_called:
                copied = deepcopy(metric)  # with its state: no other process may be waiting in a collective
                for part in _metrics_in(copied).values():
                    share(part, False)
                values[name] = value_of(copied)
        return values

    def merged(self, workers: Workers, task_metrics: Sequence[Metric] = ()) -> dict[str, float]:
        """`compute` over the values that all processes logged; every process must call this.

        Args:
            workers: The processes.
            task_metrics: The task's metrics, in the same order on every process: the state of one counts for another
                process that logs it.

        Note:
            The states of metrics are merged here and not by torchmetrics' own synchronization, which waits forever for
            a process that did not log a metric, and mixes up one that did not update it.
        """
        if workers.world_size == 1:
            return self.compute()
        merged: dict[str, tuple[float, int]] = {}
        folded: dict[str, tuple[str, Tensor]] = {}
        places: dict[int, int | str] = {id(metric): place for place, metric in enumerate(task_metrics)}
        keys = {name: places.get(id(metric), name) for name, metric in self._metrics.items()}
        metrics = dict(enumerate(task_metrics)) | {keys[name]: metric for name, metric in self._metrics.items()}
        states = {key: _states(metric) for key, metric in metrics.items()}
        parts = workers.gather((self._sums.numbers(), self.folded(), states))
        for totals, others, _ in parts:
            for name, (total, count) in totals.items():
                before = merged.get(name, (0.0, 0))
                merged[name] = (before[0] + total, before[1] + count)
            for name, (how, value) in others.items():
                folded[name] = (how, _FOLDS[how](folded[name][1], value) if name in folded else value)
        for name, metric in self._metrics.items():
            held = [part[2][keys[name]] for part in parts if keys[name] in part[2]]
            for place, module in _metrics_in(metric).items():
                merge_states(module, [_moved(states[place], module.device) for states in held if place in states])
        computed = {name: value for part in workers.gather(self._compute_metrics()) for name, value in part.items()}
        return means(merged) | _numbers(folded) | computed

    def _compute_metrics(self) -> dict[str, float]:
        values = {}
        for name, metric in self._metrics.items():
            for part in _metrics_in(metric).values():
                share(part, False)
            if not (name.startswith("train/") and is_undefined(metric)):  # a training that has NaN would fail
                values[name] = value_of(metric)
        for metric in self._metrics.values():
            metric.reset()
        return values


def in_order(values: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Values in the order of the calls that logged them, see `Meter.names`."""
    return {name: values[name] for name in names if name in values} | dict(values)


def _metrics_in(metric: Metric) -> dict[str, Metric]:
    """A metric and the metrics inside it, by path."""
    return {place: module for place, module in metric.named_modules() if isinstance(module, Metric)}


def _states(metric: Metric) -> dict[str, dict[str, Any]]:
    """States of a metric and the metrics inside it, by path and name, where they were updated."""
    seen = {place: part for place, part in _metrics_in(metric).items() if part.update_called}
    return {
        place: {name: _moved(value, "cpu") for name, value in part.metric_state.items()} for place, part in seen.items()
    }


def _moved(state: Any, device: torch.device | str) -> Any:
    return map_tensors(state, lambda tensor: tensor.detach().to(device))


def _numbers(folded: Mapping[str, tuple[str, Tensor]]) -> dict[str, float]:
    return {name: float(value) for name, (_, value) in folded.items()}
