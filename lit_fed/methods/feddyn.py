"""FedDyn.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg

DUAL = "dual."  # in a client's state: ∇L_k, the gradient of its loss at its last model


class FedDyn(FedAvg):
    r"""Clients with a linear and a quadratic term, :math:`L_k(w) - \langle g_k, w\rangle + \tfrac\alpha2\|w-w_g\|^2`.

    After local work :math:`g_k \leftarrow g_k - \alpha (w_k - w_g)`, which is the gradient of :math:`L_k` at
    :math:`w_k` where the local problem was solved exactly.

    The server averages the models and subtracts the clients' bias:
    :math:`h \leftarrow h - \frac{\alpha}{m}\sum_{k\in P}(w_k - w_g)` and
    :math:`w_g \leftarrow \frac{1}{|P|}\sum_{k\in P} w_k - \frac{1}{\alpha} h`, with m the number of clients in the
    population.

    Args:
        alpha: Weight α of the dynamic regularisation; 0 is FedAvg.
        weighting: ``uniform`` as in the paper; ``samples`` weighs the mean, in both of the server's formulas.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative α.

    Note:
        The terms enter as their gradient, :math:`-g_k + \alpha (w - w_g)`, so they are not in ``train/loss``.

        The server keeps :math:`s = -h/\alpha`; its step is then :math:`s \leftarrow s + \frac{|P|}{m}(\bar w - w_g)`,
        :math:`w_g \leftarrow \bar w + s`. For α = 0, where the paper's formula is 0/0, s stays 0: FedAvg.
    """

    def __init__(
        self, alpha: float = 0.01, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any
    ) -> None:
        super().__init__(weighting, **kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, least=0)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with a shift of zero."""
        server = super().setup(models, population)
        return {**server, "shift": fed.zeros_like(self.model.tensors(self.model.split.shared))}

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """A dual variable of zeros."""
        return fed.add_prefix(DUAL, fed.zeros_like(client.model.tensors(client.model.split.shared)))

    def correct(self, client: fed.Client, gradients: fed.Tensors) -> fed.Tensors:
        """Add the gradient of the two terms."""
        dual = fed.split_prefix(DUAL, client.state)[0]
        if client.stage != "train" or not self.alpha:
            return gradients
        moved = {n: client.model.tensor(n) - client.received[n] for n in gradients if n in dual}
        return gradients | {n: torch.add(gradients[n] - dual[n], m, alpha=self.alpha) for n, m in moved.items()}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model; keep the updated dual variable."""
        dual, w_g = fed.split_prefix(DUAL, client.state)[0], client.received
        dual = {n: g - self.alpha * (client.model.tensor(n) - w_g[n]) for n, g in dual.items()}
        return replace(super().finish(client), state=fed.add_prefix(DUAL, dual))

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move the shift, then the model."""
        model, shift = server["model"], server["shift"]
        if self.alpha:
            for name, tensor in shift.items():
                tensor.add_(aggregate[name] - model[name], alpha=cohort.size / cohort.num_clients)
        super().step(server, aggregate, cohort)
        for name, tensor in shift.items():
            model[name].add_(tensor)
        return {}
