"""Clients that hold different ranges of a numerical target."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.data import Diabetes
from lit_fed.data.partitions.partition import Samples
from lit_fed.data.partitions.target_skew import Continuous
from lit_fed.errors import ConfigError
from tests.data.partitions.test_partition import assert_each_once, seeds


def samples_of(targets: Any) -> Samples:
    return Samples(len(targets), targets=np.asarray(targets, dtype=np.float32))


@given(st.integers(20, 200), st.integers(1, 20), st.floats(0.0, 1.0), seeds)
def test_every_sample_is_used_once_in_equal_parts(num_samples: int, num_clients: int, strictness: float, seed: int):
    samples = samples_of(np.random.default_rng(seed).exponential(size=num_samples))
    partition = Continuous(strictness)
    csr = partition(samples, num_clients, seed)
    assert_each_once(csr, num_samples)
    assert csr.sizes.max() - csr.sizes.min() <= 1
    again = partition(samples, num_clients, seed)
    assert again.indices.tolist() == csr.indices.tolist()
    test = partition.split_test(csr, samples, samples_of(np.arange(30.0)), seed)
    assert sorted(i for k in range(num_clients) for i in test[k].tolist()) == list(range(30))


def test_strict_ranges_by_hand():
    # Sorted: -2, 0, 1, 3, 5, 9, cut in three; edges are 1 and 5, of which each belongs to the client that begins there.
    samples = samples_of([5.0, -2.0, 1.0, 9.0, 0.0, 3.0])
    csr = Continuous(1.0)(samples, 3, 0)
    assert [csr[k].tolist() for k in range(3)] == [[1, 4], [2, 5], [0, 3]]
    test = Continuous(1.0).split_test(csr, samples, samples_of([0.5, 100.0, -7.0, 4.0, 1.0, 5.0]), 0)
    assert [test[k].tolist() for k in range(3)] == [[0, 2], [3, 4], [1, 5]]


@given(st.permutations(list(range(12))), seeds)
def test_strict_ranges_do_not_depend_on_the_samples_order(order: list[int], seed: int):
    csr = Continuous(1.0)(samples_of(order), 4, seed)
    assert [sorted(order[i] for i in csr[k].tolist()) for k in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


@pytest.mark.parametrize("strictness", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_clients_means_are_those_of_correlated_normal_variables(strictness: float):
    # With correlation ρ, E[z | b in the upper half] = ρ·√(2/π); the mean of 50,000 of them deviates by 1/√50,000.
    rho = strictness / np.hypot(strictness, 1 - strictness)
    targets = 50 + 7 * np.random.default_rng(1).standard_normal(100_000)
    samples = samples_of(targets)
    csr = Continuous(strictness)(samples, 2, 3)
    test = Continuous(strictness).split_test(csr, samples, samples, 4)  # other noise, and its edges
    for part in (csr, test):
        upper = (targets[part[1]].mean() - 50) / 7
        assert upper == pytest.approx(rho * np.sqrt(2 / np.pi), abs=5 * 50_000**-0.5)


def test_a_regression_in_memory_is_cut_by_its_targets():
    data = Diabetes(num_clients=4, partition=Continuous(1.0), val_fraction=0.1)
    data.setup()
    ranges = [data.target_values(np.concatenate([data._ready.train[k], data._ready.val[k]])) for k in range(4)]
    assert all(below.max() <= above.min() for below, above in pairwise(ranges))
    tested = [len(data._ready.test[k]) for k in range(4)]
    assert sum(tested) == len(data._ready.shared_test)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Continuous(-0.1), "Continuous.strictness is -0.1; it must be at least 0 and at most 1"),
        (lambda: Continuous(float("nan")), "Continuous.strictness is nan"),
        (
            lambda: Continuous()(Samples.from_strata(np.arange(50) % 2), 2, 0),
            "partition Continuous needs the numerical target of each sample, which the data set does not tell; choose",
        ),
        (lambda: Continuous()(samples_of([3.0] * 9), 2, 0), "all 9 training targets of the data set are 3, and"),
    ],
)
def test_errors_say_what_is_wrong(build: Any, message: str):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
