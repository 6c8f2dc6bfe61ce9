"""Losses of a generator of pseudo-samples, from an ensemble of classifiers and without data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ensemble_cross_entropy(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    r"""Cross-entropy of the classifiers with the samples' intended classes, weighted by each client's share.

    .. math:: \frac{1}{B} \sum_b \sum_i \omega_{ib}\,\mathrm{CE}(f_i(x_b), y_b)

    Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

    Args:
        logits: Of every classifier i, (M, B, C).
        labels: y (B,).
        shares: ω (M, B).
    """
    several, batch, classes = logits.shape
    each = F.cross_entropy(logits.reshape(-1, classes), labels.repeat(several), reduction="none")
    return (each.view(several, batch) * shares).sum(0).mean()


def diversity(noise: Tensor, samples: Tensor) -> Tensor:
    r"""Small for samples that vary with the noise: :math:`\exp(-\mathrm{mean}_{ij}\,\delta_{ij}\,d_{ij})`.

    :math:`\delta_{ij}` is the mean square of :math:`\varepsilon_i - \varepsilon_j`, :math:`d_{ij}` the mean absolute
    value of :math:`G_i - G_j`, and the mean is over all pairs, including each sample with itself.

    Args:
        noise: ε (B, n).
        samples: G (B, …).

    Returns:
        A 0-d tensor; 1 if all samples are equal.
    """
    flat = samples.flatten(1)
    between = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    apart = torch.cdist(flat, flat, p=1.0) / flat.shape[1]
    return torch.exp(-(between * apart).mean())


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    r"""Minus the divergence :math:`\mathrm{KL}(\sigma(t)\,\|\,\sigma(s))` on samples with different predicted classes.

    It drives the generator to samples that the student does not know yet. Zhang et al.: "DENSE: Data-Free One-Shot
    Federated Learning", NeurIPS 2022.

    Args:
        teacher: Logits t (B, C).
        student: Logits s (B, C).

    Returns:
        A 0-d tensor: the mean over the batch; samples of equal predicted class count 0.
    """
    log_teacher, log_student = F.log_softmax(teacher, dim=1), F.log_softmax(student, dim=1)
    divergence = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1)
    return -(divergence * (teacher.argmax(1) != student.argmax(1))).mean()


def gated_cross_entropy(logits: Tensor, targets: Tensor, gates: Tensor) -> Tensor:
    r"""Cross-entropy of a network with the ensemble, gated: the mean of :math:`g_b\,\mathrm{CE}(p_b, f(x_b))`.

    Args:
        logits: f (B, C).
        targets: p (B, C), probabilities.
        gates: g (B,).
    """
    each = F.cross_entropy(logits, targets.to(logits.dtype), reduction="none")
    return (gates.to(logits.dtype) * each).mean()
