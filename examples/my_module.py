"""Bring your own LightningModule: nothing in it knows of a federation.

Run it with ``lit-fed fit -c configs/quickstart.yaml -c examples/my_module.yaml``, and add any file of
``configs/method/``. It also trains centrally: ``lightning.Trainer(max_epochs=5).fit(LitDigits(), Digits())``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class LitDigits(LightningModule):
    """A two-layer network on 8×8 digits, with a metric of torchmetrics and a schedule.

    Args:
        hidden: Units of the hidden layer.
        lr: Learning rate of Adam.
    """

    def __init__(self, hidden: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 10)  # methods that ask for logits or features find it under this name
        self.acc = MulticlassAccuracy(10, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, 10); only methods with a public set ask for it."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss, which is logged as ``train/loss`` anyway."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``test/…``, which protocols report as ``global/…`` and ``clients/…``."""
        x, y = batch
        logits = self(x)
        self.acc(logits, y)
        self.log("test/loss", F.cross_entropy(logits, y))
        self.log("test/acc", self.acc)

    def configure_optimizers(self) -> Any:
        """Asked anew for every client in every round; the schedule counts rounds."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)]
