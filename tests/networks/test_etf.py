"""Constructed classifiers against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lit_fed.errors import ConfigError
from lit_fed.networks import (
    CosineHead,
    ProjectedETFHead,
    class_cosines,
    orthonormal_classes,
    simplex_etf,
)


def test_rows_of_a_simplex_etf_have_norm_one_and_cosine_minus_one_over_c_minus_one():
    for num_classes in range(2, 201):
        gram = torch.full((num_classes, num_classes), -1 / (num_classes - 1), dtype=torch.float64).fill_diagonal_(1)
        for num_features in (num_classes - 1, num_classes, num_classes + 30):
            frame = simplex_etf(num_classes, num_features)
            assert frame.shape == (num_classes, num_features)
            torch.testing.assert_close(frame.double() @ frame.double().T, gram, rtol=0, atol=1e-6)


def test_published_cosines():
    # FedDr+: −1/9 = −0.1111 for CIFAR-10's classes, −1/99 = −0.0101 for CIFAR-100's.
    for num_classes, expected in ((10, -0.1111), (100, -0.0101)):
        frame = simplex_etf(num_classes, 512)
        assert float(frame[0] @ frame[1]) == pytest.approx(expected, abs=5e-5)


def test_a_simplex_etf_is_the_papers_formula():
    # Written out as Eq. 3: with U = VᵀM, M the pseudo-inverse of √(C/(C−1))·(I − 11ᵀ/C), V = √(C/(C−1))·U(I − 11ᵀ/C).
    num_classes = 7
    matrix = math.sqrt(7 / 6) * (torch.eye(num_classes) - torch.ones(num_classes, num_classes) / num_classes)
    v = simplex_etf(num_classes, 12).T
    u = v @ torch.linalg.pinv(matrix)
    torch.testing.assert_close(u @ matrix, v)
    spectrum = torch.linalg.svdvals(u)  # U's part that V shows: C − 1 orthonormal directions, the last is projected out
    torch.testing.assert_close(spectrum, torch.tensor([1.0] * 6 + [0.0]), atol=1e-5, rtol=0)


def test_orthonormal_classes_are_orthonormal():
    for num_classes, num_features in ((1, 1), (10, 10), (100, 512)):
        rows = orthonormal_classes(num_classes, num_features).double()
        torch.testing.assert_close(rows @ rows.T, torch.eye(num_classes).double(), rtol=0, atol=1e-6)


def test_orientation_follows_the_global_generator():
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append((simplex_etf(5, 8), orthonormal_classes(5, 8)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][1], drawn[2][1])


@pytest.mark.parametrize("sizes", [(1, 4), (10, 8), (3, 1)])
def test_too_few_features_for_an_etf(sizes):
    with pytest.raises(
        ConfigError, match=f"a simplex ETF of {sizes[0]} classes does not fit into {sizes[1]} dimensions"
    ):
        simplex_etf(*sizes)


def test_too_few_features_for_orthonormal_classes():
    with pytest.raises(ConfigError, match="10 orthonormal classes do not fit into 9 dimensions"):
        orthonormal_classes(10, 9)


def test_cosine_head_by_hand():
    # f = (3, 4) has norm 5: cosines 3/5 and −4/5, whatever its length.
    head = CosineHead(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    torch.testing.assert_close(head(torch.tensor([[3.0, 4.0], [30.0, 40.0]])), torch.tensor([[0.6, -0.8]] * 2))
    assert not head.weight.requires_grad
    assert not list(head.buffers())


def test_projected_head_by_hand():
    # The projection swaps (4, 3) to (3, 4); cosine with (1, 0) 3/5, times the temperature 2.
    head = ProjectedETFHead(2, 2)
    head.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    head.projection.weight.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    head.temperature.data.fill_(2.0)
    torch.testing.assert_close(head(torch.tensor([[4.0, 3.0]])), torch.tensor([[1.2, -1.2]]))
    torch.testing.assert_close(class_cosines(head, torch.tensor([[4.0, 3.0]])), torch.tensor([[0.6, -0.6]]))
    assert [name for name, p in head.named_parameters() if not p.requires_grad] == ["weight"]


def test_a_projection_with_a_bias_by_hand():
    # (4, 3) + (−1, 1) = (3, 4)
    head = ProjectedETFHead(2, 2, bias=True)
    head.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    head.projection.weight.data, head.projection.bias.data = torch.eye(2), torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(head(torch.tensor([[4.0, 3.0]])), torch.tensor([[0.6, -0.6]]))
    assert ProjectedETFHead(2, 2).projection.bias is None


def test_cosines_of_a_linear_layer_by_hand():
    layer = nn.Linear(2, 1)
    layer.weight.data = torch.tensor([[2.0, 0.0]])
    torch.testing.assert_close(class_cosines(layer, torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6]]))
    with pytest.raises(ConfigError, match="Flatten has no weight"):
        class_cosines(nn.Flatten(), torch.ones(1, 2))
