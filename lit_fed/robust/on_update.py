"""Attacks by a client's own finished update."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.wrapper import Surroundings
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.errors import ConfigError
from lit_fed.robust.attack import Attacker


class _OnUpdate(Attacker):
    """Attackers that change the difference between their payload and the broadcast.

    Averaged buffers and integer tensors are sent as they are.
    """

    @override
    def setup(self, around: Surroundings) -> dict[str, Any]:
        check_sends(self, around)
        self._buffers = around.averaged
        return super().setup(around)

    @override
    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        if update.client_id not in self.attackers:
            return update
        generator, payload = client.generator("attack"), dict(update.payload)
        for name, tensor in update.payload.items():
            if tensor.is_floating_point() and name not in self._buffers:
                sent = tensor.detach().double()
                origin = client.received[name].double() if name in client.received else torch.zeros_like(sent)
                payload[name] = (origin + self.change(sent - origin, generator)).to(tensor.dtype)
        return update.with_payload(payload)

    @abstractmethod
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        """The difference that is sent in place of a tensor's own, in float64."""


class Scaling(_OnUpdate):
    """Sends the difference times a factor.

    Bagdasaryan, Veit, Hua, Estrin, Shmatikov: "How To Backdoor Federated Learning", AISTATS 2020 (model replacement).

    Args:
        factor: The factor.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, factor: float = 10.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.factor", factor)
        self.factor = factor

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        return moved * self.factor


class SignFlip(_OnUpdate):
    """Sends the opposite of the difference.

    Li, Xu, Chen, Giannakis, Ling: "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
    Heterogeneous Datasets", AAAI 2019.

    Args:
        factor: Length of the sent difference, relative to the honest one.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.factor", factor, above=0)
        self.factor = factor

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        return -self.factor * moved


class GaussianNoise(_OnUpdate):
    """Sends noise in place of the difference, drawn from the run's seed, the round and the client.

    Args:
        std: Standard deviation of every coordinate.
        kwargs: The attackers, as for `lit_fed.robust.attack.Attacker`.
    """

    def __init__(self, std: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("trainer.attack.std", std, above=0)
        self.std = std

    @override
    def change(self, moved: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(moved.shape, generator=generator, dtype=torch.float64)
        return noise.to(moved.device) * self.std


def check_sends(attack: Attacker, around: Surroundings) -> None:
    """Refuse an attack on updates where clients send nothing."""
    if not around.layout(around.broadcast):
        raise ConfigError(
            f"trainer.attack {type(attack).__name__} changes updates, and clients of "
            f"{type(around.algorithm).__name__} send nothing; choose another attack"
        )
