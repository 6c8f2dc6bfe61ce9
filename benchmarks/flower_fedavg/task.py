"""The network, and what is done with it on either end: the same as `configs/quickstart.yaml` says."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


def network() -> nn.Sequential:
    """Two convolutions of 16 and 32 channels and a linear layer, for images of 8×8 pixels."""
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(128, 10))


def samples(path: str, part: str) -> tuple[Tensor, Tensor]:
    """Images and labels of a file."""
    with np.load(path) as file:
        images = torch.from_numpy(file[f"x_{part}"]).float().reshape(-1, 1, 8, 8)
        return images / images.max(), torch.from_numpy(file[f"y_{part}"]).long()


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, lr: float, batch_size: int) -> float:
    """Local training; the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    total, steps = 0.0, 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Of the model on some samples."""
    model.eval()
    return float((model(images).argmax(1) == labels).float().mean())
