"""Data sets of a user's own: what `build_datasets` returns, and how many clients there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lit_fed.command.commands.cost import foresee
from lit_fed.data import DatasetModule, Datasets, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.support import LeastSquares, trainer


class Named(DatasetModule):
    """Twenty samples of five clients, each with four."""

    input_shape, output_shape = (3,), ()

    def build_datasets(self) -> Any:
        data, owners = TensorDataset(torch.zeros(20, 3), torch.zeros(20)), np.arange(20) % 5
        return Datasets(data, None, data, None, train_clients=owners, test_clients=owners)


class Pair(Named):
    def build_datasets(self) -> Any:
        data = TensorDataset(torch.zeros(20, 3), torch.zeros(20))
        return data, data


class Rows(TensorDataModule):
    num_classes, input_shape = 2, (3,)

    def load_arrays(self) -> Any:
        return {"x_train": torch.zeros(20, 3)}


def test_clients_that_the_samples_name_are_as_many_as_there_are_where_no_number_is_set() -> None:
    data = Named(partition=Natural())
    data.setup()
    assert data.num_clients == 5
    assert [data.census.num_samples(client_id) for client_id in range(5)] == [4] * 5


def test_a_number_that_was_asked_for_before_the_data_are_read_does_not_stick() -> None:
    data = Named(partition=Natural())
    assert (data.num_clients, data.counts_by_reading) == (10, True)
    data.setup()
    assert (data.num_clients, data.counts_by_reading) == (5, False)


def test_cost_reads_data_that_alone_say_how_many_clients_there_are() -> None:
    cost = foresee(trainer(Path(), max_rounds=1), LeastSquares(), Named(partition=Natural()), FedAvg())
    assert [traffic.downloads for traffic in cost.rounds[0].values()] == [5]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            Pair(num_clients=2),
            "build_datasets of Pair returned tuple; return lit_fed.data.Datasets(…)",
        ),
        (Rows(num_clients=2), "load_arrays of Rows returned dict; return lit_fed.data.Arrays(…)"),
    ],
)
def test_another_type_is_refused_by_name(data: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        data.setup()
    assert str(error.value) == said
