"""Counts of clients: by the cut of those here, by their reports of those elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from lit_fed.data import IID, Diabetes, Digits
from lit_fed.data.population.census import ClientReport
from lit_fed.errors import ConfigError


def test_a_report_counts_for_a_client_elsewhere() -> None:
    data = Digits(num_clients=4, partition=IID())
    data.setup(clients=[0])
    census = data.census
    assert (list(census.clients), census.is_complete) == ([0], False)
    with pytest.raises(ConfigError, match="client 2's data are not here"):
        census.num_samples(2)
    census.learn({2: ClientReport(7, (7, *[0] * 9), "abc"), 3: ClientReport(5, None, "def")})
    assert (census.num_samples(2), census.fingerprint(2), census.is_complete) == (7, "abc", True)
    np.testing.assert_array_equal(census.class_counts(2), [7] + [0] * 9)
    with pytest.raises(ConfigError, match="client 3 does not report its samples of each class"):
        census.class_histogram()
    assert census.num_samples(0) == len(data._ready.train[0])


def test_classes_are_counted_of_data_with_classes_only() -> None:
    data = Diabetes(num_clients=4)
    data.setup()
    with pytest.raises(ConfigError, match="Diabetes has no classes; use data with classes"):
        data.census.class_counts(0)
