"""What the tests of frozen heads share."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.data import Arrays, Digits, Shards
from lit_fed.methods import (
    DotRegression,
    FedBABU,
    FedDrPlus,
    FedETF,
    SphereFed,
)
from lit_fed.methods.frozen_heads.frozen import FrozenHead
from tests.support import Points

FROZEN: list[type[FrozenHead]] = [FedBABU, SphereFed, FedETF, DotRegression, FedDrPlus]
EACH = pytest.mark.parametrize("method", FROZEN, ids=lambda method: method.__name__)
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.1)


class TwoClasses(Points):
    """`Points` with classes 0 and 1: client 0 has one sample x=(1,0), y=0, client 1 three samples x=(0,1), y=1."""

    num_classes = 2

    def load_arrays(self) -> Arrays:
        made = super().load_arrays()
        y = made.train.y // 2 - 1
        return Arrays(made.train.x, y, made.test.x, y, made.train.clients, made.test.clients, "two classes")


class Plane(nn.Module):
    """Features f = Wx in two dimensions, the same for both clients' x; a linear head with the classes (±1, 0)."""

    def __init__(self, f: tuple[float, float]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.body.weight.data = torch.tensor([[f[0]] * 2, [f[1]] * 2])
        self.head.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        self.head.bias.data.zero_()

    def forward_features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.forward_features(x))
        return logits


def on_plane(
    f: tuple[float, float], lr: float, algorithm: FrozenHead | None = None, head: list[list[float]] | None = None
) -> Classifier:
    """A task on the plane; with an algorithm its head is put there now, and given these classes."""
    task = Classifier(Plane(f), num_classes=2, optimizer=partial(torch.optim.SGD, lr=lr))
    if algorithm is not None:
        algorithm.adapt(task)
    if head is not None:
        task.network.head.weight.data = torch.tensor(head)  # type: ignore[union-attr]
    return task


def digits(**kwargs: Any) -> Digits:
    settings: dict[str, Any] = {"num_clients": 5, "partition": Shards(2), "batch_size": 16, "max_train_samples": 240}
    return Digits(**(settings | kwargs))


def model(seed: int = 0, kind: type[Classifier] = Classifier, **kwargs: Any) -> Classifier:
    """A task for the digits; the same seed gives the same first weights, and the same heads in their place."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"network": "mlp", "num_classes": 10, "input_shape": (1, 8, 8), "optimizer": SGD}
    return kind(**(settings | kwargs))


# --- by hand ---------------------------------------------------------------------------------------------------------


class Mixed(TwoClasses):
    """One client with three samples of class 0 and one of class 1."""

    def load_arrays(self) -> Arrays:
        x, y = np.eye(2, dtype=np.float32)[[0, 0, 0, 1]], np.array([0, 0, 0, 1])
        return Arrays(x, y, x, y, np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64), "mixed")


class Stranger(LightningModule):
    """Knows of no federation, has no ``head``, and puts more behind its last layer."""

    def __init__(self, num_outputs: int = 10, lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        body = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
        self.layers = nn.Sequential(*body, nn.Linear(32, num_outputs), nn.LogSoftmax(dim=1))

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.nll_loss(self.layers(batch[0]), batch[1])

    def test_step(self, batch: Any) -> None:
        self.log("test_accuracy", (self.layers(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
