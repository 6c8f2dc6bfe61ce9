"""Training on the server, seeded: for methods that distil or learn a generator there, and for references to compare to.

A kind's task is lent for it and comes back as it was: tensors, modes of its submodules, which parameters train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.engine.local import LocalLoop
from lit_fed.engine.local_batches import batch_size_of, seed_device
from lit_fed.engine.objective import Objective, task_name
from lit_fed.engine.optimization import parse_optimizers
from lit_fed.engine.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

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
        loop, mean = self.loops[kind], 0.0
        model, objective = loop.model, loop.objective
        with _lent(loop):
            model.load(begin)
            model.set_trainable(None)
            objective.train()
            made = _own_optimizer(objective) if optimizer is None else optimizer(_trainable(objective))
            seed_device(derive_seed(*seed), self.fabric.device)
            loop.reset_scaler()
            for _ in range(epochs):
                total, samples = torch.zeros((), device=self.fabric.device), 0
                for batch in loop.batches(loader):
                    with loop.autocast():
                        term = loss(objective, batch)
                    made.zero_grad()
                    self.fabric.backward(term)
                    self.fabric.strategy.optimizer_step(made)
                    size = batch_size_of(batch)
                    total += term.detach() * size
                    samples += size
                mean = float(total) / max(samples, 1)
            return model.copy(begin), mean

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
