"""Weighted sums of one client and of a group are the same."""

from __future__ import annotations

import torch

from lit_fed.engine.lightning.meter import StackedSums, WeightedSums, means


def test_means_are_weighted() -> None:
    # (2·1 + 1·4)/3 = 2
    sums = WeightedSums()
    sums.add("a", torch.tensor(1.0), 2)
    sums.add("a", torch.tensor(4.0), 1)
    sums.add("b", 0.5, 0)
    assert means(sums.numbers()) == {"a": 2.0, "b": 0.0}


def test_a_group_sums_each_client_by_itself_wherever_it_stands() -> None:
    # Client 0: (2·1 + 1·4)/3 = 2; client 1: (2·3)/2 = 3; client 2: (1·5)/1 = 5.
    sums = StackedSums(3)
    sums.add("a", torch.tensor([1.0, 3.0]), torch.tensor([2, 2]), [2, 2], slice(0, 2))
    sums.add("a", torch.tensor([5.0, 4.0]), 1, 1, torch.tensor([2, 0]))
    assert sums.means() == [{"a": 2.0}, {"a": 3.0}, {"a": 5.0}]


def test_a_client_without_a_value_has_no_mean() -> None:
    sums = StackedSums(2)
    sums.add("a", torch.tensor([1.0]), 1, 1, slice(0, 1))
    assert sums.means() == [{"a": 1.0}, {}]
