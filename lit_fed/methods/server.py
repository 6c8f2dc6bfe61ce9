r"""The base of methods whose server treats the clients' mean movement as a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 1, describe FedAvg as gradient descent on the server with learning rate 1, along
:math:`\Delta_t = \sum_i p_i (w^i_{t+1} - w_t)`. `lit_fed.methods.fedavgm`, `lit_fed.methods.fedopt`,
`lit_fed.methods.fednova` and `lit_fed.methods.fedexp` step differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.methods.fedavg import FedAvg
from lit_fed.private_names import foreach


class ServerOptimizer(FedAvg):
    r"""A server that adds :math:`\mathrm{movement}(\Delta_t)` to its parameters; subclasses define the movement.

    Buffers, such as batch-norm statistics, are not optimised: the clients' mean replaces them.

    A subclass that keeps further tensors, such as a momentum, names them in `slots`. A name identifies their meaning: a
    run resumed with other slots is refused.

    Logs ``server/update_norm``, the norm of the movement over all parameters.

    Args:
        server_lr: Learning rate η of the server.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the learning rate is not positive.

    Note:
        A late update is a model that started from an earlier global one. Its movement is measured from the present
        one all the same, as FedAvg's mean implies.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    """Tensors that the server keeps for every parameter, see `slot`."""

    def __init__(self, server_lr: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.server_lr = positive("server_lr", server_lr)

    @abstractmethod
    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """The movement of the server's parameters.

        Args:
            server: The server's state.
            delta: The clients' mean movement by parameter name. Parameters that do not travel in this round are
                missing.
            extra: Tensors of the reducer that do not belong to the model.

        Returns:
            The movement of each of these parameters, and metrics by name as tensors of one element.
        """

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start from the task's tensors, with empty slots."""
        return {**super().setup(models, population), **{kind: {} for kind in self.slots}}

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move the parameters, replace the buffers by their mean."""
        model: fed.Tensors = server["model"]
        # In 16-bit precision the server's own tensors are 32-bit: with 16 bits a momentum of 0.99 would not move.
        delta = {
            name: mean.to(torch.promote_types(mean.dtype, torch.float32)) - model[name]
            for name, mean in aggregate.items()
            if name in self.model.parameters
        }
        super().step(server, {n: t for n, t in aggregate.items() if n in model and n not in delta}, cohort)
        movement, metrics = self.movement(server, delta, {n: t for n, t in aggregate.items() if n not in model})
        for name, tensor in movement.items():
            model[name].add_(tensor)
        if movement:
            metrics = {"server/update_norm": norm(movement), **metrics}
        values = torch.stack([metric.double() for metric in metrics.values()]).tolist() if metrics else []
        return dict(zip(metrics, values, strict=True))


class MovementMean(fed.WeightedMean, ABC):
    """The weighted mean of `measured` of the clients' movements, and of all other tensors that they send.

    Args:
        origin: The model that movements are measured from, by name; constant while the reducer works.
        uniform: Weigh every client 1 instead of by ``update.weight``.
    """

    def __init__(self, origin: fed.Tensors, uniform: bool = False) -> None:
        super().__init__(uniform)
        self.origin = origin

    @abstractmethod
    def measured(self, movement: fed.Tensors, payload: fed.Payload) -> fed.Tensors:
        """Tensors to average in place of, or beside, those of a client's payload.

        An integer weight's product with a tensor is exact in float64 if the tensor is in the parameters' type or in
        float32, so that the sum does not depend on the clients' order.
        """

    def add(self, update: fed.ClientUpdate) -> None:
        """Add what is measured of a client's movement, without changing the update."""
        payload: fed.Tensors = dict(update.payload)
        names = [name for name in payload if name in self.origin]
        if names:
            moved = foreach.sub([payload[name].detach() for name in names], [self.origin[n] for n in names])
            payload |= self.measured(dict(zip(names, moved, strict=True)), payload)
        super().add(update.with_payload(payload))


def slot(server: fed.Server, kind: str, delta: Mapping[str, Tensor], start: float = 0.0) -> list[Tensor]:
    """The server's own tensors of one kind, such as momentum, in the order of the movement.

    A parameter's tensor is made when the parameter travels for the first time, and stays as it is in rounds in which it
    does not.

    Args:
        server: The server's state, which holds them.
        kind: Name of the slot, one of `ServerOptimizer.slots`.
        delta: Parameters by name.
        start: Value of a new tensor's entries.
    """
    tensors: fed.Tensors = server[kind]
    for name, tensor in delta.items():
        if name not in tensors:
            tensors[name] = torch.full_like(tensor, start)
    return [tensors[name] for name in delta]


def norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm over all tensors together, in float64."""
    norms: Tensor = torch.stack(foreach.norm(list(tensors.values()), dtype=torch.float64))
    return norms.square().sum().sqrt()


def scaled(tensors: Mapping[str, Tensor], factor: float | Tensor) -> fed.Tensors:
    """Every tensor times a number."""
    return dict(zip(tensors, foreach.mul(list(tensors.values()), factor), strict=True))


def positive(key: str, value: float) -> float:
    """A setting of an algorithm that must be above 0."""
    return check_range(f"algorithm.{key}", value, above=0)


def decay(key: str, value: float) -> float:
    """A setting of an algorithm that must lie in [0, 1)."""
    return check_range(f"algorithm.{key}", value, least=0, below=1)
