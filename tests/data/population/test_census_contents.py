"""Data are known again, whatever the machine, and no other data pass for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lit_fed.data import DatasetModule, Datasets
from lit_fed.data.population.census import Contents, chosen_rows, contents_of
from tests.support import Points

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (500, 1, 8, 8), dtype=np.uint8)
LABELS = RNG.integers(0, 10, 500)
FEATURES = RNG.normal(size=(3000, 20)).astype(np.float32)


def swapped(array: Any, one: int = 3, other: int = 4) -> Any:
    copy = array.copy()
    copy[[one, other]] = copy[[other, one]]
    return copy


def changed(array: Any) -> Any:
    copy = array.copy()
    copy.flat[-1] += 1
    return copy


@pytest.mark.parametrize("array", [PIXELS, LABELS, FEATURES, FEATURES.astype(np.float64), FEATURES.astype(np.float16)])
def test_other_values_or_another_order_are_other_data(array: Any) -> None:
    own = contents_of([array])
    assert own.is_of(contents_of([array.copy()]))
    columns = array[:, ::-1] if array.ndim == 2 else array[..., ::-1]
    others = [swapped(array), changed(array), array[:-1], columns, array[::-1], array * 2]
    assert [own.is_of(contents_of([other])) for other in others] == [False] * 6
    assert not own.is_of(contents_of([array, array]))


def test_rounding_of_another_machine_is_no_other_data() -> None:
    scaled = (FEATURES - FEATURES.mean(0)) / FEATURES.std(0)
    wide = FEATURES.astype(np.float64)
    again = ((wide - wide.mean(0)) / wide.std(0)).astype(np.float32)  # sums in another precision
    assert not np.array_equal(scaled, again)
    assert contents_of([scaled]).is_of(contents_of([again]))


def test_what_is_no_number_is_equal_to_itself() -> None:
    holes = FEATURES.copy()
    holes[0, 0], holes[2000, 1] = np.nan, np.inf
    assert contents_of([holes]).is_of(contents_of([holes.copy()]))
    assert not contents_of([holes]).is_of(contents_of([FEATURES]))


def test_large_arrays_are_sampled_by_the_same_rows() -> None:
    rows = chosen_rows(1000, 10)
    assert isinstance(rows, np.ndarray)
    assert len(rows) == len(set(rows.tolist())) == 10
    assert rows.tolist() == sorted(rows.tolist()) == chosen_rows(1000, 10).tolist()  # type: ignore[union-attr]
    assert chosen_rows(10, 10) == slice(None)


def test_empty_arrays() -> None:
    assert contents_of([PIXELS[:0], FEATURES[:0]]).is_of(contents_of([PIXELS[:0], FEATURES[:0]]))
    assert not contents_of([PIXELS[:0]]).is_of(contents_of([PIXELS]))


@pytest.mark.parametrize("made", [{"sha256": 3}, {"sha256": "x", "sums": [1.0]}, {"sha256": "x", "sums": (1.0,)}])
def test_no_fingerprint(made: Any) -> None:
    with pytest.raises(TypeError):
        Contents(**made)


def test_data_in_memory_are_looked_at_whole_wherever_somebody_works() -> None:
    everybody, somebody = Points(4), Points(4)
    everybody.setup("fit")
    somebody.setup("fit", clients=[2])
    assert everybody.record.contents == somebody.record.contents


class Pictures(Dataset[Any]):
    """Pictures, or noise that nobody can draw twice."""

    def __init__(self, seed: int, count: int, noise: bool = False) -> None:
        self.seed, self.count, self.noise = seed, count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        seed = None if self.noise else self.seed * 1000 + index
        return {"x": np.random.default_rng(seed).normal(size=(2, 3)), "name": f"{index}.png"}, index % 3


class Folder(DatasetModule):
    num_classes = 3
    input_shape = (2, 3)

    def __init__(self, seed: int = 0, labels: int = 0, noise: bool = False, **kwargs: Any) -> None:
        super().__init__(num_clients=3, **kwargs)
        self.made, self.labels = Pictures(seed, 60, noise), labels

    def build_datasets(self) -> Datasets:
        classes = (np.arange(60) + self.labels) % 3
        return Datasets(self.made, classes, self.made, classes)


def contents(**kwargs: Any) -> Contents:
    data = Folder(**kwargs)
    data.setup("fit")
    found = data.record.contents
    data.teardown("fit")
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_is_known_by_all_labels_and_some_samples(num_workers: int) -> None:
    own = contents(num_workers=num_workers)
    assert own.is_of(contents())
    assert not own.is_of(contents(seed=1))
    assert not own.is_of(contents(labels=1))
    assert len(own.sums) == 16  # of eight samples of either part


def test_samples_that_come_out_otherwise_every_time_tell_nothing() -> None:
    torch.manual_seed(0)
    assert contents(noise=True).is_of(contents(noise=True))
    assert not contents(noise=True).is_of(contents(noise=True, labels=1))
