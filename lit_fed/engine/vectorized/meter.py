"""What is summed up over the steps of a group of clients, for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.method.client import Tensors


class GroupMeter:
    """Sample-weighted means of what each client of a group logs.

    Args:
        num_clients: How many.
    """

    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Any] = {}

    def add(self, name: str, values: Tensor, counts: Tensor | int, sizes: Sequence[int] | int) -> None:
        """Take in a value of each of the first clients, and what it weighs: as a tensor, and as numbers."""
        weighted = values.detach() * counts
        self._begin(name, weighted)
        self._sums[name][: len(values)] += weighted
        self._counts[name][: len(values)] += sizes

    def add_at(self, rows: Tensor, name: str, values: Tensor, count: int) -> None:
        """Take in a value of each of some clients, all of the same weight."""
        self._begin(name, values)
        self._sums[name].index_add_(0, rows, values.detach() * count)
        self._counts[name][rows.cpu().numpy()] += count

    def _begin(self, name: str, like: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = like.new_zeros(self._num_clients)
            self._counts[name] = np.zeros(self._num_clients, dtype=np.int64)

    def compute(self) -> list[dict[str, float]]:
        """Every client's means; one device synchronisation a name."""
        found: list[dict[str, float]] = [{} for _ in range(self._num_clients)]
        for name, sums in self._sums.items():
            for metrics, total, count in zip(found, sums.tolist(), self._counts[name].tolist(), strict=True):
                if count:
                    metrics[name] = total / count
        return found


class MeanGradients:
    """Every client's gradient over all its samples, from those of its batches."""

    def __init__(self, num_clients: int) -> None:
        self._sums: Tensors = {}
        self._totals = [0] * num_clients

    def add(self, gradients: Tensors, sizes: Sequence[int]) -> None:
        """Take in the mean gradients of the samples of the first clients' batches."""
        for idx, size in enumerate(sizes):
            self._totals[idx] += size
        for name, gradient in gradients.items():
            counts = torch.tensor(sizes, device=gradient.device).view(-1, *(1 for _ in gradient.shape[1:]))
            if name not in self._sums:
                self._sums[name] = gradient.new_zeros(len(self._totals), *gradient.shape[1:])
            self._sums[name][: len(sizes)] += gradient * counts

    def means(self) -> list[Tensors]:
        """By client and name; a parameter that never had a gradient is missing."""
        parts = {name: total.unbind(0) for name, total in self._sums.items()}
        return [
            {name: found[idx] / total for name, found in parts.items()} if total else {}
            for idx, total in enumerate(self._totals)
        ]
