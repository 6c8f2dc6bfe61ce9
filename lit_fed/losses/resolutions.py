"""Distillation between maps of different resolutions."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Upsampling = Literal["nearest", "bilinear"]


def resolution_distillation(student: Tensor, teacher: Tensor, upsampling: Upsampling = "nearest") -> Tensor:
    r"""Mean squared distance of enlarged maps to larger ones, :math:`\mathrm{mean}\,(U s - \mathrm{sg}(t))^2`.

    Lim, Lee, Lee, Cho: "Mitigating Resolution-Drift in Federated Learning: Case of Keypoint Detection", 2025, Eq. 5.

    Args:
        student: s (B, K, h, w), differentiated through.
        teacher: t (B, K, h', w'), a constant.
        upsampling: U: copies of the nearest pixel, or ``bilinear`` between centres of pixels, constant beyond the
            outermost.

    Returns:
        A 0-d tensor.

    Note:
        The paper sums over joints and pixels; the mean, as in its public code, gives levels of different size equal
        weight: over the highest level's size, the paper's second of three levels weighs 9/16.
    """
    if student.shape != teacher.shape:
        student = F.interpolate(student, size=teacher.shape[-2:], mode=upsampling)
    return F.mse_loss(student, teacher.detach())
