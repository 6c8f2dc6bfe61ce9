"""FedDecorr.

Shi, Liang, Zhang, Tan, Bai: "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", ICLR 2023.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.losses import decorrelation
from lit_fed.methods.regularizers import features


class FedDecorr(fed.Regularizer):
    r"""Correlation between the features' dimensions, :math:`\tfrac{1}{d^2}\|K\|_F^2`, over any method's objective.

    K is the correlation matrix of the features, the head's input, over a batch; see `lit_fed.losses.decorrelation`. The
    paper's β is the weight, 0.1.

    Note:
        The authors' code takes the mean of the squares off the diagonal, of :math:`(N-1) K` for a batch of N, and
        divides by N. Its term is :math:`\frac{(N-1)^2}{N} \cdot \frac{d}{d-1}` times the part of the paper's that has a
        gradient: with batches of 64, its weight of 0.1 is 6.2 here.
    """

    name = "feddecorr"
    needs = frozenset({"loss", "features", "body"})

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """Between 1/d and 1."""
        return decorrelation(features(client, batch).flatten(1))
