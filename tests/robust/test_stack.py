"""The matrix of a round's updates: its order, its layout, its memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.robust import Median, Mimic, stack
from lit_fed.robust.stack import Stack
from tests.support import Points, fit


class Alone:
    """The processes of a run that has one."""

    world_size, rank = 1, 0
    fabric = SimpleNamespace(device=torch.device("cpu"))

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def filled(*order: int) -> Stack:
    """Client k sends k in ``w``, a late update 10 in ``w`` of client 1, and counts in a buffer."""
    made = Stack({"w": torch.ones(2)}, {"running"})
    for client_id in order:
        value = 10.0 if client_id < 0 else float(client_id)
        payload = {"w": torch.full((2,), value), "running": torch.tensor([2.0]), "count": torch.tensor(client_id)}
        made.add(ClientUpdate(abs(client_id), payload))
    return made


def test_rows_are_sorted_by_client_minus_the_broadcast_without_buffers() -> None:
    alone: Any = Alone()
    for order in ((2, 0, 1, -1), (-1, 1, 2, 0)):
        made = filled(*order)
        assert made.gather(alone) == 4
        assert made.clients == [0, 1, 1, 2]
        assert torch.cat(list(made.blocks(alone)), 1).tolist() == [[-1, -1], [0, 0], [9, 9], [1, 1]]
        assert made.extra_values(alone).tolist() == [[2, 0], [2, 1], [2, -1], [2, 2]]


def test_blocks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Any = Alone()
    monkeypatch.setattr(stack, "_BLOCK_VALUES", 3)
    made = filled(0, 1, 2)
    made.gather(alone)
    assert [block.tolist() for block in made.blocks(alone)] == [[[-1], [0], [1]]] * 2


def test_rows_without_coordinates_are_one_empty_block() -> None:
    alone: Any = Alone()
    made = Stack({}, {"running"})
    for client_id in range(3):
        made.add(ClientUpdate(client_id, {"running": torch.tensor([float(client_id)])}))
    made.gather(alone)
    assert [block.shape for block in made.blocks(alone)] == [(3, 0)]


def test_mimic_bears_numbers_whose_squares_overflow() -> None:
    # 1, 2, 9 minus the broadcast's 1; 9 is farthest from the mean 4, whatever the unit.
    alone: Any = Alone()
    for unit in (1.0, 2.0**700):
        made = Stack({"w": torch.full((2,), unit, dtype=torch.float64)}, ())
        for client_id, value in enumerate((1.0, 2.0, 9.0)):
            made.add(ClientUpdate(client_id, {"w": torch.full((2,), value * unit, dtype=torch.float64)}))
        made.gather(alone)
        assert Mimic(clients=[0]).forge(made, 1, alone).tolist() == [8 * unit, 8 * unit]


def test_tensors_have_the_updates_types_and_stay_finite() -> None:
    made = filled(3)
    made.gather(Alone())  # type: ignore[arg-type]
    found = made.tensors(torch.tensor([1e300, 1.0], dtype=torch.float64))
    assert found["w"].tolist() == [torch.finfo(torch.float32).max, 2]
    extras = made.extra_tensors(torch.tensor([2.5, 2.6], dtype=torch.float64))
    assert extras["running"].tolist() == [2.5]
    assert extras["count"].equal(torch.tensor(3))  # the dtype, too


def test_other_tensors_are_refused() -> None:
    made = filled(0)
    with pytest.raises(ValueError, match="client 1 sends other tensors than the clients before it: \\['v', 'w'\\]"):
        made.add(ClientUpdate(1, {"v": torch.zeros(2), "running": torch.tensor([2.0]), "count": torch.tensor(1)}))


def test_a_cohort_that_does_not_fit_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, data=Points(4), aggregation=Median(), attack=Mimic(clients=[0]), max_rounds=1)
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(stack, "free_memory", lambda: 31)  # four clients send 2 weights of 4 bytes: 32 bytes
    fit(tmp_path, data=Points(4), aggregation=Median(), attack=Mimic(clients=[0]), max_rounds=1)
    said = capsys.readouterr().out
    assert "warning: trainer.aggregation keeps 4 updates of 8e-06 MB a round, 3.2e-08 GB over all processes" in said
    assert "warning: trainer.attack Mimic keeps 4 updates" in said
