"""Bring your own LightningModule: change the base class to ``ClientModule``, leave the rest as it is.

Run it with ``python cli.py fit -c configs/quickstart.yaml -c examples/my_module.yaml``.

The module also trains centrally: ``lightning.Trainer(max_epochs=5).fit(LitDigits(), Digits())``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import ClientModule

Batch = tuple[Tensor, Tensor]


class LitDigits(ClientModule):
    """A two-layer network on 8×8 digits, written as any LightningModule is.

    Args:
        hidden: Units of the hidden layer.
        lr: Learning rate of Adam.
        local_epochs: Passes over a client's data per round.
    """

    def __init__(self, hidden: int = 64, lr: float = 1e-3, local_epochs: int = 1) -> None:
        super().__init__(local_epochs=local_epochs)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.lr = lr

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss; what is logged becomes the client's mean, then the cohort's."""
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``test/…``, which protocols report as ``global/…`` and ``clients/…``."""
        x, y = batch
        logits = self.network(x)
        self.log("test/loss", F.cross_entropy(logits, y))
        self.log("test/acc", (logits.argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A fresh optimizer: it is asked for anew for every client in every round."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
