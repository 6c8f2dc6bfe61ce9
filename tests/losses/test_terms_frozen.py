"""Losses of frozen classifiers against arithmetic, and against their equations written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lit_fed.losses import balanced_softmax, dot_regression, feature_distillation
from lit_fed.networks import CosineHead, simplex_etf


def test_dot_regression_by_hand():
    # Cosines with the own class 0.6 and −0.2: ½·(0.4² + 1.2²)/2 = 0.4.
    cosines = torch.tensor([[0.6, 0.9, -1.0], [0.3, 0.1, -0.2]])
    assert float(dot_regression(cosines, torch.tensor([0, 2]))) == pytest.approx(0.4)


def test_dot_regression_and_its_gradient_are_equation_2():
    features = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    frame, labels = simplex_etf(5, 12).double(), torch.tensor([0, 1, 2, 3, 4, 0])
    own = frame[labels]
    cos = (features * own).sum(1) / (features.square().sum(1).sqrt() * own.square().sum(1).sqrt())
    written_out = (0.5 * (cos - 1) ** 2).mean()
    loss = dot_regression(CosineHead(frame)(features), labels)
    torch.testing.assert_close(loss, written_out, rtol=1e-6, atol=0)  # the frame's rows have norm 1 to float32
    expected, gradient = (torch.autograd.grad(value, features, retain_graph=True)[0] for value in (written_out, loss))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    # In closed form: (cos − 1)·(v_y − cos·f̂)/‖f‖ for each sample, orthogonal to the feature.
    norm = features.detach().norm(dim=1, keepdim=True)
    closed = (cos.unsqueeze(1) - 1) * (own - cos.unsqueeze(1) * features / norm) / norm / 6
    torch.testing.assert_close(gradient, closed.detach(), rtol=1e-5, atol=1e-8)
    assert torch.allclose((gradient * features).sum(1), torch.zeros(6).double(), atol=1e-7)


def test_feature_distillation_by_hand():
    # (1² + 2²)/2 = 2.5 and (0² + 3²)/2 = 4.5 with d = 2; the mean of both is 3.5.
    student = torch.tensor([[1.0, 2.0], [5.0, 3.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0], [5.0, 0.0]], requires_grad=True)
    loss = feature_distillation(student, teacher)
    assert float(loss.detach()) == 3.5
    loss.backward()
    # 2·(f − f^g)/(B·d)
    assert student.grad is not None
    assert student.grad.tolist() == [[0.5, 1.0], [0.0, 1.5]]
    assert teacher.grad is None


def test_balanced_softmax_by_hand():
    # Equal logits, counts 3 and 1: −ln(3/4) for the one class, −ln(1/4) for the other; with γ = 2 −ln(9/10).
    logits, counts = torch.zeros(1, 2), torch.tensor([3, 1])
    assert float(balanced_softmax(logits, torch.tensor([0]), counts)) == pytest.approx(math.log(4 / 3))
    assert float(balanced_softmax(logits, torch.tensor([1]), counts)) == pytest.approx(math.log(4))
    assert float(balanced_softmax(logits, torch.tensor([0]), counts, gamma=2.0)) == pytest.approx(math.log(10 / 9))


def test_balanced_softmax_gives_absent_classes_no_weight_and_no_gradient():
    logits = torch.tensor([[0.0, 0.0, 100.0]], requires_grad=True)
    loss = balanced_softmax(logits, torch.tensor([0]), torch.tensor([2, 2, 0]))
    assert float(loss.detach()) == pytest.approx(math.log(2))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-0.5, 0.5, 0.0]]


def test_balanced_softmax_of_gamma_0_is_the_cross_entropy():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert torch.equal(balanced_softmax(logits, labels, torch.tensor([5, 0, 1]), 0.0), F.cross_entropy(logits, labels))


def test_gradient_of_the_cross_entropy_pulls_and_pushes_as_proposition_1_says():
    features = torch.randn(1, 8, dtype=torch.float64, requires_grad=True)
    frame, y = simplex_etf(4, 8).double(), 2
    logits = features @ frame.T
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([y])), features)
    p = (logits.exp() / logits.exp().sum()).squeeze(0).detach()
    pull = (1 - p[y]) * frame[y]
    push = -sum(p[c] * frame[c] for c in range(4) if c != y)
    torch.testing.assert_close(gradient.squeeze(0), -(pull + push))
