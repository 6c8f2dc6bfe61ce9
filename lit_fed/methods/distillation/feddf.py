"""FedDF.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning import Fabric
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_fed.algorithm import Algorithm
from lit_fed.client import ClientContext, ClientModule, Phase, Split
from lit_fed.errors import ConfigError
from lit_fed.local import seed_device
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.federated_distillation import DistillationServer, FederatedDistillation
from lit_fed.mixing import Mixed
from lit_fed.engine.payload import ClientUpdate, Payload
from lit_fed.engine.reducers import Reducer
from lit_fed.seeding import derive_seed, torch_generator
from lit_fed.engine.strategy import Workers

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


class FedDF(FederatedDistillation):
    """A client of FedAvg that also sends its logits on the public set.

    Args:
        kwargs: Passed on to `lit_fed.methods.federated_distillation.FederatedDistillation`; `networks` must be null or
            name one network.

    Raises:
        ConfigError: For several networks.

    Note:
        In the paper the server computes the logits from the weights it received, which is the same and costs no bytes;
        here clients send them, so that the server never needs more than one model. The paper's form for several
        architectures, with one student for each, is not here.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if len(self.assignment.names) > 1:
            raise ConfigError(
                "model FedDF averages weights, so all clients need the same network; model.networks has "
                f"{', '.join(self.assignment.names)}"
            )

    def split(self, round_idx: int) -> Split:
        """Everything travels."""
        return ClientModule.split(self, round_idx)

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """As in FedAvg."""
        return ClientModule.shared_names(self, direction)

    def personal_names(self) -> list[str]:
        """As in FedAvg."""
        return ClientModule.personal_names(self)

    def receive(self, payload: Payload) -> None:
        """The global model."""
        self.load_tensors(payload)

    def refinement(self, ctx: ClientContext) -> list[Phase]:
        """None: it is the server that distils."""
        return []

    def example_payload(self, ctx: ClientContext) -> Payload:
        """Logits (P, C), empty, and the model."""
        return {**super().example_payload(ctx), **self.shared_tensors()}

    def answer(self, ctx: ClientContext) -> dict[str, Tensor]:
        """Logits on the public set, and the model."""
        return super().answer(ctx) | self.shared_tensors()


class Fused(NamedTuple):
    """What the server makes of a cohort.

    Args:
        mean: The mean model.
        mixed: The ensemble's predictions on the public set.
    """

    mean: Payload
    mixed: Mixed


class FedDFServer(Algorithm[Fused]):
    r"""Averages the models as FedAvg does, then distils the clients' ensemble into the mean on the public set.

    The student w, from the mean, minimises
    :math:`\mathrm{CE}(\mathrm{softmax}\,\frac{1}{|S|}\sum_i f_i(x) \,\|\, \mathrm{softmax}\, f(x; w))`. Every process
    distils, in the same way. Logs what `DistillationServer` does, and ``server/distillation``, the mean loss.

    Args:
        optimizer: The server's, made anew each round.
        epochs: Passes over the public set in a round; 0 is FedAvg.
        aggregate: Mix ``logits``, as in the paper, or ``probabilities``.
        weighting: Of the mean model, see `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a negative number of epochs, or clients that are not FedDF's.

    Note:
        The cross-entropy differs from the paper's divergence by the teacher's entropy, a constant. The paper stops by a
        validation set after at most 10,000 steps; here the number of epochs is fixed.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        epochs: int = 5,
        aggregate: Literal["probabilities", "logits"] = "logits",
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        if epochs < 0:
            raise ConfigError(f"algorithm.epochs is {epochs}; it must not be negative")
        self.optimizer = optimizer
        self.epochs = epochs
        self.fusion = FedAvg(weighting)
        self.ensemble = DistillationServer(aggregate)

    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Take the module's weights as the first global model.

        Raises:
            ConfigError: If the clients are not FedDF's, or the data have no public set.
        """
        if not isinstance(module, FedDF):
            raise ConfigError(f"algorithm FedDFServer needs a model FedDF; this one is {type(module).__name__}")
        self.module, self.data, self.fabric = module, data, fabric
        self.fusion.setup(module, data, fabric)
        self.ensemble.setup(module, data, fabric)

    def broadcast(self, round_idx: int) -> Payload:
        """The global model."""
        return self.fusion.broadcast(round_idx)

    def reducer(self) -> Reducer[Fused]:
        """The mean of the models, and of the logits."""
        return _Fusion(self.fusion.reducer(), self.ensemble.reducer())

    def step(self, aggregate: Fused, round_idx: int, num_clients: int) -> dict[str, float]:
        """Average, then distil."""
        self.fusion.step(aggregate.mean, round_idx, num_clients)
        metrics = self.ensemble.step(aggregate.mixed, round_idx, num_clients)
        return metrics | self._distil(round_idx)

    def _distil(self, round_idx: int) -> dict[str, float]:
        module, targets, loss = self.module, self.ensemble.targets, 0.0
        assert targets is not None
        assert module.ctx is not None
        if not self.epochs:
            return {}
        seed = module.ctx.seed, "feddf", round_idx
        loader = self.data.public_loader(torch_generator(*seed))
        seed_device(derive_seed(*seed), self.fabric.device)
        module.load_tensors(self.fusion.state)
        module.set_trainable(None)
        module.train()
        optimizer = self.optimizer(parameter for parameter in module.parameters() if parameter.requires_grad)
        for _ in range(self.epochs):
            total = torch.zeros((), device=self.fabric.device)
            for x, index in loader:
                x, index = self.fabric.to_device((x, index))
                with self.fabric.autocast():
                    term = module.distillation(module(x), targets[index])
                optimizer.zero_grad()
                term.backward()
                optimizer.step()
                total += term.detach() * len(index)
            loss = float(total) / len(targets)
        for name, tensor in module.shared_tensors().items():
            self.fusion.state[name].copy_(tensor)
        return {"server/distillation": loss}

    def global_state(self) -> dict[str, Tensor]:
        """The student."""
        return self.fusion.global_state()

    def state_dict(self) -> dict[str, Any]:
        """The student, and the ensemble's predictions."""
        return self.fusion.state_dict() | self.ensemble.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from both."""
        self.fusion.load_state_dict(state)
        self.ensemble.load_state_dict(state)


class _Fusion(Reducer[Fused]):
    """Two reducers, each with its part of an update."""

    def __init__(self, models: Reducer[Payload], predictions: Reducer[Mixed]) -> None:
        self._models, self._predictions = models, predictions

    def add(self, update: ClientUpdate) -> None:
        """Give each its part."""
        model = {name: tensor for name, tensor in update.payload.items() if name != "logits"}
        self._models.add(ClientUpdate(update.client_id, model, update.weight))
        self._predictions.add(update)

    def result(self, workers: Workers) -> Fused | None:
        """Both results."""
        mean, mixed = self._models.result(workers), self._predictions.result(workers)
        return None if mean is None or mixed is None else Fused(mean, mixed)
