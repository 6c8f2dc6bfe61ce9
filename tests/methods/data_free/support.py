"""A federation with an encoder, a classifier and three kinds of width, small enough to compute by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.payload import ClientUpdate


class Halves(LightningModule):
    """Two features after a hidden layer of some width, and a linear classifier of five classes."""

    def __init__(self, width: int = 4, features: int = 2, lr: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, features))
        self.head = nn.Linear(features, 5)
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", F.cross_entropy(self(batch[0]), batch[1]))


def three_widths() -> dict[str, LightningModule]:
    """Hidden layers of 4, 2 and 1 unit, with seeds of their own."""
    found: dict[str, LightningModule] = {}
    for kind, width in (("full", 4), ("half", 2), ("quarter", 1)):
        torch.manual_seed(width)
        found[kind] = Halves(width)
    return found


def three_architectures() -> dict[str, LightningModule]:
    """A hidden layer, a linear map, and a convolution along the input; nothing but the classifier has equal names."""
    found: dict[str, LightningModule] = {}
    encoders: dict[str, nn.Module] = {
        "hidden": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)),
        "linear": nn.Linear(2, 2),
        "convolution": nn.Sequential(
            nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(4, 2)
        ),
    }
    for seed, (kind, encoder) in enumerate(encoders.items()):
        torch.manual_seed(seed)
        made = Halves()
        made.body = encoder
        found[kind] = made
    return found


class Listen(Callback):
    """Keeps what clients sent in the last round."""

    def __init__(self) -> None:
        self.sent: list[ClientUpdate] = []

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        self.sent = []

    def on_client_end(self, run: Run, update: ClientUpdate) -> None:
        self.sent.append(update.detached())
