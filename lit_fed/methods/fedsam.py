"""FedSAM and MoFedSAM.

Qu, Li, Duan, Liu, Tang, Lu: "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg

MOVEMENT = "movement."  # in the broadcast: Δ
DISTANCE = "distance"  # in the payload: ηK
_SMALLEST_NORM = 1e-12


class FedSAM(FedAvg):
    r"""Clients step along the gradient at perturbed weights, :math:`\nabla f(w + \rho\, g / \|g\|)`.

    :math:`g = \nabla f(w)`, and f is the method's objective with its regularizer, on the same batch in both passes. The
    perturbed weights are a worst case within a distance of ρ, so the step leads to flat minima. The server averages.

    Both passes draw the same random numbers, so dropout has the same masks; only the first pass, at w, moves buffers
    such as batch-norm statistics, and only it logs the task's values. ``train/loss`` is the perturbed one.

    Args:
        rho: Radius ρ of the perturbation; 0 is FedAvg.
        weighting: ``uniform`` as in the paper, or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative ρ.

    Note:
        Public code draws other dropout masks in the second pass and moves the batch-norm statistics in both. A step
        costs two passes. The norm is over all trainable parameters together. The paper's learning rate of the
        server is 1.
    """

    needs = frozenset({"loss", "whole_batches"})
    share = 1.0
    """Weight of the gradient at the perturbed weights; the rest is of the gradient at w."""

    def __init__(self, rho: float = 0.1, weighting: Literal["samples", "uniform"] = "uniform", **kwargs: Any) -> None:
        super().__init__(weighting=weighting, **kwargs)
        self.rho = check_range("algorithm.rho", rho, least=0)

    def terms(self, client: fed.Client, batch: Any, public: bool = False) -> fed.Terms:
        """The objective at the perturbed weights."""
        if not self.rho or public:
            return super().terms(client, batch, public)
        with client.rehearsed():
            here = super().terms(client, batch)
        if any(cast("Tensor | None", term) is None for term in here.values()):  # the task skips the batch
            return here
        gradients = client.gradients(torch.stack(list(here.values())).sum(), keep_graph=self.share < 1)
        buffers = client.model.copy(client.model.buffers)
        ahead = {name: client.parameters[name] + step for name, step in self.ascent(client, gradients).items()}
        with client.muted(), client.at({**buffers, **ahead}):
            there = super().terms(client, batch)
        if self.share == 1:
            return there
        return {name: self.share * term + (1 - self.share) * here[name] for name, term in there.items()}

    def ascent(self, client: fed.Client, gradients: fed.Tensors) -> fed.Tensors:
        """The perturbation by parameter name, from the gradients at w."""
        return scaled_to(self.rho, gradients)


class MoFedSAM(FedSAM):
    r"""FedSAM along the momentum of all clients: :math:`v = \alpha \tilde g + (1 - \alpha)\Delta`.

    :math:`\tilde g` is the gradient at the perturbed weights and Δ the clients' mean gradient of the round before:
    :math:`\Delta \leftarrow \frac{1}{|S|}\sum_{i \in S} (w_g - w_i) / (\eta K)`, for K steps at learning rate η.

    Args:
        rho: ρ, see `FedSAM`; 0 is FedCM.
        alpha: α in (0, 1], the weight of a client's own gradient; 1 is FedSAM.
        weighting: ``uniform`` as in the paper, or ``samples``.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative ρ, α outside of (0, 1], or an optimizer other than ``torch.optim.SGD``.

    Note:
        Where clients take different numbers of steps, Δ is the clients' mean movement over their mean ηK. The paper's α
        is called β.
    """

    needs = FedSAM.needs | {"one_optimizer", "linear_steps"}

    def __init__(
        self,
        rho: float = 0.1,
        alpha: float = 0.1,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(rho, weighting, **kwargs)
        self.alpha = check_range("algorithm.alpha", alpha, above=0, most=1)

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with Δ = 0."""
        server = super().setup(models, population)
        return {**server, "movement": fed.zeros_like(self.model.tensors(self.model.split.shared))}

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model and, for training, Δ."""
        model = super().broadcast(server, round_idx, kind, stage)
        return {**model, **fed.add_prefix(MOVEMENT, server["movement"])} if stage == "train" else model

    def correct(self, client: fed.Client, gradients: fed.Tensors) -> fed.Tensors:
        """Mix each gradient with Δ."""
        movement, _ = fed.split_prefix(MOVEMENT, client.received)
        mixed = {n: self.alpha * gradients[n] + (1 - self.alpha) * d for n, d in movement.items() if n in gradients}
        return {**gradients, **mixed}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model and ηK."""
        made = super().finish(client)
        exact = torch.promote_types(next(iter(client.parameters.values())).dtype, torch.float32)
        distance = torch.tensor(client.steps.distance, device=client.device, dtype=exact)
        return replace(made, payload={**made.payload, DISTANCE: distance})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Measure Δ, then average."""
        model = {name: tensor for name, tensor in aggregate.items() if name != DISTANCE}
        for name, movement in server["movement"].items():
            movement.copy_((server["model"][name] - model[name]) / aggregate[DISTANCE])
        return super().step(server, model, cohort)


def scaled_to(length: float, tensors: fed.Tensors) -> fed.Tensors:
    """Tensors scaled to a norm over all of them together; 0 where they are."""
    norm = torch.stack([tensor.norm() for tensor in tensors.values()]).norm().clamp_min(_SMALLEST_NORM)
    return {name: length * tensor / norm for name, tensor in tensors.items()}
