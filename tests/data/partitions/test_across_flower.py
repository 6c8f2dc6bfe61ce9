"""Partitions beside the partitioners of ``flwr_datasets``: equal sizes, or an equal law.

Skipped without ``flwr_datasets``, which needs ``datasets`` before 5, and is in no extra.

Fixed sizes are compared exactly. Of drawn shares, a statistic over many seeds, such as the largest
class share of a client, must not differ by a two-sample Kolmogorov-Smirnov test at 0.001; the seeds are fixed.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from lit_fed.data import (
    IID,
    ClassesPerClient,
    Continuous,
    Dirichlet,
    Grouped,
    InnerDirichlet,
    Natural,
    Partition,
    Samples,
    Shards,
    SizeLaw,
)

datasets = pytest.importorskip("datasets")
partitioner = pytest.importorskip("flwr_datasets.partitioner")

ROWS, CLASSES, CLIENTS, SEEDS = 2000, 5, 8, 25
LABELS = np.random.default_rng(0).permutation(np.arange(ROWS) % CLASSES)
OWNERS = np.sort(np.random.default_rng(1).integers(0, 12, ROWS))
TARGETS = np.random.default_rng(2).normal(size=ROWS)


@pytest.fixture(scope="module")
def table() -> Any:
    try:
        return datasets.Dataset.from_dict(
            {"row": list(range(ROWS)), "label": LABELS.tolist(), "owner": OWNERS.tolist(), "value": TARGETS.tolist()}
        )
    except pickle.PicklingError:
        pytest.skip("dill pickles whole packages that lie outside of site-packages, and fails")


def theirs(made: Any, table: Any, count: int) -> list[NDArray[np.int64]]:
    made.dataset = table.with_format("numpy")
    return [made.load_partition(client)[:]["row"].astype(np.int64) for client in range(count)]


def ours(partition: Partition, count: int, seed: int = 0) -> list[NDArray[np.int64]]:
    samples = Samples(ROWS, LABELS, OWNERS, targets=TARGETS)
    cut = partition(samples, count, seed)
    return [cut[client] for client in range(count)]


def sizes(parts: list[NDArray[np.int64]]) -> list[int]:
    return [len(rows) for rows in parts]


def histogram(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.stack([np.bincount(LABELS[rows], minlength=CLASSES) for rows in parts])


def alike(first: list[float], second: list[float]) -> None:
    assert ks_2samp(first, second).pvalue > 0.001, (np.mean(first), np.mean(second))


def test_equal_parts(table: Any) -> None:
    assert sizes(theirs(partitioner.IidPartitioner(7), table, 7)) == sizes(ours(IID(), 7))


@pytest.mark.parametrize(
    ("law", "name"),
    [("linear", "LinearPartitioner"), ("square", "SquarePartitioner"), ("exponential", "ExponentialPartitioner")],
)
def test_sizes_by_a_law(table: Any, law: Any, name: str) -> None:
    count = 5 if law == "exponential" else CLIENTS
    assert sizes(theirs(getattr(partitioner, name)(count), table, count)) == sizes(ours(SizeLaw(law), count))


def test_natural_clients_and_groups_of_them(table: Any) -> None:
    count = len(np.unique(OWNERS))
    first, second = theirs(partitioner.NaturalIdPartitioner("owner"), table, count), ours(Natural(), count)
    assert [set(rows) for rows in first] == [set(rows) for rows in second]
    made = partitioner.GroupedNaturalIdPartitioner("owner", group_size=5, mode="allow-smaller")
    first, second = theirs(made, table, 3), ours(Grouped(5), 3)
    assert sorted(sizes(first)) == sorted(sizes(second))
    for parts in (first, second):  # the last group has two, and no owner is in two groups
        assert sorted(len(set(OWNERS[rows])) for rows in parts) == [2, 5, 5]
        assert sum(len(set(OWNERS[rows])) for rows in parts) == count


@pytest.mark.parametrize("alpha", [0.3, 5.0])
def test_classes_in_dirichlet_shares(table: Any, alpha: float) -> None:
    """The largest share of a class that a client holds, and the largest client, over seeds."""
    found = dict[str, tuple[list[float], list[float]]]()
    for seed in range(SEEDS):
        made = partitioner.DirichletPartitioner(
            CLIENTS, "label", alpha, min_partition_size=1, self_balancing=False, seed=seed
        )
        pair = theirs(made, table, CLIENTS), ours(Dirichlet(alpha, min_samples=1, cap=False), CLIENTS, seed)
        for side, parts in enumerate(pair):
            counts = histogram(parts)
            shares = counts / counts.sum(axis=0)
            found.setdefault("share", ([], []))[side].append(float(shares[:, 0].max()))
            found.setdefault("least", ([], []))[side].append(float(shares.min()))
            found.setdefault("size", ([], []))[side].append(float(max(sizes(parts))))
    for first, second in found.values():
        alike(first, second)


def test_clients_of_given_sizes_with_dirichlet_classes(table: Any) -> None:
    wanted = [100, 150, 200, 250, 300, 200, 150, 100]
    first, second = list[float](), list[float]()
    for seed in range(SEEDS):
        made = partitioner.InnerDirichletPartitioner(wanted, "label", alpha=0.5, seed=seed, shuffle=False)
        pair = theirs(made, table, CLIENTS), ours(InnerDirichlet(0.5, sizes=wanted), CLIENTS, seed)
        for parts, into in zip(pair, (first, second), strict=True):
            assert sizes(parts) == wanted
            into.append(float((histogram(parts)[:2].max(axis=1) / wanted[:2]).max()))
    alike(first, second)


def test_a_number_of_classes_each(table: Any) -> None:
    made = partitioner.PathologicalPartitioner(
        CLIENTS, "label", 2, class_assignment_mode="deterministic", shuffle=False
    )
    counts = [histogram(parts) for parts in (theirs(made, table, CLIENTS), ours(ClassesPerClient(k=2), CLIENTS))]
    for held in counts:
        assert ((held > 0).sum(axis=1) == 2).all()
        assert held.sum() == ROWS
        for column in held.T:  # a class is shared equally by the clients that have it, up to one sample
            assert np.ptp(column[column > 0]) <= 1
    assert sorted((counts[1] > 0).sum(axis=0)) == [3, 3, 3, 3, 4]  # ours are chosen evenly, theirs need not be


def test_shards(table: Any) -> None:
    made = partitioner.ShardPartitioner(
        10, "label", num_shards_per_partition=2, seed=3
    )  # 20 shards of 100, one class each
    for parts in (theirs(made, table, 10), ours(Shards(shards_per_client=2), 10)):
        assert sizes(parts) == [200] * 10
        assert ((histogram(parts) > 0).sum(axis=1) <= 2).all()
    first, second = list[float](), list[float]()
    for seed in range(SEEDS):
        made = partitioner.ShardPartitioner(10, "label", num_shards_per_partition=2, seed=seed)
        first.append(float(((histogram(theirs(made, table, 10)) > 0).sum(axis=1) == 1).sum()))
        second.append(float(((histogram(ours(Shards(2), 10, seed)) > 0).sum(axis=1) == 1).sum()))
    alike(first, second)  # the number of clients with two shards of one class


def test_ranges_of_a_target(table: Any) -> None:
    for strictness in (0.0, 0.7, 1.0):
        made = partitioner.ContinuousPartitioner(CLIENTS, "value", strictness=strictness, seed=4)
        pair = theirs(made, table, CLIENTS), ours(Continuous(strictness), CLIENTS, 4)
        spread = [[float(TARGETS[rows].std()) for rows in parts] for parts in pair]
        assert sizes(pair[0]) == sizes(pair[1])
        assert np.allclose(*map(np.mean, spread), atol=0.1)
