"""FedAMP.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
Algorithm 1 with the attention A(x) = 1 − exp(−x/σ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import proximal
from lit_fed.methods.last_models import LastModels


class FedAMP(LastModels):
    r"""Each client has its own model, drawn to those of clients with similar models.

    The server addresses to client i

    .. math:: u_i = \Bigl(1 - \sum_{j \ne i} \xi_{ij}\Bigr) w_i + \sum_{j \ne i} \xi_{ij} w_j, \qquad
        \xi_{ij} = \frac{\alpha}{\sigma} \exp\Bigl(-\frac{\|w_i - w_j\|^2}{\sigma}\Bigr),

    of the clients' last models w, and the client trains its own model on :math:`\ell(w) + \tfrac{\lambda}{2\alpha}
    \|w - u_i\|^2`. λ = 0 is `lit_fed.methods.LocalOnly`. Clients are tested with their own models.

    The server keeps the last model of every client, n models in memory and in every checkpoint, and reads all of them
    for each u_i. Buffers stay with the clients.

    Args:
        lam: λ.
        alpha: α; with α(n − 1) > σ a client's weight of its own model may be negative.
        sigma: σ, the squared distance at which the attention falls to 1/e.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.

    Note:
        A client begins where its own model is, as in PFLlib; the paper's proximal step does not depend on its start. α
        does not decay. A client that has not taken part is in nobody's sum, and its own last model is the initial one.
        PFLlib sums over the round's clients only, and takes the distance where the paper has its square in the penalty.
    """

    needs = frozenset({"loss"})

    def __init__(self, lam: float = 1.0, alpha: float = 1.0, sigma: float = 25.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam = check_range("algorithm.lam", lam, least=0)
        self.alpha = check_range("algorithm.alpha", alpha, above=0)
        self.sigma = check_range("algorithm.sigma", sigma, above=0)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """The initial model for every client; say where models are extrapolated."""
        if (most := self.alpha * (population.num_clients - 1) / self.sigma) > 1:
            population.say(
                f"algorithm.alpha · (clients − 1) / algorithm.sigma is {most:.3g}: above 1 the models of clients that "
                "are alike are not mixed but extrapolated; lower alpha, or raise sigma"
            )
        return super().setup(models, population)

    # ------------------------------------------------------------------ client

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, and in training the distance to u."""
        terms, u = super().objective(client, batch), client.addressed
        if not u or not self.lam:
            return terms
        distance = proximal((client.parameters[name] for name in u), u.values())
        return {**terms, "distance": self.lam / self.alpha * distance}

    # ------------------------------------------------------------------ server

    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """U in training; nothing for tests."""
        if stage != "train":
            return {}
        last: fed.Tensors = server["last"]
        distances = torch.stack([_square_distances(stack, client_id) for stack in last.values()]).sum(0)
        xi = server["seen"] * (self.alpha / self.sigma) * torch.exp(-distances / self.sigma)
        xi[client_id] = 0.0
        xi[client_id] = 1.0 - xi.sum()
        return {name: torch.tensordot(xi.to(stack.dtype), stack, 1) for name, stack in last.items()}


def _square_distances(stack: Tensor, place: int) -> Tensor:
    """Squared distances of every client's tensor (n, …) to one's, (n,) in float64."""
    moved = (stack - stack[place]).reshape(len(stack), -1)
    distances: Tensor = torch.linalg.vector_norm(moved, dim=1, dtype=torch.float64).square()
    return distances
