"""Ditto.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
The server is FedAvg's.
"""

from __future__ import annotations

from typing import Any

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import proximal
from lit_fed.methods.fedavg import FedAvg

OWN = "own."  # in a client's state: its personal model v


class Ditto(FedAvg):
    r"""Every client has two models: the global model, trained as in FedAvg, and a personal model.

    After the global model's local work the client's personal model v trains on :math:`\ell(v) + \tfrac{\lambda}{2}\|v -
    w_g\|^2`, ℓ the task's own loss, from where the client left it. The global model is exactly FedAvg's. Tests use the
    personal model.

    Args:
        lam: λ, the strength of the pull towards the global model.
        own_epochs: Passes over the client's data for the own model; null for the global model's epochs or steps.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative λ or less than one epoch.
    """

    needs = frozenset({"loss"})

    def __init__(self, lam: float = 0.75, own_epochs: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam = check_range("algorithm.lam", lam, least=0)
        check_range("algorithm.own_epochs", own_epochs, least=1, null="for the global model's epochs or steps")
        self.own_epochs = own_epochs

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """The initial model."""
        return fed.add_prefix(OWN, client.model.initial)

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model for training, the client's own for tests."""
        return super().start(client) if client.stage == "train" else fed.split_prefix(OWN, client.state)[0]

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The global model, then the own one."""
        phases = super().phases(client)
        if client.stage != "train":
            return phases
        epochs, steps = (client.work.epochs, client.work.steps) if self.own_epochs is None else (self.own_epochs, None)
        begin = fed.split_prefix(OWN, client.state)[0]
        return [*phases, fed.Phase("own", client.train_loader(), epochs=epochs, steps=steps, begin=begin)]

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, and for the own model its distance to the global one."""
        terms = super().objective(client, batch)
        if client.phase != "own":
            return terms
        w_g = client.anchor
        return {**terms, "distance": self.lam * proximal((client.parameters[n] for n in w_g), w_g.values())}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the trained global model; keep the own model."""
        trained = {name: client.left[name] for name in client.model.shared_names("up")}
        return fed.Update(trained, fed.add_prefix(OWN, client.model.tensors()))
