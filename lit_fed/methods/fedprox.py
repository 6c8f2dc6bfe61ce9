"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import Prox


class FedProx(FedAvg):
    r"""Clients stay near the global model: :math:`\ell + \tfrac{\mu}{2}\|w - w_g\|^2`, with ℓ the task's own loss.

    The distance is over the parameters from the server. Under a plain ``lightning.Trainer``, which receives nothing,
    the term is absent.

    Args:
        mu: Weight μ of the proximal term; 0 is FedAvg.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative μ.
    """

    needs = frozenset({"loss"})

    def __init__(self, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prox = Prox(weight=check_range("algorithm.mu", mu, least=0))

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss and the distance to the global model."""
        return self.prox.terms(client, batch, super().objective)
