"""Seeded training on the server: for methods that distil or learn a generator there, and for references.

A kind's task is borrowed: its tensors, its submodules' modes and ``requires_grad`` are restored. A network of the
method's own, such as a generator, is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Fabric
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.meter import WeightedSums, means
from lit_fed.engine.lightning.objective import Objective, task_name
from lit_fed.engine.lightning.optimization import parse_optimizers
from lit_fed.engine.wire.batches import batch_size_of
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, seed_device

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


class ServerLoop:
    """Trains a kind's network on the server, and predicts with it, equally on every process.

    Args:
        fabric: Gives device and precision.
        loops: Loops of the clients, by kind.
    """

    def __init__(self, fabric: Fabric, loops: Mapping[str, LocalLoop]) -> None:
        self.fabric = fabric
        self.loops = loops

    def train(
        self,
        kind: str,
        begin: Payload,
        loader: Iterable[Any],
        loss: Callable[[Objective, Any], Tensor],
        *,
        epochs: int,
        seed: tuple[Any, ...],
        optimizer: OptimizerMaker | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Train a kind's network from given tensors, in training mode.

        Args:
            kind: The network's.
            begin: Tensors to start from, by name; others start as in the task.
            loader: Batches.
            loss: Of the task (its ``forward``, or ``run`` for its own ``training_step``) and a batch. Its logged values
                are dropped.
            epochs: Passes over the loader.
            seed: Of dropout and the like.
            optimizer: Makes one over the parameters that are not frozen; None for the task's own without its schedule.

        Returns:
            Copies of the trained tensors named in `begin`, and the last epoch's mean loss over samples.
        """
        loop = self.loops[kind]
        model, objective = loop.model, loop.objective
        with _lent(loop):
            model.load(begin)
            model.set_trainable(None)
            objective.train()
            made = _own_optimizer(objective) if optimizer is None else optimizer(_trainable(objective))
            passes = (loop.batches(loader) for _ in range(epochs))
            losses = self._optimise(loop, made, passes, lambda batch: {"loss": loss(objective, batch)}, seed)
            return model.copy(begin), losses.get("loss", 0.0)

    def learn(
        self,
        network: nn.Module,
        begin: Payload,
        loader: Iterable[Any],
        terms: Callable[[Any], Mapping[str, Tensor]],
        *,
        seed: tuple[Any, ...],
        optimizer: OptimizerMaker,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train a network that is not a client's, in training mode, by one pass over a loader.

        Args:
            network: The network, on the device; its tensors are overwritten.
            begin: All its parameters and buffers by name.
            loader: Batches.
            terms: Terms of a batch by name, computed with this network; their sum is minimised.
            seed: Of dropout and the like.
            optimizer: Makes one over the network's parameters.

        Returns:
            Copies of the trained tensors, and each term's mean over samples.
        """
        network.load_state_dict(begin)
        network.train()
        loop = next(iter(self.loops.values()))
        once = [map(self.fabric.to_device, loader)]
        losses = self._optimise(loop, optimizer(network.parameters()), once, terms, seed)
        return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}, losses

    def forward(self, kind: str, tensors: Payload, x: Any) -> Tensor:
        """Output of a kind's network, in evaluation mode, differentiable in the inputs and in its tensors.

        Args:
            kind: The network's.
            tensors: Its parameters and buffers by name; others are as in the task.
            x: A batch of inputs.
        """
        loop = self.loops[kind]
        with loop.model.evaluating(), loop.state.task_run.muted():
            outputs: Tensor = functional_call(loop.objective, dict(tensors), (x,))
        return outputs

    def _optimise(
        self,
        loop: LocalLoop,
        made: Optimizer,
        passes: Iterable[Iterable[Any]],
        terms: Callable[[Any], Mapping[str, Tensor]],
        seed: tuple[Any, ...],
    ) -> dict[str, float]:
        """Step along the gradient of the sum of terms; returns the last pass's mean of each over samples."""
        seed_device(derive_seed(*seed), self.fabric.device)
        loop.reset_scaler()
        sums = WeightedSums()
        for batches in passes:
            sums = WeightedSums()
            for batch in batches:
                with loop.autocast():
                    losses = terms(batch)
                made.zero_grad()
                self.fabric.backward(_sum(losses.values()))
                self.fabric.strategy.optimizer_step(made)
                for name, term in losses.items():
                    sums.add(name, term.detach(), batch_size_of(batch))
        return means(sums.numbers())

    @torch.no_grad()
    def predict(self, kind: str, tensors: Payload, loader: Iterable[Any]) -> Tensor:
        """Outputs of a kind's ``forward`` for all inputs of ``(x, …)`` batches, concatenated.

        In evaluation mode, in the precision of the weights.

        Args:
            kind: The network's.
            tensors: Its parameters and buffers by name.
            loader: Batches, at least one.
        """
        loop = self.loops[kind]
        with _lent(loop), loop.model.evaluating():
            loop.model.load(tensors)
            return torch.cat([loop.objective(batch[0]) for batch in loop.batches(loader)])


@contextmanager
def _lent(loop: LocalLoop) -> Iterator[None]:
    """Restore a task on leaving, and drop its logged values, which describe no client."""
    with loop.state.task_run.muted(), loop.model.lent():
        yield


def _sum(terms: Iterable[Tensor]) -> Tensor:
    """The sum of one term or more."""
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def _trainable(objective: Objective) -> list[nn.Parameter]:
    return [parameter for parameter in objective.parameters() if parameter.requires_grad]


def _own_optimizer(objective: Objective) -> Optimizer:
    optimizers, _, _ = parse_optimizers(objective.configure_optimizers())
    if len(optimizers) > 1:
        raise ConfigError(
            f"model {task_name(objective)} has {len(optimizers)} optimizers; training on the server needs exactly one"
        )
    for group in optimizers[0].param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])  # where a scheduler has moved it
    return optimizers[0]
