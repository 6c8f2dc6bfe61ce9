"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lit_fed.classifier import Classifier
from lit_fed.client import ClientContext, ClientModule, Phase
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.local import batch_size_of
from lit_fed.methods.fedavg import FedAvg
from lit_fed.networks import classifier
from lit_fed.optimization import EffectiveSteps
from lit_fed.payload import ClientUpdate, Payload, add_prefix, split_prefix
from lit_fed.reducers import Reducer, WeightedMean
from lit_fed.strategy import Workers

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

CONTROL = "control."  # the server's control variate c in the broadcast, the client's c_i in its state
CHANGE = "control_change."  # what a client sends up: c_i⁺ − c_i


class Scaffold(Classifier):
    r"""A client whose gradients are corrected by control variates: :math:`g + c - c_i`.

    After local work the client's control variate becomes, by option,

    - 1: the gradient of its whole objective at the server's model, :math:`c_i^+ = \nabla f_i(w_g)`;
    - 2: the mean gradient of its path, :math:`c_i^+ = c_i - c + (w_g - w_i) / (\tilde K \eta)`.

    It sends its model and the change of its control variate: for the parameters exactly twice FedAvg's bytes, up and
    down.

    Args:
        option: 1 or 2. Option 1 costs one more pass over the client's data.
        freeze_head: Zero the gradient of the network's last layer, which in effect freezes it. Not in the paper; the
            public code of FedDr+ ran SCAFFOLD like this.
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: For another option.

    Note:
        :math:`\tilde K` is the number of steps for plain SGD, which is the paper's case. With momentum a step moves
        the weights further than its gradient alone, and :math:`\tilde K` counts that
        (`lit_fed.optimization.EffectiveSteps`); the number of steps in its place would make the control variates too
        large by up to 1/(1 − ρ). The correction comes before gradient clipping.

        In option 1 batches are weighed by their size, and dropout and batch norm work as in training. A client whose
        update is lost on the way has moved its own control variate without the server learning of it.
    """

    def __init__(self, option: Literal[1, 2] = 2, freeze_head: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if option not in (1, 2):
            raise ConfigError(f"model.option is {option!r}; it must be 1 or 2")
        self.option = option
        self.freeze_head = freeze_head
        self._own: dict[str, Tensor] = {}  # c_i, at last c_i⁺
        self._correction: dict[str, Tensor] = {}  # c − c_i
        self._steps = EffectiveSteps()
        self._gradient = _MeanGradient()

    def phases(self, ctx: ClientContext) -> list[Phase]:
        """Before training, option 1 goes through the data once without moving."""
        phases = super().phases(ctx)
        if self.option == 1 and ctx.stage == "train":
            return [Phase("control", ctx.train_loader(), epochs=1), *phases]
        return phases

    def configure_optimizers(self) -> Any:
        """The classifier's own; in the control phase one that does not move."""
        if self._in_phase("control"):
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.0)
        return super().configure_optimizers()

    def receive(self, payload: Payload) -> None:
        """Take in the model, and work out the correction of this client's gradients.

        Raises:
            ConfigError: If the server is not SCAFFOLD's.
        """
        control, model = split_prefix(CONTROL, payload)
        super().receive(model)
        self._correction = {}
        if self.ctx is not None and self.ctx.stage == "train":
            if not control:
                raise ConfigError(
                    "model Scaffold needs the algorithm ScaffoldServer; this one sends no control variate"
                )
            self._correction = {name: tensor - self._own[name] for name, tensor in control.items()}

    def on_train_start(self) -> None:
        """Begin to count."""
        super().on_train_start()
        self._steps, self._gradient = EffectiveSteps(), _MeanGradient()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the samples behind a gradient."""
        self._gradient.pending += batch_size_of(batch)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Correct the gradients; in the control phase, collect them."""
        super().on_before_optimizer_step(optimizer)
        gradients = {name: self.layout.parameters[name].grad for name in self._correction}
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        if self._in_phase("control"):
            self._gradient.add(present)
            return
        self._steps.count(optimizer)
        if present:
            torch._foreach_add_(list(present.values()), [self._correction[name] for name in present])
        if self.freeze_head:
            for parameter in classifier(self.network).parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def make_update(self, ctx: ClientContext) -> ClientUpdate:
        """The model and the change of the control variate."""
        update = super().make_update(ctx)
        new = {name: self._new_control(name) for name in self._correction}
        change = {name: tensor - self._own[name] for name, tensor in new.items()}
        self._own = self._own | new
        return ClientUpdate(ctx.client_id, {**update.payload, **add_prefix(CHANGE, change)}, update.weight)

    def _new_control(self, name: str) -> Tensor:
        if self.option == 1:
            return self._gradient.mean(name, like=self._own[name])
        moved = self.received[name] - self.tensor(name)
        return moved / self._steps.distance - self._correction[name] if self._steps.distance else self._own[name]

    def client_state_dict(self) -> dict[str, Tensor]:
        """The client's control variate, beside what else it keeps."""
        return super().client_state_dict() | add_prefix(CONTROL, self._own)

    def load_client_state_dict(self, state: dict[str, Tensor]) -> None:
        """Bring the control variate back."""
        self._own, rest = split_prefix(CONTROL, state)
        super().load_client_state_dict(rest)

    def initial_client_state(self, client_id: int) -> dict[str, Tensor]:
        """A control variate of zeros."""
        zeros = {name: torch.zeros_like(self.tensor(name)) for name in self.layout.split.shared}
        return super().initial_client_state(client_id) | add_prefix(CONTROL, zeros)

    def _in_phase(self, name: str) -> bool:
        return self.ctx is not None and self.ctx.phase == name


class ScaffoldServer(FedAvg):
    r"""Averages the models, and keeps the mean of all control variates.

    :math:`w \leftarrow w + \eta_g \,\overline{(w_i - w)}` and :math:`c \leftarrow c + \frac{1}{N} \sum_{i \in S}
    (c_i^+ - c_i)`, with N the number of clients in the population.

    Args:
        weighting: ``uniform`` as in the paper, or ``samples``; the control variates' mean is uniform in any case.
        server_lr: η_g.

    Raises:
        ConfigError: If the learning rate is not positive.
    """

    def __init__(self, weighting: Literal["samples", "uniform"] = "uniform", server_lr: float = 1.0) -> None:
        super().__init__(weighting)
        if server_lr <= 0:
            raise ConfigError(f"algorithm.server_lr is {server_lr}; it must be positive")
        self.server_lr = server_lr
        self.control: dict[str, Tensor] = {}

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start with a control variate of zeros.

        Raises:
            ConfigError: If the clients are not SCAFFOLD's.
        """
        super().setup(module, data, fabric)
        if not isinstance(module, Scaffold):
            raise ConfigError(f"algorithm ScaffoldServer needs a model Scaffold; this one is {type(module).__name__}")
        self.num_clients = data.num_clients
        self.control = {name: torch.zeros_like(self.state[name]) for name in module.layout.split.shared}

    def broadcast(self, round_idx: int) -> Payload:
        """The global model and the control variate."""
        return {**super().broadcast(round_idx), **add_prefix(CONTROL, self.control)}

    def evaluation_broadcast(self, round_idx: int) -> Payload:
        """The global model."""
        return super().broadcast(round_idx)

    def reducer(self) -> Reducer[Payload]:
        """One mean for the models, one for the changes."""
        return _TwoMeans(uniform=self.weighting == "uniform")

    def step(self, aggregate: Payload, round_idx: int, num_clients: int) -> dict[str, float]:
        """Move the model and the control variate."""
        change, mean = split_prefix(CHANGE, aggregate)
        if self.server_lr == 1.0:
            super().step(mean, round_idx, num_clients)
        else:
            for name, tensor in mean.items():
                state = self.state[name]
                state.copy_(state + self.server_lr * (tensor - state) if name in self.control else tensor)
        for name, tensor in change.items():
            self.control[name].add_(tensor, alpha=num_clients / self.num_clients)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The model and the control variate."""
        return super().state_dict() | {"control": self.control}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from both.

        Raises:
            CheckpointError: If they were saved from another model or method.
        """
        super().load_state_dict(state)
        if state.get("control", {}).keys() != self.control.keys():
            raise CheckpointError("the checkpoint was not saved by SCAFFOLD on this model: its control variate differs")
        for name, tensor in state["control"].items():
            self.control[name].copy_(tensor)


class _MeanGradient:
    """The gradient over all of a client's samples, from the gradients of its batches."""

    def __init__(self) -> None:
        self.pending = 0  # samples since the last gradient
        self._total = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, gradients: Payload) -> None:
        for name, gradient in gradients.items():
            weighed = gradient * self.pending
            self._sums[name] = self._sums[name] + weighed if name in self._sums else weighed
        self._total += self.pending
        self.pending = 0

    def mean(self, name: str, like: Tensor) -> Tensor:
        """The mean for a parameter; zeros where it never had a gradient."""
        return self._sums[name] / self._total if name in self._sums else torch.zeros_like(like)


class _TwoMeans(Reducer[Payload]):
    """A weighted mean of the models, and the plain mean of the control variates' changes."""

    def __init__(self, uniform: bool) -> None:
        self._models = WeightedMean(uniform)
        self._changes = WeightedMean(uniform=True)

    def add(self, update: ClientUpdate) -> None:
        change, model = split_prefix(CHANGE, update.payload)
        self._models.add(ClientUpdate(update.client_id, model, update.weight))
        self._changes.add(ClientUpdate(update.client_id, change))

    def result(self, workers: Workers) -> Payload | None:
        models, changes = self._models.result(workers), self._changes.result(workers)
        return None if models is None or changes is None else {**models, **add_prefix(CHANGE, changes)}
