"""pFedMe.

Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import proximal
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.server import positive

OWN = "own."  # in a client's state: its personal model θ


class PFedMe(FedAvg):
    r"""A personal model θ of each client near the global w, lowering :math:`\ell + \tfrac\lambda2 \|\theta - w\|^2`.

    On every batch θ takes K steps, then w one of the task's optimizer along the gradient of the Moreau envelope:

    .. math::

        \theta \leftarrow \theta - \eta_p (\nabla \ell(\theta) + \lambda (\theta - w)), \qquad
        w \leftarrow w - \eta \lambda (w - \theta).

    The server moves :math:`w \leftarrow (1 - \beta) w + \beta \bar w`. Tests use a client's last θ, or w.

    Args:
        lam: λ, the pull between θ and w. As it grows, with :math:`\eta_p = 1/\lambda` and K = 2, this becomes FedAvg.
        personal_steps: K.
        personal_lr: :math:`\eta_p`.
        beta: β.
        weighting: ``uniform`` as in the paper, or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a λ, learning rate or β that is not positive, or less than one step.

    Note:
        θ begins a round at w and goes on from batch to batch, as in the authors' code, so that with K = 1 its gradient
        is one step old. Buffers such as batch norm's see all K passes, and are averaged. β = 0, PFLlib's default, never
        moves the global model and is refused. A regularizer is a term of w's step. ``strategy=ddp`` is refused, because
        θ would differ between processes.
    """

    needs = frozenset({"loss", "whole_batches"})

    def __init__(
        self,
        lam: float = 15.0,
        personal_steps: int = 5,
        personal_lr: float = 0.01,
        beta: float = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting, **kwargs)
        self.personal_steps = check_range("algorithm.personal_steps", personal_steps, least=1)
        self.lam = positive("lam", lam)
        self.personal_lr = positive("personal_lr", personal_lr)
        self.beta = positive("beta", beta)

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """The initial model."""
        return fed.add_prefix(OWN, {name: client.model.initial[name] for name in client.model.split.shared})

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model for training, θ for tests."""
        begun = super().start(client)
        own = fed.split_prefix(OWN, client.state)[0]
        return begun if client.stage == "train" or client.is_new else {**begun, **own}

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """Move θ; then the envelope, whose gradient at w is λ(w − θ)."""
        if client.stage != "train":
            return super().objective(client, batch)
        shared = client.model.split.shared
        own = client.results.get(OWN) or client.model.copy(shared)
        for _ in range(self.personal_steps):
            own = {name: theta.requires_grad_() for name, theta in own.items()}
            with client.muted():
                loss = client.run(batch, own).loss
            if loss is None:
                return super().objective(client, batch)
            found = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                own = {
                    name: theta - self.personal_lr * (gradient + self.lam * (theta - client.model.tensor(name)))
                    for (name, theta), gradient in zip(own.items(), found, strict=True)
                }
        client.results[OWN] = own
        return {"envelope": self.lam * proximal((client.parameters[name] for name in shared), own.values())}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send w; keep θ."""
        own = client.results.get(OWN) or fed.split_prefix(OWN, client.state)[0]
        return replace(super().finish(client), state=fed.add_prefix(OWN, own))

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move by β towards the mean; buffers are the mean."""
        model, shared = server["model"], self.model.split.shared
        moved = {name: torch.lerp(model[name], aggregate[name], self.beta) for name in shared}
        return super().step(server, {**aggregate, **moved}, cohort)
