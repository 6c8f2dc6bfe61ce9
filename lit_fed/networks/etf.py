"""Constructed classifiers: directions spread evenly over the sphere, and cosines to them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed.errors import ConfigError


def simplex_etf(num_classes: int, num_features: int) -> Tensor:
    r"""A simplex equiangular tight frame in random orientation, as rows: classes at the largest mutual distance.

    :math:`V = \sqrt{\tfrac{C}{C-1}}\,U\,(I_C - \tfrac1C \mathbf{1}\mathbf{1}^\top)`, U with orthonormal columns from a
    QR decomposition: Papyan, Han, Donoho: "Prevalence of Neural Collapse During the Terminal Phase of Deep Learning
    Training", PNAS 2020, as Kim et al. write it ("FedDr+", 2024, Eq. 3).

    Args:
        num_classes: C, at least 2.
        num_features: d, at least C − 1.

    Returns:
        :math:`V^\top`, shape (C, d): rows of norm 1 with a cosine of −1/(C − 1) between any two, from torch's global
        generator.

    Raises:
        ConfigError: For fewer classes or features.

    Note:
        The C columns of U need d ≥ C, although the frame itself has only C − 1 dimensions. With an orthonormal basis B
        of the vectors that sum to zero, (C, C − 1), the projection is :math:`BB^\top`, and :math:`UB` has C − 1
        orthonormal columns. We draw these columns instead of U: the frames have the same distribution, also for
        d = C − 1.
    """
    if num_classes < 2 or num_features < num_classes - 1:
        raise ConfigError(
            f"a simplex ETF of {num_classes} classes does not fit into {num_features} dimensions; it needs at least 2 "
            f"classes and {max(num_classes - 1, 1)} features; choose a network with more features"
        )
    directions = _orthonormal(num_features, num_classes - 1)
    frame = _zero_sum_basis(num_classes) @ directions.T * math.sqrt(num_classes / (num_classes - 1))
    return F.normalize(frame, dim=1).float()


def orthonormal_classes(num_classes: int, num_features: int) -> Tensor:
    """Random orthonormal directions, as rows.

    Args:
        num_classes: C, at least 1.
        num_features: d, at least C.

    Returns:
        Shape (C, d), rows of norm 1 at right angles, from torch's global generator.

    Raises:
        ConfigError: For fewer classes or features.
    """
    if num_classes < 1 or num_features < num_classes:
        raise ConfigError(
            f"{num_classes} orthonormal classes do not fit into {num_features} dimensions; they need at least 1 class "
            "and one feature per class; choose a network with more features"
        )
    return _orthonormal(num_features, num_classes).T.float().contiguous()


class CosineHead(nn.Module):
    r"""Cosines between features and frozen classes: :math:`z_c = \langle f / \|f\|, v_c \rangle`.

    Args:
        weight: The classes as rows of norm 1, (C, d).
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # Not a buffer, which would travel by the buffers' policy.
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        """Logits in [−1, 1]: (B, d) to (B, C)."""
        return F.linear(F.normalize(features, dim=1), self.weight)

    def cosines(self, features: Tensor) -> Tensor:
        """The same."""
        cosines: Tensor = self(features)
        return cosines


class ProjectedETFHead(nn.Module):
    r"""Cosines between projected features and a frozen frame of C classes in C dimensions, at a learnt temperature.

    :math:`z_c = \tau \langle Pf / \|Pf\|, v_c \rangle`: Li, Shang, He, Lin, Wu: "No Fear of Classifier Biases: Neural
    Collapse Inspired Federated Learning with Synthetic and Fixed Classifier", ICCV 2023.

    Args:
        num_features: d.
        num_classes: C.
        bias: Whether the projection adds a learnt vector: :math:`Pf + b` in place of :math:`Pf`.
    """

    def __init__(self, num_features: int, num_classes: int, bias: bool = False) -> None:
        super().__init__()
        self.projection = nn.Linear(num_features, num_classes, bias=bias)
        self.weight = nn.Parameter(simplex_etf(num_classes, num_classes), requires_grad=False)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Logits: (B, d) to (B, C)."""
        return self.temperature * self.cosines(features)

    def cosines(self, features: Tensor) -> Tensor:
        """Logits without the temperature: (B, d) to (B, C)."""
        return F.linear(F.normalize(self.projection(features), dim=1), self.weight)


def class_cosines(head: nn.Module, features: Tensor) -> Tensor:
    """Cosines between features and each class's weight, for any linear classifier: (B, d) to (B, C).

    Args:
        head: A head of this module, or a linear layer, whose bias is left out.
        features: (B, d), the input of the head.

    Raises:
        ConfigError: If the classifier has no weight per class.
    """
    if isinstance(head, CosineHead | ProjectedETFHead):
        return head.cosines(features)
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape[1:] != features.shape[1:]:
        raise ConfigError(
            f"classifier {type(head).__name__} has no weight (C, d) for features of length d; choose another head"
        )
    return F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))


def _orthonormal(num_rows: int, num_columns: int) -> Tensor:
    """Random orthonormal columns, uniformly distributed, in float64 for exactness in float32."""
    gaussian = torch.randn(num_rows, num_columns, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)  # QR is unique, and Q uniform, for a positive diagonal
    columns: Tensor = q * signs
    return columns


def _zero_sum_basis(size: int) -> Tensor:
    """Orthonormal columns that each sum to zero, (size, size − 1), by Helmert's formula."""
    column = torch.arange(1, size, dtype=torch.float64)
    row = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    basis = torch.where(row < column, torch.ones(()).double(), torch.where(row == column, -column, 0.0))
    return basis / (column * (column + 1)).sqrt()
