"""The proximal term."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def proximal(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    r"""Half the squared distance, :math:`\tfrac12 \sum_i \|w_i - a_i\|^2`.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2,
    without its factor μ.

    Args:
        parameters: Tensors of any shapes, differentiated through.
        anchors: Constant tensors of the same number and shapes.

    Returns:
        A 0-d tensor; its gradient in each parameter is ``w_i - a_i``.

    Raises:
        ValueError: If the numbers of parameters and anchors differ.
    """
    squares = [(w - a.detach()).square().sum() for w, a in zip(parameters, anchors, strict=True)]
    return 0.5 * torch.stack(squares).sum()
