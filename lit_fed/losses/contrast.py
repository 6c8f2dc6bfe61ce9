"""Contrast between the features of several models."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def model_contrast(features: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    r"""Pull features towards one model's and away from another's.

    .. math:: -\log \frac{\exp(\cos(z, z_+)/\tau)}{\exp(\cos(z, z_+)/\tau) + \exp(\cos(z, z_-)/\tau)}

    Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3.

    Args:
        features: z (B, d), differentiated through.
        near: z₊ (B, d), constants.
        far: z₋ (B, d), constants.
        temperature: τ.

    Returns:
        A 0-d tensor, the mean over the batch; ln 2 at equal distance.
    """
    cosines = [F.cosine_similarity(features, other.detach(), dim=1) for other in (near, far)]
    # With two classes the cross-entropy of class 0 is softplus(far - near).
    return F.softplus((cosines[1] - cosines[0]) / temperature).mean()
