"""What a data module draws of its population."""

from __future__ import annotations

import numpy as np
import pytest

from lit_fed.data import Diabetes, Digits, Dirichlet
from lit_fed.data.population.pictures import even_subset, partition_picture, sizes_picture, target_picture


@pytest.mark.parametrize(("count", "most"), [(1, 200), (200, 200), (201, 200), (100_000, 200), (5, 1)])
def test_even_subset(count: int, most: int) -> None:
    chosen = even_subset(count, most)
    assert len(chosen) == len(set(chosen.tolist())) == min(count, most)
    assert chosen[0] == 0
    if most > 1:
        assert chosen[-1] == count - 1
    gaps = np.diff(chosen)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_partition_picture_says_what_it_leaves_out() -> None:
    histogram = np.zeros((1000, 300), dtype=np.int64)
    histogram[:, 0] = 3
    axes = partition_picture(histogram).axes[0]
    assert axes.get_title() == (
        "Who has what: 3,000 training samples, 200 of 1,000 clients, evenly spread, 200 of 300 classes, evenly spread"
    )
    shown = axes.images[0].get_array()
    assert shown is not None
    assert shown.shape == (200, 200)
    assert shown[0].tolist() == [3] * 200
    assert np.ma.getmaskarray(shown)[1:].all()
    title = partition_picture(np.ones((5, 2), dtype=np.int64)).axes[0].get_title()
    assert title.endswith("10 training samples, 5 clients")


def test_target_picture_counts_targets_by_client_and_range() -> None:
    # 40 bins of [0, 40]: 0 in the first, 39.5 and 40 in the last.
    targets = np.array([0.0, 40.0, 39.5, 20.0], dtype=np.float32)
    axes = target_picture(targets, np.array([0, 0, 0, 1]), 2, np.array([3, 7])).axes[0]
    shown = axes.images[0].get_array()
    assert shown is not None
    assert shown.shape == (40, 2)
    assert [shown[0, 0], shown[39, 0], shown[20, 1], shown.sum()] == [1, 2, 1, 4]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "7"]
    assert axes.get_ylabel() == "target"
    assert axes.images[0].get_extent() == [-0.5, 1.5, 0, 40]
    wide = target_picture(np.zeros((4, 3), dtype=np.float32), np.zeros(4, dtype=np.int64), 1, np.array([0])).axes[0]
    assert wide.get_ylabel() == "first of 3 targets"


def test_sizes_picture_has_a_bar_a_client() -> None:
    axes = sizes_picture(np.array([4, 2]), np.array([0, 1])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [4, 2]
    assert axes.get_title() == "Who has how much: 6 training samples, 2 clients"


@pytest.mark.parametrize("cls", [Digits, Diabetes])
@pytest.mark.parametrize("clients", [None, [1, 3]])
def test_a_data_module_draws_itself(cls: type[Digits | Diabetes], clients: list[int] | None) -> None:
    data = cls(num_clients=5, partition=Dirichlet(1.0))
    data.setup(clients=clients)
    picture, figure = data.record.picture(), data.figure()
    assert picture is not None
    assert figure is not None
    assert picture.dtype == np.uint8
    assert picture.shape == (550, 900, 3)
    axes = figure.axes[0]
    expected = ["0", "1", "2", "3", "4"] if clients is None else ["1", "3"]
    assert [text.get_text() for text in axes.get_xticklabels()] == expected
    assert axes.get_ylabel() == ("class" if cls is Digits else "target")
    shown = axes.images[0].get_array()
    assert shown is not None
    assert shown.sum() == sum(data.census.num_samples(k) for k in data.census.clients)
