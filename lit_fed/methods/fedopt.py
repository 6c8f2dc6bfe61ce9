"""FedAdam, FedYogi and FedAdagrad.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2. The client's half is FedAvg's.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.methods.server import ServerOptimizer, decay, positive, slot
from lit_fed.private_names import foreach


class FedOpt(ServerOptimizer):
    r"""An adaptive server: :math:`w \leftarrow w + \eta\,m / (\sqrt v + \tau)`.

    :math:`m \leftarrow \beta_1 m + (1-\beta_1)\Delta_t`, and the subclasses differ in the update of v. There is no
    correction of the bias, m starts at 0, v at τ², and τ is outside the root, all as in the paper.

    Args:
        server_lr: Learning rate η of the server. One weight moves by about η in a round.
        beta1: Decay β₁ of the first moment.
        tau: Degree of adaptivity τ: the smaller, the more alike all weights move.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Note:
        The algorithm in the paper asks for :math:`v_{-1} \ge \tau^2`; we take equality.
    """

    slots = ("m", "v")

    def __init__(
        self,
        server_lr: float = 0.03,
        beta1: float = 0.9,
        tau: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_lr, **kwargs)
        self.beta1 = decay("beta1", beta1)
        self.tau = positive("tau", tau)

    @abstractmethod
    def accumulate(self, v: list[Tensor], delta: list[Tensor]) -> None:
        """Update the second moments in place."""

    def movement(self, server: fed.Server, delta: fed.Tensors, extra: fed.Payload) -> tuple[fed.Tensors, fed.Tensors]:
        """η m / (√v + τ)."""
        if not delta:
            return {}, {}
        first, second = self.slots
        m, v = slot(server, first, delta), slot(server, second, delta, start=self.tau**2)
        moved = list(delta.values())
        foreach.lerp_(m, moved, 1 - self.beta1)
        self.accumulate(v, moved)
        scale = foreach.add(foreach.sqrt(v), self.tau)
        steps = foreach.mul(foreach.div(m, list(scale)), self.server_lr)
        return dict(zip(delta, steps, strict=True)), {}


class FedAdam(FedOpt):
    r"""Adam on the server: :math:`v \leftarrow \beta_2 v + (1-\beta_2)\Delta_t^2`, the rest as `FedOpt`.

    Args:
        server_lr: Learning rate η of the server. One weight moves by about η in a round.
        beta1: Decay β₁ of the first moment.
        beta2: Decay β₂ of the second moment.
        tau: Degree of adaptivity τ: the smaller, the more alike all weights move.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If a decay is not in [0, 1), or η or τ is not positive.
    """

    def __init__(
        self,
        server_lr: float = 0.03,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_lr, beta1, tau, **kwargs)
        self.beta2 = decay("beta2", beta2)

    def accumulate(self, v: list[Tensor], delta: list[Tensor]) -> None:
        """β₂ v + (1 − β₂) Δ²."""
        foreach.mul_(v, self.beta2)
        foreach.addcmul_(v, delta, delta, value=1 - self.beta2)


class FedYogi(FedAdam):
    r"""Yogi on the server: :math:`v \leftarrow v - (1-\beta_2)\Delta_t^2\,\mathrm{sign}(v - \Delta_t^2)`.

    v grows as Adam's does but shrinks no faster than the movement is large.

    Args:
        server_lr: Learning rate η of the server. One weight moves by about η in a round.
        beta1: Decay β₁ of the first moment.
        beta2: Decay β₂ of the second moment.
        tau: Degree of adaptivity τ: the smaller, the more alike all weights move.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If a decay is not in [0, 1), or η or τ is not positive.
    """

    def accumulate(self, v: list[Tensor], delta: list[Tensor]) -> None:
        """V − (1 − β₂) Δ² sign(v − Δ²)."""
        squares = foreach.mul(delta, delta)
        signs = foreach.sign(foreach.sub(v, squares))
        foreach.addcmul_(v, squares, signs, value=self.beta2 - 1)


class FedAdagrad(FedOpt):
    r"""Adagrad on the server: :math:`v \leftarrow v + \Delta_t^2`, the rest as `FedOpt`.

    Args:
        server_lr: Learning rate η of the server. The first round moves a weight by up to η.
        beta1: Decay β₁ of the first moment; 0 in the paper's experiments (its Appendix D).
        tau: Degree of adaptivity τ: the smaller, the more alike all weights move.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: If the decay is not in [0, 1), or η or τ is not positive.
    """

    slots = ("m", "sum")  # a sum over rounds; a run with a mean such as Adam's v cannot resume from it

    def __init__(
        self,
        server_lr: float = 0.03,
        beta1: float = 0.0,
        tau: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_lr, beta1, tau, **kwargs)

    def accumulate(self, v: list[Tensor], delta: list[Tensor]) -> None:
        """V + Δ²."""
        foreach.addcmul_(v, delta, delta)
