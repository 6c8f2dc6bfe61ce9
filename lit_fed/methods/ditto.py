"""Ditto.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
The server is FedAvg's: `lit_fed.methods.fedavg.FedAvg`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, Phase
from lit_fed.errors import ConfigError
from lit_fed.losses import proximal
from lit_fed.engine.payload import ClientUpdate, Payload, add_prefix, split_prefix

OWN = "own."  # in a client's state: its personal model v


class Ditto(Classifier):
    r"""A client with two models: the global one, trained as in FedAvg, and its own.

    After the global model's local work the client's own model v trains on
    :math:`\mathrm{CE}(v) + \tfrac{\lambda}{2}\|v - w_g\|^2`, from where the client left it. The global model is exactly
    FedAvg's. Where a client is tested, it is its own model that is.

    Args:
        lam: λ, how strongly the own model is drawn to the global one.
        own_epochs: Passes over the client's data for the own model; null for as many epochs or steps as the global one.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative λ or less than one epoch.
    """

    def __init__(self, lam: float = 0.75, own_epochs: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if lam < 0:
            raise ConfigError(f"model.lam is {lam}; it must not be negative")
        if own_epochs is not None and own_epochs < 1:
            raise ConfigError(f"model.own_epochs is {own_epochs}; it must be at least 1")
        self.lam = lam
        self.own_epochs = own_epochs
        self._own: dict[str, Tensor] = {}
        self._global: dict[str, Tensor] = {}  # the global model after local work

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """The global model, then the own one."""
        phases = super().phases(ctx)
        if ctx.stage != "train":
            return phases
        if self.own_epochs is not None:
            return [*phases, Phase("own", ctx.train_loader(), epochs=self.own_epochs)]
        return [*phases, Phase("own", ctx.train_loader(), epochs=self.local_epochs, steps=self.local_steps)]

    def receive(self, payload: Payload) -> None:
        """Start from the global model where it trains, from the client's own where the client is tested."""
        trains = self.ctx is not None and self.ctx.stage == "train"
        super().receive(payload if trains else self._own)

    def on_phase_start(self, phase: Phase) -> None:
        """Put the trained global model aside and take up the own one."""
        if phase.name == "own":
            self._global = {name: tensor.clone() for name, tensor in self.shared_tensors().items()}
            self.load_tensors(self._own)

    def loss_terms(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The objective, and for the own model its distance to the global one."""
        if self.ctx is None or self.ctx.phase != "own":
            return super().loss_terms(batch)
        x, y = batch
        names = self.layout.split.shared
        own = (self.layout.parameters[name] for name in names)
        terms = self.objective(self.outputs(x), y)
        return terms | {"distance": self.lam * proximal(own, (self.received[name] for name in names))}

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """The global model as the client trained it."""
        return ClientUpdate(ctx.client_id, self._global, weight=ctx.num_samples)

    def client_state_dict(self) -> dict[str, Tensor]:
        """The own model, beside what else the client keeps."""
        return super().client_state_dict() | add_prefix(OWN, self.tensors(self.state_names()))

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        """Bring the own model back."""
        self._own, rest = split_prefix(OWN, state)
        super().load_client_state_dict(rest)

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        """The initial model."""
        return super().initial_client_state(client_id) | add_prefix(OWN, self.initial_tensors)
