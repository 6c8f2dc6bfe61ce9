r"""The base of servers that take the clients' mean movement for a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 1, says it this way: FedAvg is gradient descent on the server with learning rate 1, along
:math:`\Delta_t = \sum_i p_i (w^i_{t+1} - w_t)`. `lit_fed.methods.fedavgm`, `lit_fed.methods.fedopt`,
`lit_fed.methods.fednova` and `lit_fed.methods.fedexp` step otherwise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Fabric
from torch import Tensor

from lit_fed.client import ClientModule
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.engine.payload import Payload

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


class ServerOptimizer(FedAvg):
    r"""A server that adds :math:`\mathrm{movement}(\Delta_t)` to its parameters; subclasses say which.

    Buffers, such as batch-norm statistics, are no point of a loss surface: they are replaced by their mean.

    Logs ``server/update_norm``, the norm of what was added over all parameters.

    Args:
        server_lr: Learning rate η of the server.
        weighting: ``samples`` weighs a client by its number of training samples, ``uniform`` all alike.

    Raises:
        ConfigError: If the learning rate is not positive, or for another weighting.

    Note:
        A late update is a model that started from an earlier global one. Its movement is measured from the present
        one all the same, as FedAvg's mean implies.
    """

    def __init__(self, server_lr: float = 1.0, weighting: Literal["samples", "uniform"] = "samples") -> None:
        super().__init__(weighting)
        self.server_lr = positive("server_lr", server_lr)
        self.slots: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def movement(self, delta: dict[str, Tensor], extra: Payload) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the server adds to its parameters.

        Args:
            delta: The clients' mean movement by parameter name. Parameters that do not travel in this round are
                missing.
            extra: What the reducer gave that is no part of the model.

        Returns:
            The movement of each of these parameters, and metrics by name as tensors of one element.
        """

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start from the module's tensors, with empty slots."""
        super().setup(module, data, fabric)
        self.slots = {}

    def slot(self, kind: str, delta: Mapping[str, Tensor], start: float = 0.0) -> list[Tensor]:
        """The server's own tensors of one kind, such as momentum, in the order of the movement.

        A parameter's tensor is made when the parameter travels for the first time, and stays as it is in rounds in
        which it does not.

        Args:
            kind: Name of the slot.
            delta: Parameters by name.
            start: What a new tensor is filled with.
        """
        tensors = self.slots.setdefault(kind, {})
        for name, tensor in delta.items():
            if name not in tensors:
                tensors[name] = torch.full_like(tensor, start)
        return [tensors[name] for name in delta]

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        """Move the parameters, replace the buffers by their mean."""
        parameters = self.module.layout.parameters
        # In 16-bit precision the server's own tensors are 32-bit: a momentum of 0.99 would not move otherwise.
        delta = {
            name: mean.to(torch.promote_types(mean.dtype, torch.float32)) - self.state[name]
            for name, mean in aggregate.items()
            if name in parameters
        }
        super().step({n: t for n, t in aggregate.items() if n in self.state and n not in delta}, round_idx, num_clients)
        movement, metrics = self.movement(delta, {n: t for n, t in aggregate.items() if n not in self.state})
        for name, tensor in movement.items():
            self.state[name].add_(tensor)
        if movement:
            metrics = {"server/update_norm": norm(movement), **metrics}
        values = torch.stack([metric.double() for metric in metrics.values()]).tolist() if metrics else []
        return dict(zip(metrics, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The global model and the slots."""
        return super().state_dict() | {"slots": self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            CheckpointError: If it was saved from another model, or by a method without slots.
        """
        super().load_state_dict(state)
        if "slots" not in state:
            raise CheckpointError(f"the checkpoint was saved by another method than {type(self).__name__}")
        saved: dict[str, dict[str, Tensor]] = state["slots"]
        for kind, tensors in saved.items():
            for name, tensor in tensors.items():
                if name not in self.state or tensor.shape != self.state[name].shape:
                    raise CheckpointError(
                        f"the checkpoint was saved from another model: its {kind} of {name!r} does not fit"
                    )
        self.slots = {
            kind: {name: tensor.to(self.state[name].device, copy=True) for name, tensor in tensors.items()}
            for kind, tensors in saved.items()
        }


def norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm over all tensors together, in float64."""
    norms: Tensor = torch.stack(torch._foreach_norm(list(tensors.values()), dtype=torch.float64))
    return norms.square().sum().sqrt()


def scaled(tensors: Mapping[str, Tensor], factor: float | Tensor) -> dict[str, Tensor]:
    """Every tensor times a number."""
    return dict(zip(tensors, torch._foreach_mul(list(tensors.values()), factor), strict=True))


def positive(key: str, value: float) -> float:
    """A setting of an algorithm that must be above 0.

    Raises:
        ConfigError: If it is not.
    """
    if not value > 0:
        raise ConfigError(f"algorithm.{key} is {value}; it must be positive")
    return value


def decay(key: str, value: float) -> float:
    """A setting of an algorithm that must lie in [0, 1).

    Raises:
        ConfigError: If it does not.
    """
    if not 0 <= value < 1:
        raise ConfigError(f"algorithm.{key} is {value}; it must be at least 0 and below 1")
    return value
