"""FedNTD.

Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import NTD
from lit_fed.methods.server import positive


class FedNTD(FedAvg):
    r"""The task's loss and distillation of the not-true classes: :math:`\ell + \beta\,\mathrm{NTD}_\tau`.

    The teacher is the downloaded global model. Under a plain ``lightning.Trainer`` the term is absent.

    Args:
        beta: Weight β of the distillation; 0 is FedAvg.
        temperature: τ.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative β or a temperature that is not above 0.
    """

    needs = NTD.needs

    def __init__(self, beta: float = 1.0, temperature: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distillation = NTD(check_range("algorithm.beta", beta, least=0), positive("temperature", temperature))

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss and the distillation."""
        return self.distillation.terms(client, batch, super().objective)
