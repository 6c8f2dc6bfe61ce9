"""Bring your own method, both halves in one class: clients that stay near the global model, a server with momentum.

Run it with ``lit-fed fit -c configs/quickstart.yaml -c examples/my_method.yaml``.

The server follows Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (FedAvgM); the client's term is FedProx's. With ``mu=0`` and ``momentum=0`` this is FedAvg.
"""

from __future__ import annotations

from typing import Any

import torch

import lit_fed.algorithm as fed
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
        self.mu, self.momentum = mu, momentum

    def setup(self, *args: Any) -> fed.Server:
        """The server's state: what a checkpoint holds and a resumed run goes on with."""
        server = super().setup(*args)
        return {**server, "velocity": fed.zeros_like(self.model.tensors(self.model.split.shared))}

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """Every term is logged by its name, ``train/anchor``, and added to the loss."""
        terms = super().objective(client, batch)
        if anchor := client.anchor:  # empty under a plain lightning.Trainer
            terms["anchor"] = self.mu * proximal((client.parameters[name] for name in anchor), anchor.values())
        return terms

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move the global model; what is returned is logged with the round."""
        velocity = server["velocity"]
        for name, v in velocity.items():
            v.mul_(self.momentum).add_(aggregate[name] - server["model"][name])
        moved = {name: server["model"][name] + v for name, v in velocity.items()}
        super().step(server, {**aggregate, **moved}, cohort)  # buffers are replaced by their mean
        return {"server/velocity_norm": float(torch.stack([v.norm() for v in velocity.values()]).norm())}
