"""What follows from the columns of a source, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import IID, Categorical, Columns, Natural, TensorSource
from lit_fed.errors import ConfigError


class Given(TensorSource):
    """Columns of a test."""

    def __init__(self, columns: Columns, **kwargs: Any) -> None:
        self.names_clients = columns.clients is not None
        super().__init__(**kwargs)
        self._given = columns

    def read(self) -> Columns:
        return self._given


def ready(columns: Columns, **settings: Any) -> Given:
    data = Given(columns, **settings)
    data.setup()
    return data


def inputs(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None]


def test_names_are_numbered_in_their_order_and_every_client_gives_its_share_to_the_test() -> None:
    writers = ["10"] * 8 + ["9"] * 12
    data = ready(Columns(inputs(20), ["b", "a"] * 10, writers), test_fraction=0.25)
    assert (data.class_names, data.num_classes, data.input_shape, data.output_shape) == (["a", "b"], 2, (1,), (2,))
    assert isinstance(data.partition, Natural)
    assert data.client_names == ["9", "10"]  # in numerical order
    # A quarter of 12 and of 8 is 3 and 2.
    assert [data.census.num_samples(client) for client in (0, 1)] == [9, 6]
    assert [data.test_loader(client).num_samples for client in (0, 1)] == [3, 2]
    for client, own in ((0, range(8, 20)), (1, range(8))):
        for x, y in data.train_loader(client, torch.Generator()):
            assert set(x[:, 0].tolist()) <= set(own)
            assert y.tolist() == [1 - int(number) % 2 for number in x[:, 0].tolist()]


def test_test_samples_of_clients_who_do_not_train_are_in_the_shared_test_set() -> None:
    test = Columns(inputs(4), ["b", "b", "a", "a"], ["ann", "eve", "eve", "ann"])
    data = ready(Columns(inputs(6), ["a", "b"] * 3, ["bob", "ann"] * 3, test=test))
    assert data.client_names == ["ann", "bob"]
    assert [data.test_loader(client).num_samples for client in (0, 1)] == [2, 0]
    assert data.test_loader().num_samples == 4


def test_without_clients_and_names_samples_are_cut_at_random_and_classes_are_counted() -> None:
    data = ready(Columns(inputs(20), np.arange(20) % 3), num_clients=2)
    assert isinstance(data.partition, IID)
    assert (data.class_names, data.num_classes, data.own_client_names()) == (None, 3, None)
    assert (data.census.num_samples(0) + data.census.num_samples(1), data.test_loader().num_samples) == (16, 4)


def test_floating_point_numbers_are_a_regression() -> None:
    data = ready(Columns(inputs(20), np.ones((20, 2))), num_clients=2)
    assert (data.num_classes, data.output_shape) == (None, (2,))


def test_given_names_keep_their_order() -> None:
    columns = Columns(inputs(4), ["b", "a"] * 2, test=Columns(inputs(2), ["a", "b"]))
    data = ready(columns, class_names=["b", "a", "c"], num_clients=1)
    assert (data.class_names, data.num_classes) == (["b", "a", "c"], 3)
    assert [y.tolist() for _, y in data.test_loader()] == [[1, 0]]
    ordered = Columns(inputs(4), Categorical(["b", "a"], np.array([0, 1, 0, 1])), test=Columns(inputs(2), ["a", "b"]))
    assert [y.tolist() for _, y in ready(ordered, num_clients=1).test_loader()] == [[1, 0]]


def test_privacy_is_told_what_is_read_off_all_samples() -> None:
    named, counted = Columns(inputs(20), ["a", "b"] * 10), Columns(inputs(20), np.arange(20) % 2)
    assert "data.class_names are read off all clients' samples" in str(Given(named).pooled())
    assert "data.num_classes is counted over all clients' labels" in str(Given(counted).pooled())
    assert Given(named, class_names=["a", "b"]).pooled() is None
    assert Given(Columns(inputs(20), np.ones(20))).pooled() is None


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        (Columns(inputs(3), ["a", "b", "a"]), {}, "leaves no test samples; raise data.test_fraction"),
        (Columns(inputs(3), ["a"] * 3), {"test_fraction": 0.0}, "data.test_fraction is 0.0; it must be above 0"),
        (Columns(inputs(9), ["a", "b", "c"] * 3), {"class_names": ["a", "b"]}, "target 'c' is not a class of data.cl"),
        (
            Columns(inputs(3), ["a"] * 3, test=Columns(inputs(1), ["z"])),
            {},
            "target 'z' is not a class of the training rows, which have a; correct it",
        ),
        (
            Columns(inputs(3), np.zeros(3, int), test=Columns(inputs(0), np.zeros(0, int))),
            {},
            "has no test samples; add",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_refused(columns: Columns, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ready(columns, num_clients=1, **settings)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="the data set: columns have 3 and 2 and 3 rows; give one each"):
        Columns(inputs(3), ["a", "b"], ["ann"] * 3)


def test_a_sample_without_a_name_is_refused() -> None:
    for y, clients in ((["a", None], ["ann", "bob"]), (["a", "b"], ["ann", None])):
        with pytest.raises(ConfigError, match="sample 1 has no class or no client; name it, or leave the sample out"):
            Columns(inputs(2), y, clients)


def test_clients_that_the_class_does_not_announce_are_not_ignored() -> None:
    data = Given(Columns(inputs(20), ["a", "b"] * 10, ["ann", "bob"] * 10), partition=IID())
    with pytest.raises(ConfigError, match=r"the data set names 2 clients, which data\.partition IID would ignore"):
        data.setup()
