"""Familiarity of a client with an input: one diagonal Gaussian per class on the client's logits.

Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026, arXiv:2509.15147,
Section 4.4 and Appendix A.4. Pure functions of tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ClassGaussians(NamedTuple):
    """An equally weighted mixture of diagonal Gaussians, one per class a client knows.

    Args:
        mean: μ (K, D).
        variance: σ² (K, D), positive.
    """

    mean: Tensor
    variance: Tensor


def fit_class_gaussians(logits: Tensor, labels: Tensor) -> ClassGaussians:
    r"""Mean and variance of the logits of each class in the samples.

    .. math:: \mu_k = \frac{1}{n_k}\sum_{y_j=k} z_j,\quad
        \sigma^2_k = \max\left(\frac{1}{n_k}\sum_{y_j=k} (z_j-\mu_k)^2,\; 10^{-6}\,\overline{\sigma^2} + 10^{-6}\right)

    Args:
        logits: z (n, D) of calibration samples.
        labels: Their classes (n,), integers.

    Returns:
        Float64 tensors (K, D), in ascending order of the class. A class of fewer than 2 samples has no variance and is
        left out, so K may be 0.

    Note:
        The floor, with :math:`\overline{\sigma^2}` the mean over this client's classes and logits, is ours: a logit
        that is constant on the calibration samples would have an infinite density. The variance is the
        maximum-likelihood one, as in scikit-learn; the paper does not name an estimator.
    """
    z = logits.double()
    classes, counts = labels.unique(return_counts=True)
    members = [z[labels == label] for label in classes[counts >= 2]]
    if not members:
        return ClassGaussians(z.new_zeros(0, z.shape[1]), z.new_ones(0, z.shape[1]))
    mean = torch.stack([member.mean(0) for member in members])
    variance = torch.stack([member.var(0, correction=0) for member in members])
    return ClassGaussians(mean, variance.clamp_min(float(1e-6 * variance.mean() + 1e-6)))


def log_density(z: Tensor, gaussians: ClassGaussians) -> Tensor:
    r"""Log density of the mixture, summed over dimensions.

    .. math:: \ell(z) = \log\frac{1}{K}\sum_k (2\pi)^{-D/2} \prod_d \sigma_{kd}^{-1}
        \exp\left[-\tfrac12\sum_d \frac{(z_d-\mu_{kd})^2}{\sigma_{kd}^2}\right]

    Eq. 7 of the paper.

    Args:
        z: Logits (n, D).
        gaussians: The mixture, K classes.

    Returns:
        ℓ (n,), float64; −∞ for a mixture without classes.
    """
    z, mean, variance = z.double(), gaussians.mean.double(), gaussians.variance.double()
    if not len(mean):
        return z.new_full((len(z),), -math.inf)
    joint = z.new_empty(len(z), len(mean))
    for k in range(len(mean)):  # class by class: a tensor (n, K, D) would be the largest of the run
        joint[:, k] = -0.5 * ((z - mean[k]).square() / variance[k]).sum(1)
    joint -= 0.5 * (variance.log().sum(1) + z.shape[1] * math.log(2 * math.pi))
    return joint.logsumexp(1) - math.log(len(mean))
