"""MOON.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. The server is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import model_contrast
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.regularizers import features, taught_features
from lit_fed.methods.server import positive

PREVIOUS = "previous."  # in a client's state: its model after its last round


class Moon(FedAvg):
    r"""Pulls a client's features towards the global model's and away from its previous model's.

    :math:`\ell + \mu\,\ell_{con}`, ℓ the task's own loss, see `lit_fed.losses.model_contrast`. In its first
    round, a client's previous model is the initial model. Under a plain ``lightning.Trainer`` the term is
    absent.

    Args:
        mu: Weight μ of the contrast; 0 is FedAvg.
        temperature: τ.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative μ or a temperature that is not positive.

    Note:
        The representation z is the input of the task's head. The paper adds a projection head of two layers before it;
        to reproduce it, use a network with such a projection.
    """

    needs = frozenset({"loss", "features", "body"})

    def __init__(self, mu: float = 0.1, temperature: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.contrast = Contrast(check_range("algorithm.mu", mu, least=0), positive("temperature", temperature))

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """The initial model."""
        return fed.add_prefix(PREVIOUS, {name: client.model.initial[name] for name in _unfrozen(client.model)})

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss and the contrast."""
        return self.contrast.terms(client, batch, super().objective)

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model, and keep it as the previous one."""
        previous = client.model.tensors(_unfrozen(client.model))
        return replace(super().finish(client), state=fed.add_prefix(PREVIOUS, previous))


class Contrast(fed.Regularizer):
    """The contrast between the global and the client's previous model.

    Args:
        weight: The term's weight.
        temperature: τ.
    """

    name = "contrast"
    needs = frozenset({"loss", "features", "body"})

    def __init__(self, weight: float, temperature: float) -> None:
        super().__init__(weight)
        self.temperature = temperature

    def term(self, client: fed.Client, batch: Any) -> Tensor:
        """The mean over the batch."""
        previous = fed.split_prefix(PREVIOUS, client.state)[0]
        near, far = taught_features(client, batch), taught_features(client, batch, previous)
        return model_contrast(features(client, batch), near, far, self.temperature)


def _unfrozen(model: fed.Model) -> Iterable[str]:
    return (name for name in model.names if name not in model.split.frozen)
