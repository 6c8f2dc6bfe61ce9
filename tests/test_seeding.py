"""Seeds are a documented function of the run's seed and the purpose."""

from __future__ import annotations

import hashlib
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from lit_fed import Client, Model
from lit_fed.seeding import SECRET, derive_seed, derive_seeds, key_stream, numpy_generator, torch_generator
from tests.support import LeastSquares


@pytest.mark.parametrize("keys", [(), ("cohort", 3), ("train", 0, 17, "data"), ("a'b\"\\", -1)])
def test_seed_is_the_documented_hash(keys: tuple[int | str, ...]) -> None:
    # BLAKE2b, 8 bytes, little-endian, of Python's text of (seed, *keys), shifted into 63 bits.
    digest = hashlib.blake2b(repr((42, *keys)).encode(), digest_size=8).digest()
    assert derive_seed(42, *keys) == sum(byte << (8 * place) for place, byte in enumerate(digest)) // 2


def test_text_that_is_hashed() -> None:
    # Spelt out, so that another Python cannot change the seeds unseen.
    digest = hashlib.blake2b(b"(7, 'train', 2, 5, 'data')", digest_size=8).digest()
    assert derive_seed(7, "train", 2, 5, "data") == int.from_bytes(digest, "little") >> 1


def test_numpy_integers_are_integers() -> None:
    # repr(np.int64(3)) is "np.int64(3)" since NumPy 2.
    assert derive_seed(np.int64(1), "cohort", np.int32(3)) == derive_seed(1, "cohort", 3)  # type: ignore[arg-type]


def test_the_seeds_of_many_clients_are_those_of_each() -> None:
    ids = [0, 3, 3, 10**7]
    alone = [derive_seed(7, "train", 2, client_id, "a'b") for client_id in ids]
    assert derive_seeds(7, "train", 2, ids, "a'b") == alone
    assert derive_seeds(np.int64(7), "train", np.int64(2), np.array(ids), "a'b") == alone  # type: ignore[arg-type]


def test_orders_of_samples_are_equally_likely_and_independent() -> None:
    """Chi-square at 1 in 10,000, with the seeds of 200 clients in 120 rounds: orders, and pairs of neighbours'."""
    places = {order: place for place, order in enumerate(permutations(range(4)))}
    drawn = np.array([
        [
            places[tuple(torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist())]
            for seed in derive_seeds(0, "train", round_idx, range(200), "data")
        ]
        for round_idx in range(120)
    ])  # fmt: skip
    one = np.bincount(drawn.ravel(), minlength=24)
    clients = np.bincount((24 * drawn[:, ::2] + drawn[:, 1::2]).ravel(), minlength=24**2)
    rounds = np.bincount((24 * drawn[::2] + drawn[1::2]).ravel(), minlength=24**2)
    for counts in (one, clients, rounds):
        statistic = ((counts - counts.mean()) ** 2).sum() / counts.mean()
        assert chi2.ppf(1e-4, len(counts) - 1) < statistic < chi2.ppf(1 - 1e-4, len(counts) - 1)


def test_seeds_differ_between_purposes() -> None:
    seeds = [
        derive_seed(seed, stage, round_idx, client_id, purpose)
        for seed, stage, round_idx, client_id, purpose in product(
            range(3), ("train", "personal"), range(10), range(20), ("data", "training")
        )
    ]
    seeds += [derive_seed(0, "cohort", 1), derive_seed(0, "cohort", "1"), derive_seed(0, "cohort1"), derive_seed(0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_start_from_the_seed() -> None:
    seed = derive_seed(3, "purpose", 4)
    expected = np.random.Generator(np.random.PCG64(seed)).random(5)
    np.testing.assert_array_equal(numpy_generator(3, "purpose", 4).random(5), expected)
    drawn = torch.rand(5, generator=torch_generator(3, "purpose", 4))
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(seed)))


def test_a_clients_seeds_name_stage_round_client_and_purpose() -> None:
    client = Client(5, 2, "train", 7, Model(LeastSquares()))
    assert client.derive_seed("dropout") == derive_seed(7, "train", 2, 5, "dropout")
    assert client.generator("data").initial_seed() == derive_seed(7, "train", 2, 5, "data")


def test_a_secret_seed_draws_from_the_key_stream_of_chacha20() -> None:
    seed = SECRET + 5
    key = hashlib.sha256(repr((seed, "cohort", 3)).encode()).digest()
    words = key_stream(key)(100).tolist()
    drawn = numpy_generator(seed, "cohort", 3)
    # As NumPy makes a number from 0 to below 1 of a word of 64 bits: its upper 53 bits.
    assert drawn.random(100).tolist() == [(word >> 11) / 2**53 for word in words]
    assert numpy_generator(seed - 6, "cohort", 3).bit_generator.state["bit_generator"] == "PCG64"


def test_draws_of_a_secret_seed_are_uniform_and_without_repetition() -> None:
    drawn = numpy_generator(SECRET, "cohort", 0)
    assert sorted(drawn.choice(1000, 1000, replace=False).tolist()) == list(range(1000))
    # 100,000 draws below 10: each count is a binomial of mean 10,000 and deviation 95.
    counts = np.bincount(drawn.integers(10, size=100_000), minlength=10)
    assert abs(counts - 10_000).max() < 5 * 95
    # The mean of 1,000 binomials of 200 at .1 is 20, with error √(18 / 1000) = .13.
    assert abs(float(drawn.binomial(200, 0.1, size=1000).mean()) - 20) < 5 * 0.14
