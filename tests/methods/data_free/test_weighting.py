"""Inverse-probability weights, against arithmetic and by enumeration."""

import math
from itertools import combinations

import pytest
import torch

from lit_fed.methods.data_free.weighting import (
    divergences_from_mean,
    effective_size,
    entropy,
    inverse_probability_weights,
    label_prior,
    label_shares,
    mixture,
    normalised,
    sample_gate,
)

SETTINGS = [(0.0, 0.0), (1.0, 1.0), (0.5, 2.0), (2.0, 0.0)]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_formula_by_hand() -> None:
    # T = 4: π = ½, ⅛ → ¼. a = 1, b = 2: 2·(1 + 2·0.5) = 4 and 4·(1 + 0) = 4; a = 2, b = 0: 4 and 16.
    probabilities, divergences = tensor(0.5, 0.125), tensor(0.5, 0.0)
    assert inverse_probability_weights(probabilities, divergences, 4, 1.0, 2.0).tolist() == [4.0, 4.0]
    assert inverse_probability_weights(probabilities, divergences, 4, 2.0, 0.0).tolist() == [4.0, 16.0]


@pytest.mark.parametrize(("exponent", "weight"), SETTINGS)
def test_weights_sum_to_1_and_are_uniform_where_participation_and_divergence_are_equal(
    exponent: float, weight: float
) -> None:
    same = normalised(inverse_probability_weights(tensor(*[0.3] * 5), tensor(*[0.7] * 5), 20, exponent, weight))
    torch.testing.assert_close(same, tensor(*[0.2] * 5), rtol=1e-15, atol=0)
    other = normalised(inverse_probability_weights(tensor(0.1, 0.9), tensor(0.0, 1.0), 20, exponent, weight))
    assert float(other.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_client_seen_half_as_often_weighs_two_to_the_exponent_times_as_much(exponent: float) -> None:
    weights = normalised(inverse_probability_weights(tensor(0.5, 0.25), tensor(0.3, 0.3), 100, exponent))
    assert float(weights[1] / weights[0]) == pytest.approx(2**exponent, rel=1e-14)


def test_nobody_weighs_more_than_the_rounds_allow() -> None:
    assert inverse_probability_weights(tensor(1e-9, 1.0), tensor(0.0, 0.0), 8).tolist() == [8.0, 1.0]


@pytest.mark.parametrize("skewed", [False, True])
def test_the_mean_before_clipping_and_normalising_is_unbiased_over_all_cohorts(skewed: bool) -> None:
    # Two of five clients; every cohort's probability p(S) is given, π_i = Σ_{S ∋ i} p(S).
    values = tensor(3.0, -1.0, 4.0, 1.0, -5.0)
    cohorts = list(combinations(range(5), 2))
    chances = tensor(*[(one + 1) * (other + 1) if skewed else 1 for one, other in cohorts])
    chances /= chances.sum()
    inclusion = torch.zeros(5, dtype=torch.float64)
    for cohort, chance in zip(cohorts, chances, strict=True):
        inclusion[list(cohort)] += chance
    expected, plain = 0.0, 0.0
    for cohort, chance in zip(cohorts, chances, strict=True):
        own = list(cohort)
        weights = inverse_probability_weights(inclusion[own], torch.zeros(2), 10**9, 1.0, 0.0)
        expected += float(chance * (weights * values[own]).sum() / 5)
        plain += float(chance * values[own].mean())
    assert expected == pytest.approx(float(values.mean()), abs=1e-14)
    assert (plain == pytest.approx(float(values.mean()))) is not skewed  # a plain mean is, where all are as likely


def test_effective_size_and_entropy() -> None:
    # (½, ¼, ¼): 1/(¼ + 1/16 + 1/16) = 8/3; entropy ½ ln 2 + 2·¼·ln 4 = 1.5 ln 2
    weights = tensor(0.5, 0.25, 0.25)
    assert effective_size(weights) == pytest.approx(8 / 3)
    assert entropy(weights) == pytest.approx(1.5 * math.log(2))
    assert effective_size(tensor(*[0.25] * 4)) == 4
    assert entropy(tensor(1.0, 0.0)) == 0


def test_the_gate() -> None:
    # θ = ½ is half open; λ = 10 at u = 0.6: 1/(1 + e⁻¹)
    assert sample_gate(torch.tensor([0.5, 0.6]), 10.0, 0.5).tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1))])
    assert sample_gate(torch.tensor([0.1, 0.9]), 0.0, 0.5).tolist() == [0.5, 0.5]


def test_divergences_by_hand() -> None:
    # One sample: p = (1, 0) and (½, ½), mean (¾, ¼). KL: ln 4/3; ½ ln(2/3) + ½ ln 2 = ½ ln 4/3.
    found = divergences_from_mean(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]], dtype=torch.float64))
    assert found.tolist() == pytest.approx([math.log(4 / 3), math.log(4 / 3) / 2])
    same = divergences_from_mean(torch.tensor([[[0.2, 0.8]]] * 3, dtype=torch.float64))
    assert same.tolist() == pytest.approx([0, 0, 0], abs=1e-15)
    sure = divergences_from_mean(torch.eye(3, dtype=torch.float64).unsqueeze(1))  # the largest there are
    assert sure.tolist() == pytest.approx([math.log(3)] * 3)


def test_labels_by_hand() -> None:
    # w = (1, 3), counts (4, 0, 0) and (1, 1, 0): weighed (4, 0, 0) and (3, 3, 0); prior (0.7, 0.3, 0)
    weights, counts = tensor(1.0, 3.0), torch.tensor([[4, 0, 0], [1, 1, 0]])
    assert label_prior(weights, counts).tolist() == pytest.approx([0.7, 0.3, 0])
    shares = label_shares(weights, counts)
    assert shares[0].tolist() == pytest.approx([4 / 7, 0, 0])
    assert shares[1].tolist() == pytest.approx([3 / 7, 1, 0])


def test_the_mixture_by_hand() -> None:
    # (¾, ¼) with share ¼ and (½, ½) with share ¾: (0.5625, 0.4375)
    logits = torch.tensor([[[math.log(3), 0.0]], [[0.0, 0.0]]])
    assert mixture(logits, torch.tensor([[0.25], [0.75]]))[0].tolist() == pytest.approx([0.5625, 0.4375])
