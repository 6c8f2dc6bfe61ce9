"""The rules by hand, against ByzFL, and their properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.robust import (
    NNM,
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBounding,
    RobustRule,
    TrimmedMean,
    rules,
)

ORIGIN = torch.zeros(1, dtype=torch.float64)


def stack(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def aggregate(rule: RobustRule, vectors: Tensor) -> Tensor:
    """The rule's result; centred clipping begins at the origin."""
    return rule.aggregate(vectors, ORIGIN.expand(vectors.shape[1]) if rule.remembers else None)


# ---------------------------------------------------------------------- by hand


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    # 1, 2, 4, 100: (2 + 4) / 2; torch.median would take the lower, 2.
    assert rules.median(stack([1.0], [100.0], [4.0], [2.0])).tolist() == [3.0]
    assert rules.median(stack([1.0], [100.0], [4.0])).tolist() == [4.0]


def test_a_median_does_not_keep_the_vectors_in_memory() -> None:
    for count in (3, 4):
        assert rules.median(torch.zeros(count, 5, dtype=torch.float64)).untyped_storage().nbytes() == 5 * 8


def test_the_trimmed_mean_drops_the_ends_of_every_coordinate() -> None:
    # Without 0 and 100: (1 + 2 + 3) / 3 = 2; without −90 and 5: (1 + 1 + 4) / 3 = 2.
    vectors = stack([0.0, 1.0], [1.0, 5.0], [2.0, -90.0], [3.0, 1.0], [100.0, 4.0])
    assert rules.trimmed_mean(vectors, 1).tolist() == [2.0, 2.0]


def test_the_two_definitions_of_krum_choose_differently() -> None:
    # Five numbers and f = 1. Distances squared to the nearest n − f − 2 = 2 others, and to the nearest 3:
    #   0: 1 + 9           = 10,  + 16 = 26
    #   1: 1 + 4           =  5,  +  9 = 14
    #   3: 1 + 4           =  5,  +  9 = 14   (4 at 1, 1 at 4, 0 at 9)
    #   4: 1 + 9           = 10,  +  9 (7) = 19
    #   7: 9 + 16          = 25,  + 36 = 61
    vectors = stack([0.0], [1.0], [3.0], [4.0], [7.0])
    gram = vectors @ vectors.T
    assert rules.krum_scores(gram, 1).tolist() == [10, 5, 5, 10, 25]
    assert rules.krum_scores(gram, 1, "byzfl").tolist() == [26, 14, 14, 19, 61]
    # 0, 2, 3, 6, 7, f = 1: by two neighbours 0: 4+9, 2: 1+4, 3: 1+9, 6: 1+9, 7: 1+16; the second is chosen. By three
    # neighbours 2: 1+4+16 = 21, 3: 1+9+9 = 19; the third is chosen.
    vectors = stack([0.0], [2.0], [3.0], [6.0], [7.0])
    assert Krum(1).aggregate(vectors).tolist() == [2.0]
    assert Krum(1, "byzfl").aggregate(vectors).tolist() == [3.0]


def test_multi_krum_averages_the_lowest_scores() -> None:
    # Scores of 0, 1, 3, 4, 7 are 10, 5, 5, 10, 25: without the last, 8 / 4; the best two, (1 + 3) / 2.
    vectors = stack([0.0], [1.0], [3.0], [4.0], [7.0])
    assert MultiKrum(1).aggregate(vectors).tolist() == [2.0]
    assert MultiKrum(1, keep=2).aggregate(vectors).tolist() == [2.0]
    assert MultiKrum(1, keep=1).aggregate(vectors).tolist() == [1.0]


def test_the_geometric_median_of_a_cross_is_its_centre() -> None:
    # The sum of distances to (±1, 0) and (0, ±5) is smallest where the diagonals cross.
    found = GeometricMedian().aggregate(stack([1.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [0.0, -5.0]))
    assert torch.allclose(found, torch.zeros(2, dtype=torch.float64), atol=1e-6)


def test_centred_clipping_moves_by_clipped_differences() -> None:
    # From (1, 0) with τ = 2: (3, 0) is 2 away, (1, 8) is cut to (0, 2), (1, 0) stays: ((2, 0) + (0, 2)) / 3.
    vectors, centre = stack([3.0, 0.0], [1.0, 8.0], [1.0, 0.0]), torch.tensor([1.0, 0.0], dtype=torch.float64)
    expected = torch.tensor([1 + 2 / 3, 2 / 3], dtype=torch.float64)
    assert torch.allclose(CentredClipping(2.0).aggregate(vectors, centre), expected, atol=1e-12)


def test_norm_bounding_shortens_what_is_too_long() -> None:
    # (3, 4) has norm 5 and becomes (.6, .8); (0, 1) stays: the mean is (.3, .9).
    found = NormBounding(1.0).aggregate(stack([3.0, 4.0], [0.0, 1.0]))
    assert torch.allclose(found, torch.tensor([0.3, 0.9], dtype=torch.float64), atol=1e-12)


def test_nearest_neighbour_mixing_averages_each_with_its_nearest() -> None:
    # 0, 1, 5 and f = 1: means of two: 0 and 1; 1 and 0; 5 and 1.
    vectors = stack([0.0], [1.0], [5.0])
    assert (rules.nearest_neighbours(vectors @ vectors.T, 1) @ vectors).flatten().tolist() == [0.5, 0.5, 3.0]


def test_buckets_have_everybody_once_and_a_smaller_last_one() -> None:
    mix = rules.buckets(5, 2, torch.Generator().manual_seed(0))
    assert mix.shape == (3, 5)
    assert mix.sum(1).tolist() == [1, 1, 1]
    assert (mix != 0).sum(0).tolist() == [1] * 5
    assert mix.max(1).values.tolist() == [0.5, 0.5, 1.0]
    assert mix.equal(rules.buckets(5, 2, torch.Generator().manual_seed(0)))
    assert not mix.equal(rules.buckets(5, 2, torch.Generator().manual_seed(1)))


# ---------------------------------------------------------------------- against ByzFL


def cases() -> list[Tensor]:
    """Random vectors, and such with three attackers of ten."""
    found = []
    for seed in range(5):
        vectors = torch.from_numpy(np.random.default_rng(seed).standard_normal((10, 30)))
        found.append(vectors)
        far, near, flipped = vectors.clone(), vectors.clone(), vectors.clone()
        far[:3] = 1e6
        near[:3] = vectors[3:].mean(0) - 1.5 * vectors[3:].std(0)
        flipped[:3] = -3 * vectors[3:].mean(0)
        found += [far, near, flipped, 100 + vectors]
    return found


PAIRS: dict[str, tuple[RobustRule, Callable[[Any], Any]]] = {
    "median": (Median(), lambda of: of.Median()),
    "trimmed_mean": (TrimmedMean(3), lambda of: of.TrMean(3)),
    "krum": (Krum(3, "byzfl"), lambda of: of.Krum(3)),
    "multi_krum": (MultiKrum(3, "byzfl"), lambda of: of.MultiKrum(3)),
    "geometric_median": (GeometricMedian(0.1), lambda of: of.GeometricMedian(0.1, 3000)),
    "clipping": (CentredClipping(2.0, 3), lambda of: of.CenteredClipping(None, 3, 2.0)),
    "nnm_median": (Median(NNM(3)), lambda of: lambda x: of.Median()(of.NNM(3)(x))),
    "nnm_krum": (Krum(3, "byzfl", NNM(3)), lambda of: lambda x: of.Krum(3)(of.NNM(3)(x))),
    "nnm_trimmed": (TrimmedMean(3, NNM(3)), lambda of: lambda x: of.TrMean(3)(of.NNM(3)(x))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_byzfl(name: str) -> None:
    byzfl = pytest.importorskip("byzfl")
    rule, make = PAIRS[name]
    iterative = name in ("geometric_median", "clipping")
    for vectors in cases():
        found, expected = aggregate(rule, vectors), torch.as_tensor(make(byzfl)(vectors.clone()))
        assert torch.allclose(found, expected.double(), rtol=1e-6, atol=1e-5 if iterative else 1e-6)


# ---------------------------------------------------------------------- properties

EVERY = {
    "median": Median(),
    "trimmed_mean": TrimmedMean(2),
    "krum": Krum(2),
    "krum_byzfl": Krum(2, "byzfl"),
    "multi_krum": MultiKrum(2),
    "geometric_median": GeometricMedian(),
    "clipping": CentredClipping(1.0, 3),
    "bounding": NormBounding(1.0),
    "nnm_median": Median(NNM(2)),
    "nnm_krum": Krum(2, before=NNM(2)),
    "bucketing": Median(Bucketing(1)),
}
every = pytest.mark.parametrize("name", EVERY)
NOT_EQUIVARIANT = {"clipping", "bounding"}  # they have an origin


def drawn(seed: int, count: int = 9, size: int = 6) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, size)))


def answers(name: str, vectors: Tensor) -> list[Tensor]:
    """All vectors that the rule may answer: several where Krum has equally good ones, of which rounding picks one.

    After NNM that is common: two means of 7 of 9 vectors differ by (x_a - x_b) / 7 where one of their members differs,
    so that different means have the same distances to others.
    """
    if name != "nnm_krum":
        return [aggregate(EVERY[name], vectors)]
    gram = vectors @ vectors.T
    mix = rules.nearest_neighbours(gram, 2)
    scores = rules.krum_scores(mix @ gram @ mix.T, 2)
    near = scores <= scores.min() + 1e-9 * (1 + gram.diagonal().max())
    return list((mix @ vectors)[near])


def is_one_of(found: Tensor, expected: list[Tensor], tolerance: float) -> bool:
    return any(torch.allclose(found, one, atol=tolerance) for one in expected)


@every
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.permutations(range(9)))
def test_the_order_of_clients_does_not_matter(name: str, seed: int, order: list[int]) -> None:
    vectors = drawn(seed)
    assert is_one_of(aggregate(EVERY[name], vectors[order]), answers(name, vectors), 1e-8)


@pytest.mark.parametrize("name", sorted(EVERY.keys() - NOT_EQUIVARIANT))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), shift=st.floats(-100, 100))
def test_a_shift_of_all_shifts_the_result(name: str, seed: int, shift: float) -> None:
    vectors = drawn(seed)
    expected = [one + shift for one in answers(name, vectors)]
    assert is_one_of(aggregate(EVERY[name], vectors + shift), expected, 1e-6)


def scaled(name: str, factor: float) -> RobustRule:
    """A rule of `EVERY` with its lengths in another unit."""
    made = {
        "geometric_median": lambda: GeometricMedian(1e-6 * factor),
        "clipping": lambda: CentredClipping(1.0 * factor, 3),
        "bounding": lambda: NormBounding(1.0 * factor),
    }
    return made[name]() if name in made else EVERY[name]


@every
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), power=st.integers(-400, 1000))
def test_a_unit_that_is_a_power_of_two_changes_no_bit(name: str, seed: int, power: int) -> None:
    # 2^1000 is 1e301: without a unit of their own the vectors' squares overflow from 1e155 on.
    vectors, factor = drawn(seed), 2.0**power
    assert torch.equal(aggregate(scaled(name, factor), vectors * factor), aggregate(EVERY[name], vectors) * factor)


@every
def test_attackers_cannot_choose_the_unit_of_honest_vectors(name: str) -> None:
    vectors = drawn(3)
    expected = aggregate(EVERY[name], torch.cat([vectors[:7], torch.full((2, 6), 1e100, dtype=torch.float64)]))
    for value in (1e155, 1e200, 1.7e308):
        found = aggregate(EVERY[name], torch.cat([vectors[:7], torch.full((2, 6), value, dtype=torch.float64)]))
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@every
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), power=st.integers(0, 308), apart=st.booleans())
def test_two_attackers_at_infinity_move_the_result_little(name: str, seed: int, power: int, apart: bool) -> None:
    vectors = drawn(seed)
    vectors[:2] = 10.0**power
    if apart:
        vectors[0] *= -1
    honest = vectors[2:]
    # Every rule here stays within the honest vectors' reach: of their coordinates or, for combinations, their radius.
    radius = float((honest - honest.mean(0)).norm(dim=1).max())
    assert float((aggregate(EVERY[name], vectors) - honest.mean(0)).norm()) <= 4 * radius


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_without_attackers_the_averaging_rules_are_the_mean(seed: int) -> None:
    vectors = drawn(seed)
    for rule in (
        TrimmedMean(0), MultiKrum(0), MultiKrum(0, "byzfl"), CentredClipping(1e6), NormBounding(1e6),
        TrimmedMean(0, NNM(0)), TrimmedMean(0, Bucketing(3)),
    ):  # fmt: skip
        assert torch.allclose(aggregate(rule, vectors), vectors.mean(0), atol=1e-12)
    assert torch.allclose(GeometricMedian().aggregate(vectors[:1]), vectors[0])
