"""FedNTD.

Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, Algorithm 1. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.regularizers import NTD


class FedNTD(Classifier):
    r"""Cross-entropy and distillation of the not-true classes: :math:`\mathrm{CE} + \beta\,\mathrm{NTD}_\tau`.

    The teacher is the downloaded global model. Under a plain ``lightning.Trainer`` the term is absent.

    Args:
        beta: Weight β of the distillation; 0 is FedAvg.
        temperature: τ.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative β or a temperature that is not positive.
    """

    def __init__(self, beta: float = 1.0, temperature: float = 3.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.regularizers.insert(0, NTD(beta, temperature))
