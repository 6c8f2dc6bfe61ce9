"""Adapters on the federation that is computed by hand, and the server's halves of methods on drawn updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lit_fed import FederatedTrainer, Model
from lit_fed.algorithm import ClientUpdate, Cohort
from lit_fed.engine.wire.workers import Workers
from lit_fed.methods.low_rank.adapted import Products
from lit_fed.networks import LoRALinear, adapters_of
from tests.methods.support import run_quickstart
from tests.support import LeastSquares, rows, saved_weights, weights

ALONE = cast("Workers", SimpleNamespace(world_size=1, fabric=SimpleNamespace(device="cpu"), gather=lambda one: [one]))


class Beside(LeastSquares):
    """`LeastSquares` whose w = 0 stays, beside B = 0 and A = (1, 1) of rank 1, with s = 1."""

    def __init__(self) -> None:
        super().__init__()
        base: Any = self.network
        self.network = layer = LoRALinear(base, 1, 1.0)
        layer.weight.requires_grad_(False)
        layer.lora_A.data.fill_(1.0)


class Two(nn.Module):
    """Two adapted layers that are not square, 7 → 5 → 4, with s = 1.5, and a head."""

    def __init__(self, rank: int = 2, sizes: tuple[int, int, int] = (7, 5, 4)) -> None:
        super().__init__()
        n, m, k = sizes
        self.first, self.second = (LoRALinear(nn.Linear(a, b), rank, 1.5) for a, b in ((n, m), (m, k)))
        self.head = nn.Linear(k, 3)
        for layer in (self.first, self.second):
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))).mean(1, keepdim=True)  # type: ignore[no-any-return]  # a module's


class OnTwo(LeastSquares):
    """A task on `Two`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(lr=1e-4)
        self.network = Two(**settings)


def stepped(
    method: Products, tasks: dict[str, OnTwo], updates: Sequence[tuple[str, dict[str, Tensor], float]], rounds: int = 1
) -> tuple[dict[str, Any], dict[str, float]]:
    """The server after rounds with the same updates, by kind, tensors and weight; and its metrics."""
    server = method.setup({kind: Model(task) for kind, task in tasks.items()}, cast("Any", SimpleNamespace(
        seed=0, num_clients=len(updates))))  # fmt: skip
    metrics: dict[str, float] = {}
    for round_idx in range(rounds):
        reducer = method.reducer(server)
        for client_id, (kind, tensors, weight) in enumerate(updates):
            reducer.add(ClientUpdate(client_id, tensors, weight, kind=kind))
        aggregate = reducer.result(ALONE)
        assert aggregate is not None
        metrics = method.step(server, aggregate, Cohort(round_idx, tuple(range(len(updates))), len(updates)))
    return server, metrics


def drawn(task: OnTwo, seed: int) -> dict[str, Tensor]:
    """An update of a client: its adapters and head at random."""
    random = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=random) for n, p in task.named_parameters() if p.requires_grad}


def products(task: OnTwo, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """s·BA of each adapted layer by its base, in float64."""
    return {
        one.base: one.scale * tensors[one.lora_b].double() @ tensors[one.lora_a].double() for one in adapters_of(task)
    }


def layer(made: FederatedTrainer) -> dict[str, list[Any]]:
    """A, B and w of `Beside`'s global model."""
    return {name.rpartition(".")[2]: tensor.flatten().tolist() for name, tensor in weights(made).items()}


def assert_groups_are_sequential(folder: Path, method: str) -> None:
    """Three rounds on the digits, in groups and one after the other; and the bytes, which are 4 a trained number."""
    words = ["--algorithm", method, "--model.adapter.rank", "4", "--trainer.local_epochs", "2"]
    runs = {
        executor: run_quickstart(folder / executor, *words, "--trainer.executor", executor, rounds=3)
        for executor in ("sequential", "vectorized")
    }
    one, other = (saved_weights(run) for run in runs.values())
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)
    first, second = ([*rows(run / "metrics.csv")] for run in runs.values())
    for row, like in zip(first, second, strict=True):
        assert row["comm/uplink_bytes"] == like["comm/uplink_bytes"]
        if "lora/cross_term" in row:
            assert float(row["lora/cross_term"]) == pytest.approx(float(like["lora/cross_term"]), rel=1e-3, abs=1e-6)
