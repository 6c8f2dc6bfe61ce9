"""Training on the server, seeded: for methods that distil or learn a generator there, and for references to compare to.

A kind's task is lent for it and comes back as it was: tensors, modes of its submodules, which parameters train. A
network of the method's own, such as a generator, is written over.
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
from lit_fed.engine.lightning.objective import Objective, task_name
from lit_fed.engine.lightning.optimization import parse_optimizers
from lit_fed.engine.wire.batches import batch_size_of
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, seed_device

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


class ServerLoop:
    """Trains a kind's network on the server, and predicts with it, the same way on every process.

    Args:
        fabric: Gives device and precision.
        loops: Whose task is trained, by kind.
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
        """Train from given tensors, in training mode.

        Args:
            kind: Whose network.
            begin: What it starts from, by name; what is not named starts as the task has it.
            loader: Batches.
            loss: Of the task (its ``forward``, or ``run`` for its own ``training_step``) and a batch. What it logs is
                dropped.
            epochs: Passes over the loader.
            seed: What dropout and the like are drawn from.
            optimizer: Made anew, over the parameters that are not frozen; None for the task's own without its schedule.

        Returns:
            Copies of the trained tensors named in `begin`, and the last epoch's mean loss over samples.

        Raises:
            ConfigError: If the task's own optimizer is wanted, and it has several.
        """
        loop = self.loops[kind]
        model, objective = loop.model, loop.objective
        with _lent(loop):
            model.load(begin)
            model.set_trainable(None)
            objective.train()
            made = _own_optimizer(objective) if optimizer is None else optimizer(_trainable(objective))
            passes = (loop.batches(loader) for _ in range(epochs))
            means = self._optimise(loop, made, passes, lambda batch: {"loss": loss(objective, batch)}, seed)
            return model.copy(begin), means.get("loss", 0.0)

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
        """Train a network that is no client's, in training mode, by one pass over a loader.

        Args:
            network: The network, on the device; what it holds is written over.
            begin: All its parameters and buffers by name.
            loader: Batches.
            terms: What is minimised on a batch, by name, with this network; the gradient is that of their sum.
            seed: What dropout and the like are drawn from.
            optimizer: Made anew, over the network's parameters.

        Returns:
            Copies of the trained tensors, and each term's mean over samples.
        """
        network.load_state_dict(begin)
        network.train()
        loop = next(iter(self.loops.values()))
        once = [map(self.fabric.to_device, loader)]
        means = self._optimise(loop, optimizer(network.parameters()), once, terms, seed)
        return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}, means

    def forward(self, kind: str, tensors: Payload, x: Any) -> Tensor:
        """What a kind's network gives for inputs, differentiable in them and in its tensors.

        In evaluation mode.

        Args:
            kind: Whose network.
            tensors: Its parameters and buffers by name; what is not named is as the task has it.
            x: A batch of inputs.
        """
        loop = self.loops[kind]
        with loop.model.evaluating(), loop.objective.muted():
            found: Tensor = functional_call(loop.objective, dict(tensors), (x,))
        return found

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
        means: dict[str, float] = {}
        for batches in passes:
            totals: dict[str, Tensor] = {}
            samples = 0
            for batch in batches:
                with loop.autocast():
                    found = terms(batch)
                made.zero_grad()
                self.fabric.backward(_sum(found.values()))
                self.fabric.strategy.optimizer_step(made)
                size = batch_size_of(batch)
                for name, term in found.items():
                    weighed = term.detach() * size
                    totals[name] = totals[name] + weighed if name in totals else weighed
                samples += size
            means = {name: float(total) / max(samples, 1) for name, total in totals.items()}
        return means

    @torch.no_grad()
    def predict(self, kind: str, tensors: Payload, loader: Iterable[Any]) -> Tensor:
        """What a network's ``forward`` gives for the inputs of ``(x, …)`` batches, one below the other.

        In evaluation mode and in the weights' own precision.

        Args:
            kind: Whose network.
            tensors: Its parameters and buffers by name.
            loader: Batches, at least one.
        """
        loop = self.loops[kind]
        with _lent(loop), loop.model.evaluating():
            loop.model.load(tensors)
            return torch.cat([loop.objective(batch[0]) for batch in loop.batches(loader)])


@contextmanager
def _lent(loop: LocalLoop) -> Iterator[None]:
    """A task that comes back as it was; what it logs meanwhile is about no client, and is dropped."""
    state = loop.state
    muted, state.muted = state.muted, True
    try:
        with loop.model.lent():
            yield
    finally:
        state.muted = muted


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
            f"model {task_name(objective)} has {len(optimizers)} optimizers, and training on the server needs one"
        )
    for group in optimizers[0].param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])  # where a scheduler has moved it
    return optimizers[0]
