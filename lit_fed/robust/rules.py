r"""Robust aggregation rules, as pure functions in float64.

The median and the trimmed mean take a stack of vectors, (n, d). Every other rule is a combination
:math:`\sum_i w_i x_i` whose weights depend on the inner products of the vectors alone, so that such a function takes
the Gram matrix, (n, n), and gives the weights, (n,). A pre-aggregation gives a matrix, (m, n), that mixes n vectors
into m.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Definition = Literal["blanchard", "byzfl"]
"""Definitions of Krum's score."""

_LEAST_CHANGE = 1e-12


def median(vectors: Tensor) -> Tensor:
    """The coordinate-wise median of (n, d), (d,): the mean of the middle two if n is even.

    Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018.
    """
    ordered, half = _sorted(vectors), len(vectors) // 2
    if len(vectors) % 2:
        return ordered[half].clone()  # a view would keep all vectors
    return ordered[half - 1] / 2 + ordered[half] / 2  # halved first: a sum of the largest numbers overflows


def trimmed_mean(vectors: Tensor, attackers: int) -> Tensor:
    """The mean of each coordinate of (n, d), (d,), without its f smallest and its f largest values.

    Yin et al., see `median`.

    Args:
        vectors: The vectors.
        attackers: f, with 2f < n.
    """
    return _sorted(vectors)[attackers : len(vectors) - attackers].mean(0)


def squared_distances(gram: Tensor) -> Tensor:
    r"""Squared distances, (n, n), from inner products: :math:`g_{ii} + g_{jj} - 2 g_{ij}`; infinite on overflow."""
    norms = gram.diagonal()
    squares = (norms[:, None] + norms[None, :] - 2 * gram).clamp_min(0)
    squares = torch.where(squares.isfinite(), squares, math.inf)
    return squares.fill_diagonal_(0)


def krum_scores(gram: Tensor, attackers: int, definition: Definition = "blanchard") -> Tensor:
    r"""Krum's scores, (n,): the sum of the squared distances to the nearest other vectors.

    Blanchard, El Mhamdi, Guerraoui, Stainer: "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
    NeurIPS 2017, count the :math:`n - f - 2` nearest; the library ByzFL counts :math:`n - f - 1`.

    Args:
        gram: Inner products.
        attackers: f.
        definition: Number of neighbours.
    """
    near = len(gram) - attackers - (2 if definition == "blanchard" else 1)
    others = squared_distances(gram).fill_diagonal_(math.inf)
    return others.sort(1).values[:, :near].sum(1)


def multi_krum(gram: Tensor, attackers: int, keep: int, definition: Definition = "blanchard") -> Tensor:
    """Equal weights for the vectors with the lowest scores, and 0 for the others; Krum is ``keep = 1``.

    Args:
        gram: Inner products.
        attackers: f.
        keep: Number of vectors to average.
        definition: See `krum_scores`.

    Note:
        Of equal scores rounding picks one. They are common after `nearest_neighbours`, whose vectors share members.
    """
    kept = krum_scores(gram, attackers, definition).argsort(stable=True)[:keep]
    return torch.zeros_like(gram[0]).index_fill_(0, kept, 1 / len(kept))


def geometric_median(gram: Tensor, smoothing: float, iterations: int) -> Tensor:
    r"""Weights of the smoothed geometric median: Weiszfeld's :math:`w_i \propto 1 / \max(\nu, \lVert z - x_i \rVert)`.

    Pillutla, Kakade, Harchaoui: "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing
    2022, Algorithm 2 (RFA).

    Args:
        gram: Inner products.
        smoothing: ν, in the unit of the vectors.
        iterations: The most steps; they end when no weight changes by more than 1e-12.

    Note:
        Starts from the mean of the majority nearest to the medoid. From the mean of all, as in the paper, vectors at a
        distance of 10³⁰ would need some eighty steps.
    """
    count = len(gram)
    distances = squared_distances(gram).sqrt()
    medoid = distances.nan_to_num(posinf=torch.finfo(gram.dtype).max / count).sum(1).argmin()
    near = distances[medoid].argsort(stable=True)[: count // 2 + 1]
    weights = torch.zeros_like(gram[0]).index_fill_(0, near, 1 / len(near))
    for _ in range(iterations):
        inverse = 1 / _distances_to(gram, weights).clamp_min(smoothing)
        before, weights = weights, inverse / inverse.sum()
        if float((weights - before).abs().max()) <= _LEAST_CHANGE:
            break
    return weights


def centred_clipping(gram: Tensor, radius: float, iterations: int) -> Tensor:
    r"""Weights after :math:`v \leftarrow v + \frac{1}{n} \sum_i (x_i - v) \min(1, \tau / \lVert x_i - v \rVert)`.

    Karimireddy, He, Jaggi: "Learning from History for Byzantine Robust Optimization", ICML 2021.

    Args:
        gram: Inner products of the vectors and, last, of the centre to begin with: (n + 1, n + 1).
        radius: τ.
        iterations: L.

    Returns:
        The weights of the vectors and of the centre, (n + 1,).
    """
    count = len(gram) - 1
    weights = torch.zeros_like(gram[0])
    weights[-1] = 1
    for _ in range(iterations):
        shares = clipped(_distances_to(gram, weights)[:count], radius)
        weights = weights * (1 - shares.mean())
        weights[:count] += shares / count
    return weights


def norm_bounding(gram: Tensor, norm: float) -> Tensor:
    r"""Weights of the mean of vectors that are shortened to a norm: :math:`\min(1, C / \lVert x_i \rVert) / n`.

    Sun, Kairouz, Suresh, McMahan: "Can You Really Backdoor Federated Learning?", 2019.

    Args:
        gram: Inner products.
        norm: C.
    """
    return clipped(gram.diagonal().sqrt(), norm) / len(gram)


def clipped(lengths: Tensor, bound: float) -> Tensor:
    """Factors that shorten vectors of these lengths to a bound: 1 within it."""
    return (bound / lengths).clamp_max(1)


def nearest_neighbours(gram: Tensor, attackers: int) -> Tensor:
    """The matrix, (n, n), that replaces each vector by the mean of the n − f nearest to it, itself included: NNM.

    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: "Fixing by Mixing: A Recipe for Optimal Byzantine ML under
    Heterogeneity", AISTATS 2023.

    Args:
        gram: Inner products.
        attackers: f.
    """
    keep = len(gram) - attackers
    near = squared_distances(gram).argsort(dim=1, stable=True)[:, :keep]
    return torch.zeros_like(gram).scatter_(1, near, 1 / keep)


def buckets(count: int, size: int, generator: torch.Generator) -> Tensor:
    """The matrix, (⌈n / s⌉, n), that averages buckets of s vectors at random; the last one may be smaller.

    Karimireddy, He, Jaggi: "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022.

    Args:
        count: n.
        size: s.
        generator: Draws the permutation.
    """
    groups = torch.randperm(count, generator=generator).split(size)
    mix = torch.zeros(len(groups), count, dtype=torch.float64)
    for row, members in zip(mix, groups, strict=True):
        row[members] = 1 / len(members)
    return mix


def _sorted(vectors: Tensor) -> Tensor:
    """Every coordinate of (n, d) in ascending order; on a CPU by NumPy, whose sort takes a third of PyTorch's time."""
    if vectors.device.type != "cpu":
        return vectors.sort(0).values
    return torch.from_numpy(np.sort(vectors.numpy(), axis=0))


def _distances_to(gram: Tensor, weights: Tensor) -> Tensor:
    r"""Distances, (n,), of all vectors to the combination :math:`\sum_j w_j x_j`."""
    offsets = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - weights
    return (offsets @ gram * offsets).sum(1).clamp_min(0).sqrt()
