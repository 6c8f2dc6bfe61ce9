"""Tasks of several resolutions: one that is small enough to compute by hand, and figures with joints to find."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.data import IID, Arrays, Natural, TensorDataModule
from lit_fed.poses import KeypointEstimator, Puppets

# Outputs w·x, truth 0. Losses ½·mean(x²)·w²: ½·(1 + 9 + 25 + 49)/4 = 10.5, ½·25 = 12.5 and ½·16 = 8; their gradients
# at w = 1 are 21, 25 and 16. Distances: mean((5w − x·w)²) = (16 + 4 + 0 + 4)/4 = 6 and (4w − 5w)² = 1, whose gradients
# through the student alone are 2·5·mean(5 − x) = 10 and 2·4·(4 − 5) = −8, together 2.
TOP = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]])
LEVELS = [torch.full((1, 1, 1, 1), 5.0), torch.full((1, 1, 1, 1), 4.0)]


class Scaling(LightningModule):
    """f(x) = w·x from w = 1, loss ½·mean(f(x)²), gradient descent with learning rate 1/32; it has resolutions."""

    def __init__(self, lr: float = 1 / 32, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.network: nn.Module = nn.Conv2d(1, 1, 1, bias=False)
        nn.init.ones_(self.network.weight)  # type: ignore[arg-type]  # a convolution's
        self.lr, self.weight_decay, self.runs = lr, weight_decay, 0

    @property
    def head(self) -> nn.Module:
        return self.network

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        found: Tensor = self.network(x)
        return found

    def levels(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return list(batch.get("levels", []))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = 0.5 * self(batch["image"]).square().mean()
        self.log("train/loss", loss)
        self.log("seen", batch["image"].sum())
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["image"] if isinstance(batch, dict) else batch[0]
        self.log("test/loss", 0.5 * self(x).square().mean())


class Zooms(TensorDataModule):
    """Client 0 sees `TOP` and both `LEVELS`, client 1 one level less, and client 2 only the lowest."""

    num_classes = 2
    input_shape = (1, 2, 2)

    def __init__(self, num_clients: int = 3) -> None:
        super().__init__(num_clients=num_clients, partition=Natural(), batch_size=8)

    def load_arrays(self) -> Arrays:
        clients = np.arange(self.num_clients)
        x, y = np.repeat(TOP.numpy(), len(clients), axis=0), np.zeros(len(clients), np.int64)
        return Arrays(x, y, x, y, clients, clients, "zooms")

    def view(self, client_id: int) -> Any:
        top, *lower = [TOP, *LEVELS][client_id % 3 :]

        def seen(batch: Any) -> dict[str, Any]:
            return {"image": top, "levels": [{"image": level} for level in lower]}

        return seen


def puppets(**kwargs: Any) -> Puppets:
    """Clients 0 and 1 see drawn figures at 64×48 and 32×24 pixels, clients 2 and 3 at the lower resolution only."""
    settings: dict[str, Any] = {"resolutions": [(64, 48), (32, 24)], "num_clients": 4, "batch_size": 4}
    return Puppets(**settings | {"samples_per_client": 6, "test_samples": 4, "partition": IID()} | kwargs)


def estimator(**kwargs: Any) -> KeypointEstimator:
    """A transformer that leaves blocks out by chance, with batch norm in its head."""
    torch.manual_seed(0)
    network_args = {
        "patch_size": 8,
        "upsample": 2,
        "depth": 2,
        "embed_dim": 16,
        "num_heads": 2,
        "drop_path": 0.5,
        "class_token": True,
    } | kwargs
    return KeypointEstimator(
        "pose_vit_small", lambda p: torch.optim.SGD(p, lr=0.5), num_joints=14, flip_pairs=Puppets.skeleton.flip_pairs,
        input_shape=(3, 64, 48), network_args=network_args,
    )  # fmt: skip
