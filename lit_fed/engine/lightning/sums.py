"""Weighted sums by name: the one home for means over samples, of one client and of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
        found: list[dict[str, float]] = [{} for _ in range(self.num_clients)]
        for name, totals in self.totals.items():
            for metrics, total, weight in zip(found, totals.tolist(), self.weights[name].tolist(), strict=True):
                if weight:
                    metrics[name] = total / weight
        return found
