"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2. The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError
from lit_fed.regularizers import Prox


class FedProx(Classifier):
    r"""A classifier that stays near the global model: :math:`\mathrm{CE} + \tfrac{\mu}{2}\|w - w_g\|^2`.

    The distance runs over the parameters that the server sent. Under a plain ``lightning.Trainer``, where nothing is
    received, the term is absent.

    Args:
        mu: Weight μ of the proximal term; 0 is FedAvg.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative μ.
    """

    def __init__(self, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if mu < 0:
            raise ConfigError(f"model.mu is {mu}; the proximal weight must not be negative")
        self.regularizers.insert(0, Prox(weight=mu))
