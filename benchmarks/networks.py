"""What is trained in the comparisons; nothing of any federated library."""

from __future__ import annotations

from torch import nn
from torchvision.models import mobilenet_v2


def logistic() -> nn.Module:
    """One layer over 60 numbers."""
    return nn.Linear(60, 10)


def mlp() -> nn.Module:
    """A hidden layer of 32 units over 60 numbers."""
    return nn.Sequential(nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 10))


def two_convs() -> nn.Module:
    """A 2-conv CNN over 3×32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    )


def harness_cnn() -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark (``simple_cnn``), with dropout, over 3×32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def small_cnn() -> nn.Module:
    """The CNN of BlazeFL's and PyTorch's CIFAR-10 examples, over 3×32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def mobilenet() -> nn.Module:
    """MobileNetV2 with batch norm, over 3×32×32 images."""
    network: nn.Module = mobilenet_v2(num_classes=10, dropout=0.0)  # whose random numbers nobody shares
    return network
