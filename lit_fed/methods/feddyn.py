"""FedDyn.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, ClientModule
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.engine.payload import ClientUpdate, Payload, add_prefix, split_prefix

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

DUAL = "dual."  # in a client's state: ∇L_k, the gradient of its loss where it last stopped


class FedDyn(Classifier):
    r"""A client with a linear and a quadratic term, :math:`L_k(w) - \langle g_k, w\rangle + \tfrac\alpha2\|w-w_g\|^2`.

    After local work :math:`g_k \leftarrow g_k - \alpha (w_k - w_g)`, which is the gradient of :math:`L_k` at
    :math:`w_k` where the local problem was solved exactly.

    Args:
        alpha: Weight α of the dynamic regularisation, the server's too; 0 is FedAvg.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For a negative α.

    Note:
        The terms enter as their gradient, :math:`-g_k + \alpha (w - w_g)`, so they are not in ``train/loss``.
    """

    def __init__(self, alpha: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if alpha < 0:
            raise ConfigError(f"model.alpha is {alpha}; it must not be negative")
        self.alpha = alpha
        self._dual: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the gradient of the two terms."""
        super().on_before_optimizer_step(optimizer)
        if self.ctx is None or self.ctx.stage != "train" or not self.alpha:
            return
        gradients = {name: self.layout.parameters[name].grad for name in self._dual}
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if present:
            found = list(present.values())
            moved = torch._foreach_sub([self.tensor(name) for name in present], [self.received[n] for n in present])
            torch._foreach_sub_(found, [self._dual[name] for name in present])
            torch._foreach_add_(found, moved, alpha=self.alpha)

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """The model; the dual variable takes its step."""
        self._dual = {n: g - self.alpha * (self.tensor(n) - self.received[n]) for n, g in self._dual.items()}
        return super().make_update(ctx)

    def client_state_dict(self) -> dict[str, Tensor]:
        """The client's dual variable, beside what else it keeps."""
        return super().client_state_dict() | add_prefix(DUAL, self._dual)

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        """Bring the dual variable back."""
        self._dual, rest = split_prefix(DUAL, state)
        super().load_client_state_dict(rest)

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        """A dual variable of zeros."""
        zeros = {name: torch.zeros_like(self.tensor(name)) for name in self.layout.split.shared}
        return super().initial_client_state(client_id) | add_prefix(DUAL, zeros)


class FedDynServer(FedAvg):
    r"""Averages the models and subtracts what the clients are biased by.

    :math:`h \leftarrow h - \frac{\alpha}{m}\sum_{k\in P}(w_k - w_g)` and
    :math:`w_g \leftarrow \frac{1}{|P|}\sum_{k\in P} w_k - \frac{1}{\alpha} h`, with m the number of clients in the
    population. α is the clients'.

    Args:
        weighting: ``uniform`` as in the paper; ``samples`` weighs the mean, in both formulas.

    Note:
        The server keeps :math:`h/\alpha`, which needs no α: its step is then
        :math:`w_g \leftarrow \bar w + s`, :math:`s \leftarrow s + \frac{|P|}{m}(\bar w - w_g)`. For α = 0, where the
        paper's formula is 0/0, h is 0 and stays it: FedAvg.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform") -> None:
        super().__init__(weighting)
        self.shift: dict[str, Tensor] = {}

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start with a shift of zero.

        Raises:
            ConfigError: If the clients are not FedDyn's.
        """
        super().setup(module, data, fabric)
        if not isinstance(module, FedDyn):
            raise ConfigError(f"algorithm FedDynServer needs a model FedDyn; this one is {type(module).__name__}")
        self.alpha = module.alpha
        self.num_clients = data.num_clients
        self.shift = {name: torch.zeros_like(self.state[name]) for name in module.layout.split.shared}

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        """Move the shift, then the model."""
        if self.alpha:
            for name, shift in self.shift.items():
                shift.add_(aggregate[name] - self.state[name], alpha=num_clients / self.num_clients)
        super().step(aggregate, round_idx, num_clients)
        for name, shift in self.shift.items():
            self.state[name].add_(shift)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The model and the shift."""
        return super().state_dict() | {"shift": self.shift}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from both.

        Raises:
            CheckpointError: If they were saved from another model or method.
        """
        super().load_state_dict(state)
        if state.get("shift", {}).keys() != self.shift.keys():
            raise CheckpointError("the checkpoint was not saved by FedDyn on this model: its shift differs")
        for name, tensor in state["shift"].items():
            self.shift[name].copy_(tensor)
