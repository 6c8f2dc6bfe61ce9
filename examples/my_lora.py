"""Low-rank adapters by hand: the network stays as it was trained, small matrices beside its layers are learnt.

Run it with ``lit-fed fit -c configs/quickstart.yaml -c examples/my_lora.yaml``; docs/adapters.md says more.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class LoRALinear(nn.Module):
    """A linear layer that stays, and a product of two small matrices beside it: Wx + b + (α/r)·BAx.

    Hu et al.: "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, equation 3.

    Args:
        base: The layer, n → m.
        rank: r, the rows of A (r, n) and the columns of B (m, r); B begins at zero.
        alpha: α.
    """

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)  # neither trained nor sent
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """(…, n) to (…, m)."""
        adapted: Tensor = self.base(x) + self.scale * x @ self.lora_A.T @ self.lora_B.T
        return adapted


class LitLoRA(LightningModule):
    """Adapters on a network for 8×8 digits.

    Args:
        checkpoint: A file that ``torch.save(network.state_dict(), …)`` wrote: what somebody trained before. None takes
            the network as it is drawn.
        rank: Of the adapters.
        lr: Learning rate of Adam.
    """

    def __init__(self, checkpoint: str | None = None, rank: int = 4, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        if checkpoint is not None:
            network.load_state_dict(torch.load(checkpoint, weights_only=True))
        for at in (1, 3):
            network[at] = LoRALinear(network[at], rank)  # type: ignore[arg-type]  # a linear layer
        self.network = network

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs loss and accuracy."""
        x, y = batch
        logits = self.network(x)
        self.log_dict({"test/loss": F.cross_entropy(logits, y), "test/acc": (logits.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> Any:
        """Adam over what trains."""
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.hparams["lr"])
