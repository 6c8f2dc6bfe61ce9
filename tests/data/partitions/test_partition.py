"""Partitions: every sample once, the published splits, and errors that say what to change."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lit_fed.data.partitions.csr import _GOLDEN, CSR, _mixed, sha256_of
from lit_fed.data.partitions.label_skew import ClassesPerClient, Dirichlet, Shards
from lit_fed.data.partitions.partition import (
    IID,
    Grouped,
    MatchedTestSplit,
    Natural,
    Partition,
    Quantity,
    Samples,
    SizeLaw,
)
from lit_fed.errors import ConfigError

labels_of_4 = hnp.arrays(np.int64, st.integers(40, 200), elements=st.integers(0, 3))
seeds = st.integers(0, 2**31)


def assert_each_once(csr: CSR, num_samples: int) -> None:
    assert sorted(csr.indices.tolist()) == list(range(num_samples))
    assert csr.offsets[0] == 0
    assert csr.offsets[-1] == num_samples


@given(labels_of_4, st.integers(1, 20), seeds)
def test_iid_uses_every_sample_once_in_equal_parts(labels, num_clients, seed):
    csr = IID()(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(csr, len(labels))
    assert csr.sizes.max() - csr.sizes.min() <= 1


@given(labels_of_4, st.integers(1, 3), seeds)
def test_dirichlet_uses_every_sample_once(labels, num_clients, seed):
    csr = Dirichlet(alpha=1.0, min_samples=1)(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(csr, len(labels))
    assert csr.sizes.min() >= 1


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), seeds)
def test_shards_use_every_sample_once_and_each_client_holds_its_shards(num_clients_over_4, s, extra, seed):
    num_clients, num_classes = 4 * num_clients_over_4, 4
    shards_per_class = s * num_clients // num_classes
    labels = np.repeat(np.arange(num_classes), 3 * shards_per_class + extra)
    partition = Shards(s)
    csr = partition(Samples.from_strata(labels), num_clients, seed)
    assert_each_once(csr, len(labels))
    assert (np.count_nonzero(csr.histogram(labels, num_classes), axis=1) <= s).all()
    test_labels = np.repeat(np.arange(num_classes), 2 * shards_per_class)
    test = partition.split_test(csr, Samples.from_strata(labels), Samples.from_strata(test_labels), seed)
    assert_each_once(test, len(test_labels))
    # The same class rows: 3 training samples (and a little) against 2 test samples a shard.
    if extra == 0:
        np.testing.assert_array_equal(csr.histogram(labels, 4) * 2, test.histogram(test_labels, 4) * 3)


def test_a_shard_is_a_contiguous_chunk_of_its_class():
    labels = np.arange(400) % 4  # class c holds c, c + 4, c + 8, …
    csr = Shards(2)(Samples.from_strata(labels), 20, seed=3)  # 2·20/4 = 10 shards of 100/10 = 10 samples a class
    for client_id in range(20):
        for label in range(4):
            positions = np.flatnonzero(labels[csr[client_id]] == label)
            ranks = np.sort(csr[client_id][positions] // 4)
            assert len(ranks) in (0, 10, 20)
            for first in range(0, len(ranks), 10):
                assert ranks[first] % 10 == 0
                np.testing.assert_array_equal(ranks[first : first + 10], np.arange(ranks[first], ranks[first] + 10))


@given(labels_of_4, st.integers(1, 12), st.integers(1, 4), seeds)
def test_classes_per_client_uses_samples_at_most_once_and_k_classes(labels, num_clients, k, seed):
    labels = np.concatenate([labels, np.repeat(np.arange(4), 12)])  # enough of every class for 12 clients
    csr = ClassesPerClient(k)(Samples.from_strata(labels), num_clients, seed)
    assert len(np.unique(csr.indices)) == len(csr.indices)
    held = csr.histogram(labels, 4) > 0
    assert (held.sum(axis=1) == k).all()
    assert held.sum(axis=0).max() - held.sum(axis=0).min() <= 1
    # Every sample of a class that somebody holds is used.
    np.testing.assert_array_equal(csr.histogram(labels, 4).sum(0), np.bincount(labels, minlength=4) * held.any(axis=0))


def test_classes_per_client_with_independent_draws_may_share_samples():
    labels = np.repeat(np.arange(4), 50)
    csr = ClassesPerClient(k=3, samples_per_client=100)(Samples.from_strata(labels), 20, seed=0)  # 20·100 > 200
    assert (csr.sizes == 100).all()
    for client_id in range(20):
        assert len(np.unique(csr[client_id])) == 100
        # 100 over 3 classes: 34, 33, 33
        assert sorted(np.bincount(labels[csr[client_id]], minlength=4)) == [0, 33, 33, 34]


def test_natural_follows_the_ids():
    ids = np.array([2, 0, 1, 0, 2, 2])
    csr = Natural()(Samples(6, clients=ids), 3, 0)
    assert [csr[k].tolist() for k in range(3)] == [[1, 3], [2], [0, 4, 5]]
    test = Natural().split_test(csr, Samples(6, clients=ids), Samples(3, clients=np.array([1, 1, 7])), 0)
    assert [test[k].tolist() for k in range(3)] == [[], [0, 1], []]


def test_groups_hold_what_their_owners_hold():
    # Owners 0 and 1 make client 0, 2 and 3 client 1, 4 alone client 2.
    ids = np.array([2, 0, 4, 1, 3, 2])
    csr = Grouped(2)(Samples(6, clients=ids), 3, 0)
    assert [csr[k].tolist() for k in range(3)] == [[1, 3], [0, 4, 5], [2]]
    test = Grouped(2).split_test(csr, Samples(6, clients=ids), Samples(4, clients=np.array([3, -1, 4, 5])), 0)
    assert [test[k].tolist() for k in range(3)] == [[], [0], [2, 3]]
    assert [Grouped(size).count(lambda: 5) for size in (1, 2, 3, 5, 9)] == [5, 3, 2, 1, 1]
    assert Grouped(2).count(lambda: None) is None


@given(hnp.arrays(np.int64, st.integers(1, 100), elements=st.integers(0, 9)), st.integers(1, 12), seeds)
def test_groups_use_every_sample_once_and_divide_no_owner(ids, owners, seed):
    ids = np.unique(ids, return_inverse=True)[1]
    samples, partition = Samples(len(ids), clients=ids), Grouped(owners)
    num_clients = partition.count(lambda: 1 + int(ids.max()))
    csr = partition(samples, num_clients, seed)
    assert_each_once(csr, len(ids))
    held = [set(ids[csr[k]].tolist()) for k in range(num_clients)]
    assert sum(map(len, held)) == 1 + ids.max()  # none twice
    assert all(len(own) == owners for own in held[:-1])
    if owners == 1:
        assert csr.indices.tolist() == Natural()(samples, num_clients, seed).indices.tolist()


@pytest.mark.parametrize(
    ("num_classes", "alpha", "sizes", "smallest", "largest", "std", "tries"),
    [  # The splits that the authors of FedDr+ ship, computed independently of this package.
        pytest.param(10, 0.05, [187, 121, 814, 638, 460, 1144], 10, 2046, 435.9, 6446, marks=pytest.mark.long),
        (10, 0.1, [573, 489, 700, 471, 968, 743], 14, 1595, 364.6, 13),
        (10, 0.3, [828, 584, 332, 628, 286, 413], 133, 1083, 194.8, 1),
        (100, 0.05, [519, 306, 426, 547, 506, 430], 130, 768, 104.6, 1),
        (100, 0.1, [500, 507, 455, 516, 519, 480], 232, 655, 80.5, 1),
    ],
)
def test_dirichlet_gives_the_published_splits(num_classes, alpha, sizes, smallest, largest, std, tries):
    labels = np.repeat(np.arange(num_classes), 50000 // num_classes)
    csr = (Dirichlet(alpha) if tries > 1000 else Dirichlet(alpha, max_retries=tries))(
        Samples.from_strata(labels), 100, seed=0
    )
    assert csr.sizes[:6].tolist() == sizes
    assert (csr.sizes.min(), csr.sizes.max()) == (smallest, largest)
    assert csr.sizes.std() == pytest.approx(std, abs=0.05)
    assert_each_once(csr, 50000)
    if 1 < tries <= 1000:
        with pytest.raises(ConfigError, match=r"raise partition\.alpha"):
            Dirichlet(alpha, max_retries=tries - 1)(Samples.from_strata(labels), 100, seed=0)


@given(labels_of_4, seeds)
def test_matched_test_split_takes_the_smaller_count_of_each_class(labels, seed):
    test_labels = np.repeat(np.arange(4), [3, 0, 50, 10])
    csr = Dirichlet(0.5, min_samples=1)(Samples.from_strata(labels), 3, seed)
    split = Dirichlet(0.5).split_test(csr, Samples.from_strata(labels), Samples.from_strata(test_labels), seed)
    for client_id in range(3):
        held = np.bincount(labels[csr[client_id]], minlength=4)
        expected = np.minimum(held, [3, 0, 50, 10])
        np.testing.assert_array_equal(np.bincount(test_labels[split[client_id]], minlength=4), expected)
        assert len(np.unique(split[client_id])) == len(split[client_id])
        np.testing.assert_array_equal(split[client_id], split[client_id])


def test_iid_test_parts_are_disjoint_and_equal():
    split = IID().split_test(IID()(Samples(100), 10, 0), Samples(100), Samples(50), 0)
    assert_each_once(split, 50)
    assert (split.sizes == 5).all()


@given(st.integers(20, 300), st.integers(1, 6), st.floats(0.3, 50.0), seeds)
def test_quantity_uses_every_sample_once_in_unequal_parts(num_samples, num_clients, alpha, seed):
    csr = Quantity(alpha, min_samples=2)(Samples(num_samples), num_clients, seed)
    assert_each_once(csr, num_samples)
    assert csr.sizes.min() >= 2


def test_quantity_gives_dirichlet_shares_of_the_samples():
    # Shares of Dir(α·1_N) have the variance (1/N)(1 − 1/N)/(αN + 1): for N = 100 and α = 2 it is 0.0099/201.
    sizes = Quantity(2.0, min_samples=1)(Samples(1_000_000), 100, 0).sizes
    assert sizes.std() / 1e6 == pytest.approx((0.0099 / 201) ** 0.5, rel=0.2)


@given(st.integers(60, 400), st.integers(1, 5), st.sampled_from(["linear", "square", "exponential"]), seeds)
def test_a_size_law_uses_every_sample_once_in_sizes_that_no_seed_changes(num_samples, num_clients, law, seed):
    # The least share of 60 samples: 1/55 for the squares of 1 … 5, and 1/(1 + e + e² + e³) = 1/31 for 4 exponentials.
    num_clients = min(num_clients, 4) if law == "exponential" else num_clients
    csr = SizeLaw(law)(Samples(num_samples), num_clients, seed)
    assert_each_once(csr, num_samples)
    assert csr.sizes.min() >= 1
    assert (np.diff(csr.sizes) >= 0).all()
    assert csr.sizes.tolist() == SizeLaw(law)(Samples(num_samples), num_clients, seed + 1).sizes.tolist()


def test_sizes_follow_their_law():
    # 1 + 2 + 3 + 4 = 10 parts of 100; 1 + 4 + 9 + 16 = 30 parts of 95: 3.2, 12.7, 28.5, 50.7, and the remainder 2 last.
    assert SizeLaw()(Samples(100), 4, 0).sizes.tolist() == [10, 20, 30, 40]
    assert SizeLaw("square")(Samples(95), 4, 0).sizes.tolist() == [3, 12, 28, 52]
    # 1 : e : e² are 9.003 %, 24.473 %, 66.524 %; so 90.03, 244.73, 665.24 of 1,000, and the remainder 1 last.
    assert SizeLaw("exponential")(Samples(1000), 3, 0).sizes.tolist() == [90, 244, 666]


@given(st.integers(20, 200), st.integers(1, 20), seeds)
def test_samples_without_strata_are_cut_by_their_number_or_their_clients(num_samples, num_clients, seed):
    own = np.arange(num_samples) % num_clients
    for partition in (IID(), Natural(), Quantity(50.0, min_samples=1)):
        samples = Samples(num_samples, clients=own)
        csr = partition(samples, num_clients, seed)
        assert_each_once(csr, num_samples)
        test = partition.split_test(csr, samples, Samples(30), seed)
        parts = [test[k] for k in range(num_clients)]
        assert all(len(np.unique(part)) == len(part) and ((part >= 0) & (part < 30)).all() for part in parts)
        if not isinstance(partition, IID):  # as many test samples as training samples, as far as there are any
            assert [len(part) for part in parts] == np.minimum(csr.sizes, 30).tolist()


@given(labels_of_4, st.integers(1, 20), seeds)
def test_iid_does_not_look_at_strata(labels, num_clients, seed):
    first, second = (
        IID()(samples, num_clients, seed) for samples in (Samples.from_strata(labels), Samples(len(labels)))
    )
    np.testing.assert_array_equal(first.indices, second.indices)


@pytest.mark.parametrize(
    "partition", [IID(), Shards(2), Dirichlet(1.0, min_samples=1), ClassesPerClient(2), Quantity()]
)
def test_a_partition_is_a_function_of_the_seed(partition: Partition):
    labels = Samples.from_strata(np.arange(800) % 4)
    np.random.seed(1)  # noqa: NPY002 - the global state must not matter
    first = partition(labels, 8, seed=5)
    np.random.seed(2)  # noqa: NPY002
    again, other = partition(labels, 8, seed=5), partition(labels, 8, seed=6)
    arrays = (first.indices, first.offsets)
    assert sha256_of(arrays) == sha256_of((again.indices, again.offsets))
    assert sha256_of(arrays) != sha256_of((other.indices, other.offsets))


@given(labels_of_4, st.integers(1, 30), seeds)
def test_hold_out_keeps_every_sample_once(labels, num_clients, seed):
    csr = IID()(Samples.from_strata(labels), num_clients, seed)
    first, second, rest = csr.hold_out((0.2, 0.5), seed)
    assert sorted([*first.indices, *second.indices, *rest.indices]) == list(range(len(labels)))
    for client_id in range(num_clients):
        n = csr.size(client_id)
        assert first.size(client_id) == n // 5
        assert second.size(client_id) == n // 2
        parts = [set(part[client_id].tolist()) for part in (first, second, rest)]
        assert set.union(*parts) == set(csr[client_id].tolist())


def test_a_sample_more_of_one_client_leaves_the_hold_out_of_the_others_as_it_was():
    sizes = np.array([7, 30, 12, 1, 25])
    before = CSR.from_sizes(np.arange(75), sizes).hold_out((0.2, 0.5), 3)
    after = CSR.from_sizes(np.arange(-1, 75), sizes + np.array([1, 0, 0, 0, 0])).hold_out((0.2, 0.5), 3)
    for old, new in zip(before, after, strict=True):
        for client_id in range(1, 5):
            assert old[client_id].tolist() == new[client_id].tolist()
    gone = CSR.from_sizes(np.arange(7, 75), sizes * np.array([0, 1, 1, 1, 1])).hold_out((0.2, 0.5), 3)
    assert all(old[1].tolist() == new[1].tolist() for old, new in zip(before, gone, strict=True))


def test_a_hold_out_takes_every_sample_equally_often():
    # Of 20,000 clients with ten samples each, a sample's count is binomial: 4,000 ± 57, and five deviations are 283.
    (held, _) = CSR.from_sizes(np.arange(200_000), np.full(20_000, 10)).hold_out((0.2,), 1)
    counts = np.bincount(held.indices % 10)
    assert abs(counts - 4_000).max() < 283
    # A pair is held out in 2/10 · 1/9 of the clients: 444 ± 21.
    pairs = held.indices.reshape(-1, 2) % 10
    assert abs(np.unique(pairs, axis=0, return_counts=True)[1] - 20_000 / 45).max() < 110


def test_splitmix_is_the_published_generator():
    # The first outputs for the seed 1234567, as Vigna's splitmix64.c prints them.
    states = np.uint64(1234567) + _GOLDEN * np.arange(1, 4, dtype=np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert _mixed(states).tolist() == published


@pytest.mark.parametrize(
    "partition",
    [IID(), Dirichlet(100.0, min_samples=1), Shards(1), ClassesPerClient(1), Quantity(100.0, min_samples=1)],
)
def test_100_000_clients_keep_no_object_each(partition: Partition):
    labels = np.arange(400_000) % 10
    if isinstance(partition, Dirichlet | Quantity):
        labels = np.arange(4_000_000) % 10
    samples = Samples.from_strata(labels)
    samples = Samples.from_strata(labels)
    samples = Samples.from_strata(labels)
    samples = Samples.from_strata(labels)
    gc.collect()
    before = len(gc.get_objects())
    csr = partition(samples, 100_000, 0)
    split = partition.split_test(csr, samples, Samples.from_strata(np.arange(1000) % 10), 0)
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    assert len(csr) == len(split) == 100_000
    assert csr[99_999].base is csr.indices  # a view


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dirichlet(alpha=0.0), "Dirichlet.alpha is 0.0"),
        (lambda: Dirichlet(alpha=float("nan")), "Dirichlet.alpha is nan"),
        (lambda: Dirichlet(min_samples=0), "min_samples is 0"),
        (lambda: Dirichlet(max_retries=0), "max_retries is 0"),
        (lambda: Shards(0), "shards_per_client is 0"),
        (lambda: ClassesPerClient(0), "ClassesPerClient.k is 0"),
        (lambda: ClassesPerClient(3, samples_per_client=2), "at least 3 (k)"),
        (lambda: IID()(Samples(5), 6, 0), "5 training samples cannot be shared among 6 clients"),
        (lambda: IID()(Samples(5), 0, 0), "num_clients is 0"),
        (lambda: IID()(Samples.from_strata(np.array([0, -2, 1])), 1, 0), "label -2 of sample 1"),
        (
            lambda: Shards(2)(Samples.from_strata(np.arange(30) % 3), 4, 0),
            "is 2 × 4; it must be a multiple of 3, the number of classes",
        ),
        (lambda: Shards(2)(Samples.from_strata(np.arange(10) % 2), 8, 0), "class 0 has 5 training samples"),
        (lambda: Dirichlet(0.5)(Samples.from_strata(np.arange(50) % 2), 10, 0), "cannot give 10 clients 10 samples"),
        (lambda: Dirichlet(0.5)(Samples.from_strata(np.arange(500) % 2), 2, -1), "seed is -1"),
        (lambda: ClassesPerClient(3)(Samples.from_strata(np.arange(50) % 2), 2, 0), "the data have 2 classes"),
        (
            lambda: ClassesPerClient(2)(Samples.from_strata(np.arange(10) % 2), 6, 0),
            "class 0 has 5 training samples for the 6",
        ),
        (lambda: ClassesPerClient(2, 20)(Samples.from_strata(np.arange(10) % 2), 2, 0), "a client draws 10"),
        (
            lambda: Dirichlet()(Samples(50, source="a.npz"), 2, 0),
            "Dirichlet needs the class (or another stratum) of each",
        ),
        (lambda: Shards()(Samples(50, source="a.npz"), 2, 0), "which a.npz does not tell; choose IID, Quantity or"),
        (lambda: ClassesPerClient()(Samples(50), 2, 0), "partition ClassesPerClient needs the class"),
        (lambda: Quantity(alpha=-1.0), "Quantity.alpha is -1.0"),
        (lambda: Quantity()(Samples(50), 10, 0), "Quantity cannot give 10 clients 10 samples each from 50"),
        (lambda: Quantity(0.01, 1, 3)(Samples(50), 40, 0), "Quantity(alpha=0.01) gave some of 40 clients fewer than 1"),
        (lambda: SizeLaw("cubic"), "SizeLaw.law is 'cubic'; it must be 'linear', 'square' or 'exponential'"),
        (
            lambda: SizeLaw("square")(Samples(50), 40, 0),
            "SizeLaw(law='square') gives client 0 of 40 none of the 50 training samples; lower data.num_clients or",
        ),
        (lambda: Natural()(Samples(5), 2, 0), "names the client of each sample"),
        (lambda: Natural()(Samples(3, clients=np.array([0, 0, 2])), 3, 0), "client 1 of 3 has no training samples"),
        (lambda: Grouped(0), "Grouped.owners is 0; it must be at least 1"),
        (lambda: Grouped()(Samples(5), 2, 0), "partition Grouped needs a data set that names the client of each"),
        (
            lambda: Grouped()(Samples(3, clients=np.array([0, 1, 1])), 2, 0),
            "client 1 of 2 has no training samples under partition Grouped, as the data set has 1 clients",
        ),
        (lambda: IID()(Samples(5), 2, 0)[2], "client 2 does not exist"),
        (lambda: IID()(Samples(5), 2, 0)[-1], "client -1 does not exist"),
    ],
)
def test_errors_say_what_is_wrong(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=20)
@given(seeds)
def test_matched_split_of_one_client_does_not_depend_on_the_others(seed):
    labels, test_labels = np.arange(40) % 4, np.arange(40) % 4
    csr = IID()(Samples.from_strata(labels), 4, seed)
    forwards = MatchedTestSplit(csr, labels, test_labels, seed)
    backwards = MatchedTestSplit(csr, labels, test_labels, seed)
    first = [forwards[k].tolist() for k in range(4)]
    assert first == [backwards[k].tolist() for k in reversed(range(4))][::-1]


def test_dirichlet_without_the_cap_is_the_plain_class_wise_form() -> None:
    # The formulas as they stand: shuffle a class, draw shares, cut by their cumulative sum.
    labels = np.repeat(np.arange(3), 40)
    random = np.random.RandomState(5)
    expected = np.zeros(4, dtype=int)
    for _ in range(3):
        random.shuffle(np.arange(40))
        cuts = (np.cumsum(random.dirichlet(np.full(4, 0.5))) * 40).astype(int)[:-1]
        expected += np.diff(cuts, prepend=0, append=40)
    found = Dirichlet(0.5, min_samples=1, cap=False)(Samples.from_strata(labels), 4, 5)
    assert found.sizes.tolist() == expected.tolist()
    assert expected.max() > 120 / 4


class ByHand(Partition):
    """Gives clients the lists that it is made with."""

    def __init__(self, lists):
        self.lists = lists

    def assign(self, samples, num_clients, seed):
        return self.lists


def test_a_partition_may_return_a_list_of_positions_for_each_client():
    csr = ByHand([[2, 0], np.array([1], dtype=np.int32), range(3, 5)])(Samples(6), 3, 0)
    assert [csr[client_id].tolist() for client_id in range(3)] == [[2, 0], [1], [3, 4]]
    assert csr.indices.dtype == np.int64


@pytest.mark.parametrize(
    ("lists", "line"),
    [
        ([[0], [1]], "makes 2 lists for 3 clients; it must make one each"),
        ([[0], [], [1]], r"gives client 1 \[\]; it must give one position or more, 0 to 5"),
        ([[0], [1], [6]], r"gives client 2 \[6\]; it must give one position or more, 0 to 5"),
        ([[0], [-1], [1]], r"gives client 1 \[-1\]"),
        ([[0], [1.5], [1]], r"gives client 1 \[1.5\]"),
        ([[0], [1], [2, 0]], "assigns sample 0 twice; assign it once"),
    ],
)
def test_lists_that_are_no_partition_are_refused(lists, line):
    with pytest.raises(ConfigError, match=f"partition ByHand {line}"):
        ByHand(lists)(Samples(6), 3, 0)
