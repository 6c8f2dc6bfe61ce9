"""Bring your own method, both halves in one file: clients that stay near the global model, a server with momentum.

Run it with ``python cli.py fit -c configs/quickstart.yaml -c examples/my_method.yaml``.

The server follows Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (FedAvgM); the client's term is FedProx's. With ``mu=0`` and ``momentum=0`` this is FedAvg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_fed import Client, Cohort, Payload
from lit_fed.losses import proximal
from lit_fed.methods import FedAvg


class Anchored(FedAvg):
    r"""Clients minimise :math:`\ell + \mu \cdot \tfrac12 \|w - w_g\|^2`, ℓ the task's own loss.

    The server moves :math:`v \leftarrow \beta v + (\bar w - w)`, then :math:`w \leftarrow w + v`.

    Args:
        mu: Weight of the distance to the global model.
        momentum: β.
        kwargs: The settings of `lit_fed.methods.FedAvg`.
    """

    needs = frozenset({"loss"})

    def __init__(self, mu: float = 0.01, momentum: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mu = mu
        self.momentum = momentum

    def setup(self, *args: Any) -> dict[str, Any]:
        """The server's state: what a checkpoint holds and a resumed run goes on with."""
        server = super().setup(*args)
        return {**server, "velocity": {name: torch.zeros_like(server["model"][name]) for name in self.model.parameters}}

    def objective(self, client: Client, batch: Any) -> dict[str, Tensor]:
        """Every term is logged by its name, ``train/anchor``, and added to the loss."""
        terms = super().objective(client, batch)
        if client.anchor:  # empty under a plain lightning.Trainer
            own = (client.parameters[name] for name in client.anchor)
            terms["anchor"] = self.mu * proximal(own, client.anchor.values())
        return terms

    def step(self, server: dict[str, Any], aggregate: Payload, cohort: Cohort) -> dict[str, float]:
        """Move the global model; what is returned is logged with the round."""
        model, velocity = server["model"], server["velocity"]
        super().step(server, {n: mean for n, mean in aggregate.items() if n not in velocity}, cohort)  # buffers
        for name, v in velocity.items():
            v.mul_(self.momentum).add_(aggregate[name] - model[name])
            model[name].add_(v)
        return {"server/velocity_norm": float(torch.stack([v.norm() for v in velocity.values()]).norm())}
