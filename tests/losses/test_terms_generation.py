"""What a generator learns, against arithmetic."""

import math

import pytest
import torch

from lit_fed.losses import disagreement, diversity, ensemble_cross_entropy, gated_cross_entropy


def test_each_classifier_counts_by_its_share_of_the_class() -> None:
    # Two classifiers, samples of classes 0 and 1, two classes. Logits (ln 3, 0) give (¾, ¼), (0, 0) gives (½, ½).
    #   sample 0: −ln ¾ with share 1, −ln ½ with share 0; sample 1: −ln ¼ with share ¼, −ln ½ with share ¾
    #   mean: ½·(0.287682 + ¼·1.386294 + ¾·0.693147) = 0.577058
    logits = torch.tensor([[[math.log(3), 0.0]] * 2, [[0.0, 0.0]] * 2])
    shares = torch.tensor([[1.0, 0.25], [0.0, 0.75]])
    found = ensemble_cross_entropy(logits, torch.tensor([0, 1]), shares)
    assert found.item() == pytest.approx(0.5 * (-math.log(0.75) - 0.25 * math.log(0.25) - 0.75 * math.log(0.5)))
    assert found.item() == pytest.approx(0.577058, abs=1e-6)


def test_diversity_by_hand() -> None:
    # ε = (0, 0), (1, 1): mean squares 0 and 1; G = (0, 0), (1, 3): mean absolute differences 0 and 2.
    # Four pairs, two of them of different samples: exp(−(0 + 2 + 2 + 0)/4) = e⁻¹.
    noise, samples = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert diversity(noise, samples).item() == pytest.approx(math.exp(-1))
    assert diversity(noise, torch.ones(2, 1, 3, 3)).item() == 1.0


def test_disagreement_counts_only_samples_that_are_classed_differently() -> None:
    # Teacher (¾, ¼). Student (¼, ¾): KL = ¾ ln 3 − ¼ ln 3 = ½ ln 3; student (0.6, 0.4) takes the same class: 0.
    # Mean: −¼ ln 3.
    teacher = torch.tensor([[math.log(3), 0.0]] * 2)
    student = torch.tensor([[0.0, math.log(3)], [math.log(1.5), 0.0]])
    assert disagreement(teacher, student).item() == pytest.approx(-math.log(3) / 4)


def test_gated_cross_entropy_by_hand() -> None:
    # f gives (½, ½): CE of any target is ln 2; gates 1 and ¼: ln 2·1.25/2.
    found = gated_cross_entropy(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1.0, 0.25]))
    assert found.item() == pytest.approx(math.log(2) * 0.625)
