"""Collectives of a run's processes, in two forked processes that talk over gloo."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Fabric

from lit_fed.engine.wire.workers import ClientParallelStrategy, Workers

SIZES = (0, 1, 3_000, 4_096, 100_000, 5, 99_999, 200_000)


def test_objects_of_any_size_reach_every_process_in_the_order_of_ranks() -> None:
    """Also where they are of different sizes, and larger or smaller than those before."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ClientParallelStrategy(start_method="fork"))

    def work(launched: Fabric) -> list[Any]:
        workers = Workers(launched)
        found = []
        for turn in range(len(SIZES)):
            size = SIZES[turn - 3 * workers.rank]
            parts = workers.gather((workers.rank, "x" * size, torch.arange(size)))
            found.append([(rank, len(text), int(numbers.sum())) for rank, text, numbers in parts])
        return workers.gather(found)

    pairs = [[SIZES[turn], SIZES[turn - 3]] for turn in range(len(SIZES))]
    expected = [[(rank, size, size * (size - 1) // 2) for rank, size in enumerate(pair)] for pair in pairs]
    assert fabric.launch(work) == [expected, expected]


def test_a_sum_over_processes_takes_the_place_of_its_terms() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ClientParallelStrategy(start_method="fork"))

    def work(launched: Fabric) -> list[Any]:
        workers = Workers(launched)
        own = torch.tensor([1.0, 10.0], dtype=torch.float64) * (1 + workers.rank)
        return workers.gather((workers.all_reduce(own).tolist(), own.tolist()))

    assert fabric.launch(work) == [([3.0, 30.0], [3.0, 30.0])] * 2
