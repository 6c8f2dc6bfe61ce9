"""Clients that hold few classes in unequal numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.data.partitions.label_skew import ClassesPerClient, ExtendedDirichlet, InnerDirichlet, Pathological
from lit_fed.data.partitions.partition import LogNormal, Partition, Samples, SizeLaw
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator
from tests.data.partitions.test_partition import assert_each_once, labels_of_4, seeds


@given(labels_of_4, st.integers(4, 12), st.integers(1, 4), st.floats(0.05, 1.0), seeds)
def test_pathological_gives_k_classes_and_at_least_a_share_of_an_equal_part(labels, num_clients, k, least, seed):
    labels = np.concatenate([labels, np.repeat(np.arange(4), 12)])  # enough of every class for 12 clients
    csr = Pathological(k, least)(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(csr, len(labels))  # 4 clients or more choose every one of 4 classes
    held = csr.histogram(labels, 4)
    assert ((held > 0).sum(axis=1) == k).all()
    for label, total in enumerate(np.bincount(labels, minlength=4)):
        sizes = np.sort(held[:, label][held[:, label] > 0])
        equal = total / len(sizes)
        assert sizes[0] >= max(1, int(least * equal))
        assert (sizes[:-1] <= int(equal)).all()  # all but the client with the remainder


def test_with_a_least_share_of_one_pathological_gives_equal_parts():
    # 120 samples of each of 4 classes for 6 clients of 2 classes: 3 clients a class, 40 samples each.
    labels = Samples.from_strata(np.arange(480) % 4)
    for partition in (Pathological(2, least=1.0), ClassesPerClient(2)):
        csr = partition(labels, 6, 5)
        assert sorted(csr.histogram(labels.strata, 4).ravel()) == [0] * 12 + [40] * 12


def test_pathological_sizes_are_uniform_but_for_the_client_with_the_remainder():
    # 2 clients of 1,000 samples: one gets U{50 … 500}, the other the rest; the mean of the smaller is 275, of deviation
    # √((451² − 1)/12) = 130.2, so that the mean of 400 draws deviates by 6.5. Either client is as often the larger.
    smaller, first_is_larger = [], 0
    for seed in range(400):
        sizes = Pathological(1, least=0.1)(Samples.from_strata(np.zeros(1000, dtype=np.int64)), 2, seed).sizes
        smaller.append(sizes.min())
        first_is_larger += int(sizes[0] > sizes[1])
    assert (min(smaller) >= 50) & (max(smaller) <= 500)
    assert np.mean(smaller) == pytest.approx(275, abs=5 * 6.5)
    assert first_is_larger == pytest.approx(200, abs=50)  # five deviations of √400/2 = 10


@given(labels_of_4, st.integers(2, 6), st.integers(2, 4), seeds)
def test_extended_dirichlet_uses_every_sample_once_in_at_most_k_classes(labels, num_clients, k, seed):
    labels = np.concatenate([labels, np.repeat(np.arange(4), 6)])
    csr = ExtendedDirichlet(k, 1.0, min_samples=2)(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(csr, len(labels))  # 2 clients of 2 classes choose all 4
    assert csr.sizes.min() >= 2
    assert ((csr.histogram(labels, 4) > 0).sum(axis=1) <= k).all()


def test_extended_dirichlet_spreads_a_class_in_dirichlet_shares_over_the_clients_that_chose_it():
    # 2 classes, 200 clients, k = 1: each class has m = 100 clients, whose shares are Dir(α·1_m), of the variance
    # (1/m)(1 − 1/m)/(αm + 1): for α = 2 it is 0.0099/201.
    labels = np.repeat([0, 1], 1_000_000)
    held = ExtendedDirichlet(1, 2.0, min_samples=1)(Samples.from_strata(labels), 200, 0).histogram(labels, 2)
    for label in (0, 1):
        shares = held[:, label][held[:, label] > 0] / 1e6
        assert len(shares) == 100
        assert shares.std() == pytest.approx((0.0099 / 201) ** 0.5, rel=0.2)


def test_extended_dirichlet_of_all_classes_is_dirichlet_without_a_cap_by_hand():
    # With k = 2 of 2 classes every client has both: shuffle a class, draw shares, cut by their cumulative sum.
    generator = numpy_generator(7, "partition", "classes", "deal")
    expected = np.zeros((3, 2), dtype=int)
    for label in range(2):
        generator.shuffle(np.arange(50))
        cuts = [int(part) for part in np.cumsum(generator.dirichlet([0.5, 0.5, 0.5])) * 50]
        expected[:, label] = [cuts[0], cuts[1] - cuts[0], 50 - cuts[1]]
    labels = np.arange(100) % 2
    found = ExtendedDirichlet(2, 0.5, min_samples=1)(Samples.from_strata(labels), 3, 7).histogram(labels, 2)
    assert (expected.sum(axis=1) > 0).all()  # the first draw is taken
    assert found.tolist() == expected.tolist()


@given(
    labels_of_4, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1e-3, 0.1, 1.0, 100.0]), seeds
)
def test_inner_dirichlet_gives_each_client_its_size_and_no_sample_twice(labels, sizes, alpha, seed):
    labels = np.concatenate([labels, np.zeros(max(0, sum(sizes) - len(labels)), dtype=np.int64)])
    partition = InnerDirichlet(alpha, sizes)
    csr = partition(Samples.from_strata(labels), len(sizes), seed)
    assert csr.sizes.tolist() == sizes
    assert len(np.unique(csr.indices)) == sum(sizes)
    assert partition.count(lambda: None) == len(sizes)


@given(labels_of_4, st.integers(1, 10), seeds)
def test_inner_dirichlet_takes_all_samples_in_equal_sizes_or_those_of_a_partition(labels, num_clients, seed):
    equal = InnerDirichlet(0.3)(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(equal, len(labels))
    assert equal.sizes.max() - equal.sizes.min() <= 1
    for sizes in (LogNormal(0.3, min_samples=1), SizeLaw("linear") if num_clients < 9 else LogNormal(0.0, 1)):
        csr = InnerDirichlet(0.3, sizes)(Samples.from_strata(labels), num_clients, seed)
        assert_each_once(csr, len(labels))
        assert csr.sizes.tolist() == sizes(Samples.from_strata(labels), num_clients, seed).sizes.tolist()


def test_inner_dirichlet_draws_proportions_of_classes_inside_a_client():
    # A share of Dir(α·1_4) has the variance (1/4)(3/4)/(4α + 1): 0.0625 for α = 1/2. Its 200 samples add the binomial
    # E[π(1 − π)]/200 = (3/16 − 0.0625)/200. No class is exhausted, since only a tenth of the samples is dealt out.
    labels = np.arange(2_000_000) % 4
    shares = InnerDirichlet(0.5, [200] * 1000)(Samples.from_strata(labels), 1000, 0).histogram(labels, 4) / 200
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4, abs=5 * (0.0625 / 1000) ** 0.5)
    assert shares.var() == pytest.approx(0.0625 + (3 / 16 - 0.0625) / 200, rel=0.1)


def test_inner_dirichlet_by_hand_where_a_class_runs_out():
    # One client of 5 takes both samples of class 0 at most, and the rest from class 1, however small α is.
    labels = np.array([0, 1, 0, 1, 1, 1])
    for seed in range(20):
        held = InnerDirichlet(0.01, [5])(Samples.from_strata(labels), 1, seed).histogram(labels, 2)[0].tolist()
        assert held in ([1, 4], [2, 3])
    # Clients that take everything hold everything.
    assert InnerDirichlet(0.01, [4, 2])(Samples.from_strata(labels), 2, 0).histogram(labels, 2).sum(
        axis=0
    ).tolist() == [2, 4]


@pytest.mark.parametrize(
    "partition", [Pathological(2), ExtendedDirichlet(2, 0.5, min_samples=1), InnerDirichlet(0.5, SizeLaw("linear"))]
)
def test_how_many_samples_of_a_class_a_client_holds_does_not_depend_on_the_samples_order(partition: Partition):
    labels = np.arange(400) % 4
    shuffled = np.random.default_rng(0).permutation(labels)
    first, second = (partition(Samples.from_strata(each), 8, 3).histogram(each, 4) for each in (labels, shuffled))
    assert first.tolist() == second.tolist()
    other = partition(Samples.from_strata(labels), 8, 4).histogram(labels, 4)
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("partition", [Pathological(1), ExtendedDirichlet(1, 50.0, min_samples=1), InnerDirichlet()])
def test_100_000_clients_are_cut_in_one_sweep(partition: Partition):
    labels = np.arange(4_000_000) % 10
    csr = partition(Samples.from_strata(labels), 100_000, 0)
    assert len(csr) == 100_000
    assert csr.sizes.min() >= 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Pathological(0), "Pathological.k is 0; it must be at least 1"),
        (lambda: Pathological(2, 0.0), "Pathological.least is 0.0; it must be above 0 and at most 1"),
        (lambda: Pathological(2, 1.5), "Pathological.least is 1.5"),
        (
            lambda: Pathological(3)(Samples.from_strata(np.arange(50) % 2), 2, 0),
            "Pathological.k is 3, and the data have 2",
        ),
        (
            lambda: Pathological(2)(Samples.from_strata(np.arange(10) % 2), 6, 0),
            "class 0 has 5 training samples for the 6 clients that hold it; lower data.num_clients or partition.k, or",
        ),
        (lambda: Pathological(2)(Samples(50), 2, 0), "partition Pathological needs the class"),
        (lambda: InnerDirichlet(0.0), "InnerDirichlet.alpha is 0.0; it must be above 0"),
        (lambda: InnerDirichlet(1.0, [3, 0]), "InnerDirichlet.sizes[1] is 0; it must be at least 1"),
        (
            lambda: InnerDirichlet(1.0, [3, 4])(Samples.from_strata(np.arange(50) % 2), 3, 0),
            "partition.sizes has 2 sizes, and data.num_clients is 3; leave the number of clients out",
        ),
        (
            lambda: InnerDirichlet(1.0, [30, 21])(Samples.from_strata(np.arange(50) % 2), 2, 0),
            "partition.sizes sum to 51, and there are 50 training samples; lower them",
        ),
        (lambda: InnerDirichlet()(Samples(50), 2, 0), "partition InnerDirichlet needs the class"),
        (lambda: ExtendedDirichlet(alpha=0.0), "ExtendedDirichlet.alpha is 0.0"),
        (lambda: ExtendedDirichlet(min_samples=0), "ExtendedDirichlet.min_samples is 0"),
        (
            lambda: ExtendedDirichlet()(Samples.from_strata(np.arange(50) % 2), 10, 0),
            "cannot give 10 clients 10 samples each",
        ),
        (
            lambda: ExtendedDirichlet(1, 0.01, 1, 3)(Samples.from_strata(np.arange(90) % 2), 40, 0),
            "ExtendedDirichlet(k=1, alpha=0.01) gave some of 40 clients fewer than 1 samples in each of 3 draws (best "
            "smallest client: 0); raise partition.alpha or partition.k, raise partition.max_retries, or lower",
        ),
    ],
)
def test_errors_say_what_is_wrong(build: Any, message: str):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
