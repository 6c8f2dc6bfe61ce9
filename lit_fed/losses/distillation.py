"""Distillation losses between a student's and a teacher's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def knowledge_distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Knowledge distillation, :math:`\tau^2\,\mathrm{KL}(\sigma(t/\tau)\,\|\,\sigma(s/\tau))`, a mean over the batch.

    Hinton, Vinyals, Dean: "Distilling the Knowledge in a Neural Network", 2015. The factor τ² keeps the gradient's
    scale when τ changes.

    Args:
        student: Logits (B, C), differentiated through.
        teacher: Logits (B, C), constants.
        temperature: τ.

    Returns:
        A 0-d tensor; 0 for equal distributions.

    Note:
        The Kullback-Leibler divergence in place of the cross-entropy: they differ by the teacher's entropy, which has
        no gradient, and the divergence reads as a distance in the logs.
    """
    log_student = F.log_softmax(student / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.detach() / temperature, dim=1)
    divergence = F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


def not_true_distillation(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Knowledge distillation over the C − 1 classes that are not the true one.

    Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022, Eqs. 3 and 4. The true class is removed before the softmax, so its logit gets no gradient.

    Args:
        student: Logits (B, C), differentiated through.
        teacher: Logits (B, C), constants.
        labels: Classes (B,).
        temperature: τ.

    Returns:
        A 0-d tensor: τ² times the divergence, averaged over the batch.
    """
    return knowledge_distillation(_without(student, labels), _without(teacher, labels), temperature)


def _without(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (B, C) without each row's own class: (B, C − 1)."""
    index = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, index + (index >= labels.unsqueeze(1)).long())  # a mask would synchronise the device
