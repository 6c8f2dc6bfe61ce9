"""AFL.

Mohri, Sivek, Suresh: "Agnostic Federated Learning", ICML 2019, Figure 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.qfedavg import LOSS, LossFirst

SHARES = "shares"  # in the server's state: λ (N,)


class AFL(LossFirst):
    r"""Minimises the largest mean loss over mixtures of clients: :math:`\min_w \max_\lambda \sum_k \lambda_k F_k(w)`.

    The server averages the models of a round by λ,
    :math:`w \leftarrow \sum_k \lambda_k \bar w_k / \sum_k \lambda_k`, and then moves
    :math:`\lambda \leftarrow \Pi(\lambda + \gamma F)`, with :math:`F_k` a client's loss at the model that it received,
    and Π the projection on the simplex.

    Logs ``server/largest_share``, the largest :math:`\lambda_k`.

    Args:
        gamma: γ; 0 is FedAvg of the same weighting.
        weighting: The first λ: ``uniform``, or in proportion to ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative γ; during training, if a client's loss is below 0.

    Note:
        The paper steps once a round along the gradient weighed by λ, and so does the code of the authors of q-FedAvg
        (``litian96/fair_flearn``), which takes the loss of that batch; one local step of SGD is the same, more are the
        local models of FedAvg. Both return the mean of all iterates, for which the paper has its bound; here the last
        one is tested and saved. :math:`\lambda_k` of a client outside the round changes by the projection alone, and
        losses are not scaled by the share of clients that take part. A client whose :math:`\lambda_k` is 0 trains
        without effect until its loss brings it back; if that holds for all clients of a round, they weigh the same.
        The server keeps 8 bytes for each client. A client that reports too large a loss takes the others' weight.
    """

    def __init__(self, gamma: float = 0.1, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting, **kwargs)
        self.gamma = check_range("algorithm.gamma", gamma, least=0)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with the first λ."""
        server, size = super().setup(models, population), population.data.census.num_samples
        sizes = [1 if self.weighting == "uniform" else size(client_id) for client_id in range(population.num_clients)]
        shares = torch.tensor(sizes, dtype=torch.float64, device=next(iter(self.model.parameters.values())).device)
        return {**server, SHARES: shares / shares.sum()}

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """A mean by λ."""
        return ByShare(server[SHARES])

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the model, then move λ."""
        super().step(server, {name: t for name, t in aggregate.items() if name in server["model"]}, cohort)
        if self.gamma:
            server[SHARES].copy_(projected(server[SHARES] + self.gamma * aggregate[LOSS]))
        return {"server/largest_share": float(server[SHARES].max())}


class ByShare(fed.WeightedMean):
    """The mean with weights λ, and the clients' losses (N,) as ``loss``, 0 of those that sent none.

    Args:
        shares: λ (N,); constant while the reducer works.
    """

    def __init__(self, shares: Tensor) -> None:
        super().__init__()
        self.shares, self.losses = shares, torch.zeros_like(shares)

    def add(self, update: fed.ClientUpdate) -> None:
        """Keep a client's loss; a weight of 0 becomes one that counts only beside others of 0."""
        self.losses[update.client_id] += update.payload[LOSS]
        super().add(replace(update, weight=float(self.shares[update.client_id]) or 1e-60))

    def result(self, workers: fed.Workers) -> fed.Payload | None:
        """The mean over all processes, beside the losses."""
        mean = super().result(workers)
        return None if mean is None else {**mean, LOSS: workers.all_reduce(self.losses)}


def projected(values: Tensor) -> Tensor:
    """The nearest point of the simplex to (N,) (Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008, Figure 1)."""
    falling = values.sort(descending=True).values
    above = (falling.cumsum(0) - 1) / torch.arange(1, len(values) + 1, device=values.device)
    return (values - above[(falling > above).sum() - 1]).clamp(min=0)
