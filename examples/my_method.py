"""Bring your own method, both halves in one file: clients that stay near the global model, a server with momentum.

Run it with ``python cli.py fit -c configs/quickstart.yaml -c examples/my_method.yaml``.

The server follows Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (FedAvgM); the client's term is FedProx's. With ``mu=0`` and ``momentum=0`` this is FedAvg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_fed import Classifier, Payload
from lit_fed.losses import proximal
from lit_fed.methods import FedAvg


class Anchored(Classifier):
    r"""The client's half: :math:`\mathrm{CE} + \mu \cdot \tfrac12 \|w - w_g\|^2`.

    Args:
        mu: Weight of the distance to the global model.
        kwargs: Passed on to `lit_fed.Classifier`.
    """

    def __init__(self, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mu = mu

    def loss_terms(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Every term is logged by its name, ``train/anchor``, and added to the loss."""
        terms = super().loss_terms(batch)
        if self.received:  # empty under a plain lightning.Trainer
            own = dict(self.named_parameters())
            terms["anchor"] = self.mu * proximal(own.values(), (self.received[name] for name in own))
        return terms


class MomentumServer(FedAvg):
    r"""The server's half: :math:`v \leftarrow \beta v + (\bar w - w)`, then :math:`w \leftarrow w + v`.

    Args:
        momentum: β.
        kwargs: Passed on to `lit_fed.methods.FedAvg`.
    """

    def __init__(self, momentum: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = momentum
        self.velocity: dict[str, Tensor] = {}

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        """Move the global model; what is returned is logged with the round."""
        for name, mean in aggregate.items():
            before = self.velocity.get(name, torch.zeros_like(mean))
            self.velocity[name] = self.momentum * before + mean - self.state[name]
            self.state[name] += self.velocity[name]
        return {"server/velocity_norm": float(torch.stack([v.norm() for v in self.velocity.values()]).norm())}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the global model."""
        return super().state_dict() | {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        super().load_state_dict(state)
        self.velocity = {name: saved.to(self.state[name].device) for name, saved in state["velocity"].items()}
