"""Weights of clients, classes and pseudo-samples: pure functions of counts, probabilities and predictions."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_probability_weights(
    probabilities: Tensor, divergences: Tensor, rounds: int, exponent: float = 1.0, divergence_weight: float = 1.0
) -> Tensor:
    r"""Weights of the active clients: :math:`\max(\pi_i, 1/T)^{-a}\,(1 + b\,\delta_i)`, not normalised.

    Args:
        probabilities: π (M,), the probability or frequency with which a client takes part.
        divergences: δ (M,), at least 0.
        rounds: T, the rounds so far, including the current one; no client weighs more than :math:`T^a`.
        exponent: a.
        divergence_weight: b.

    Returns:
        (M,), float64.

    Note:
        Equation 8 of HFedCKD is not available to us; this is our form. Its kernel is that of Horvitz and Thompson
        ("A Generalization of Sampling Without Replacement From a Finite Universe", 1952): with :math:`1_i` for "client
        i is in the cohort S", :math:`E[1_i] = \pi_i`, so that for any numbers :math:`f_i` of a population of N

        .. math:: E\Big[\frac{1}{N} \sum_{i \in S} \frac{f_i}{\pi_i}\Big]
                  = \frac{1}{N} \sum_{i=1}^N \frac{E[1_i]}{\pi_i} f_i = \frac{1}{N} \sum_{i=1}^N f_i

        whatever the design, as long as every :math:`\pi_i > 0`. That is a = 1, b = 0, before clipping and normalising;
        after normalising it is Hájek's ratio estimator, which is biased by the order of 1/M and varies less. b > 0
        is not part of the estimator: it gives more weight to a client that disagrees with the others. For a = b = 0, or
        equal π and equal δ, all clients weigh the same; a client seen half as often weighs :math:`2^a` times as much.
    """
    clipped = probabilities.double().clamp_min(1 / rounds)
    return clipped**-exponent * (1 + divergence_weight * divergences.double())


def sample_gate(confidence: Tensor, slope: float, threshold: float) -> Tensor:
    r"""The trust in a pseudo-sample: :math:`1 / (1 + \exp(-\lambda (u - \theta)))`.

    Args:
        confidence: u (B,), the largest of the ensemble's class probabilities.
        slope: λ; 0 gives all samples ½.
        threshold: θ, where the gate is ½.
    """
    return torch.sigmoid(slope * (confidence - threshold))


def divergences_from_mean(probabilities: Tensor) -> Tensor:
    r"""Divergence of each client from the mean: :math:`\delta_i = E_x\,\mathrm{KL}(p_i(x)\,\|\,\bar p(x))`.

    Args:
        probabilities: p (M, B, C).

    Returns:
        (M,), from 0 to ln M.

    Note:
        The "global prediction" is the plain mean over the round's active clients: it does not need a network that all
        kinds share, and the divergence from a mixture that includes the client cannot exceed ln M.
    """
    mean = probabilities.mean(0)
    tiny = torch.finfo(probabilities.dtype).tiny
    ratio = probabilities.clamp_min(tiny).log() - mean.clamp_min(tiny).log()
    return (probabilities * ratio).sum(2).mean(1).clamp_min(0)


def normalised(weights: Tensor) -> Tensor:
    """Weights that sum to 1."""
    return weights / weights.sum()


def effective_size(weights: Tensor) -> float:
    r"""The effective number of clients: :math:`(\sum w)^2 / \sum w^2`, from 1 to M."""
    return float(weights.sum() ** 2 / weights.square().sum())


def entropy(weights: Tensor) -> float:
    """Entropy of weights that sum to 1, in nats; ln M for equal weights."""
    return float(torch.special.entr(weights).sum())


def label_prior(weights: Tensor, counts: Tensor) -> Tensor:
    r"""The distribution of labels :math:`\hat p(y) \propto \sum_i w_i c_{iy}`.

    With :math:`w_i = 1/\pi_i` it estimates the population's distribution, not the cohort's.

    Args:
        weights: w (M,).
        counts: c (M, C), samples by client and class.
    """
    return normalised(weights.double() @ counts.double())


def label_shares(weights: Tensor, counts: Tensor) -> Tensor:
    r"""A client's share of a class: :math:`\omega_{iy} = w_i c_{iy} / \sum_j w_j c_{jy}`.

    Args:
        weights: w (M,).
        counts: c (M, C), samples by client and class.

    Returns:
        (M, C), float64: sums to 1 over the clients; 0 for a class that no client has.
    """
    weighed = weights.double().unsqueeze(1) * counts.double()
    total = weighed.sum(0)
    return torch.where(total > 0, weighed / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)


def mixture(logits: Tensor, shares: Tensor) -> Tensor:
    r"""The ensemble's probabilities :math:`\sum_i \omega_{ib}\,\sigma(f_i(x_b))` (B, C).

    Args:
        logits: (M, B, C).
        shares: ω (M, B), which sum to 1 over the clients.
    """
    return torch.einsum("mb,mbc->bc", shares, logits.softmax(2))
