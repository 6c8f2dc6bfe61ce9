"""Training on the server, seeded: what methods do that distil or learn a generator there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.engine.local import LocalLoop
from lit_fed.engine.local_batches import batch_size_of, seed_device
from lit_fed.engine.payload import Payload
from lit_fed.seeding import derive_seed


class ServerLoop:
    """Trains a kind's network on the server, the same way on every process.

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
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        epochs: int,
        seed: tuple[Any, ...],
    ) -> tuple[dict[str, Tensor], float]:
        """Train from given tensors.

        Args:
            kind: Whose network.
            begin: What it starts from, by name.
            loader: Batches.
            loss: Of the task, as ``forward`` sees it, and a batch.
            optimizer: Made anew.
            epochs: Passes over the loader.
            seed: What dropout and the like are drawn from.

        Returns:
            Copies of the trained tensors, and the last epoch's mean loss over samples.
        """
        loop = self.loops[kind]
        model, mean = loop.model, 0.0
        seed_device(derive_seed(*seed), self.fabric.device)
        with model.preserved():
            model.load(begin)
            model.set_trainable(None)
            model.task.train()
            made = optimizer(parameter for parameter in model.task.parameters() if parameter.requires_grad)
            for _ in range(epochs):
                total, samples = torch.zeros((), device=self.fabric.device), 0
                for batch in loop.batches(loader):
                    with self.fabric.autocast():
                        term = loss(model.task, batch)
                    made.zero_grad()
                    term.backward()
                    made.step()
                    size = batch_size_of(batch)
                    total += term.detach() * size
                    samples += size
                mean = float(total) / max(samples, 1)
            return model.copy(begin), mean
