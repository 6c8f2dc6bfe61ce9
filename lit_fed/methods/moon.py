"""MOON.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. The server is FedAvg's:
`lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError
from lit_fed.losses import model_contrast
from lit_fed.networks import Outputs
from lit_fed.engine.payload import add_prefix, split_prefix
from lit_fed.regularizers import Regularizer

PREVIOUS = "previous."  # in a client's state: its model as it last left it


class Moon(Classifier):
    r"""A classifier whose features are drawn to the global model's and away from its own previous model's.

    :math:`\mathrm{CE} + \mu\,\ell_{con}`, see `lit_fed.losses.model_contrast`. A client that takes part for the first
    time has the initial model as its previous one. Under a plain ``lightning.Trainer`` the term is absent.

    Args:
        mu: Weight μ of the contrast; 0 is FedAvg.
        temperature: τ.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative μ or a temperature that is not positive.

    Note:
        The representation z is what the network's last layer sees. The paper adds a projection head of two layers
        before it, which changes the network; give a network that has one to reproduce that.
    """

    def __init__(self, mu: float = 0.1, temperature: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if temperature <= 0:
            raise ConfigError(f"model.temperature is {temperature}; it must be positive")
        self.regularizers.insert(0, _Contrast(mu, temperature))
        self.previous: dict[str, Tensor] = {}

    def client_state_dict(self) -> dict[str, Tensor]:
        """The client's model as it leaves it, beside what else it keeps."""
        return super().client_state_dict() | add_prefix(PREVIOUS, self.tensors(self._kept()))

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        """Bring the previous model back."""
        self.previous, rest = split_prefix(PREVIOUS, state)
        super().load_client_state_dict(rest)

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        """The initial model."""
        initial = {name: self.initial_tensors[name] for name in self._kept()}
        return super().initial_client_state(client_id) | add_prefix(PREVIOUS, initial)

    def _kept(self) -> list[str]:
        return [name for name in self.state_names() if name not in self.layout.split.frozen]


class _Contrast(Regularizer):
    name = "contrast"
    uses_features = True

    def __init__(self, weight: float, temperature: float) -> None:
        super().__init__(weight)
        self.temperature = temperature

    def term(self, module: Classifier, x: Tensor, outputs: Outputs, y: Tensor) -> Tensor:
        assert isinstance(module, Moon)
        near, far = module.teach(x).features, module.teach(x, module.previous).features
        assert outputs.features is not None
        assert near is not None
        assert far is not None
        return model_contrast(outputs.features, near, far, self.temperature)
