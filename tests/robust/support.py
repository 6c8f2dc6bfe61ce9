"""What tests of rules and attacks share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_fed import FederatedTrainer
from lit_fed.data import Arrays
from lit_fed.methods import FedAvg
from tests.support import Points, fit, weights

W = "network.weight"


class Spots(Points):
    """Client k has one sample x = (1, 0) with the k-th target: `LeastSquares` moves to half of it from w = 0."""

    num_classes = 101

    def __init__(self, targets: Sequence[float], **kwargs: Any) -> None:
        self.spots = np.array(targets, np.int64)
        super().__init__(num_clients=len(targets), **kwargs)

    def load_arrays(self) -> Arrays:
        clients = np.arange(len(self.spots))
        x = np.tile(np.array([[1, 0]], np.float32), (len(clients), 1))
        return Arrays(x, self.spots, x, self.spots, clients, clients, "spots")


def moved(folder: Path, targets: Sequence[float], **kwargs: Any) -> tuple[float, FederatedTrainer]:
    """The first weight after one round in which client k alone would move it to half of its target."""
    settings: dict[str, Any] = {"max_rounds": 1} | kwargs
    algorithm = settings.pop("algorithm", None) or FedAvg()
    made = fit(folder, data=Spots(targets), algorithm=algorithm, **settings)
    return float(weights(made)[W].flatten()[0]), made


def close(one: Any, other: Any, atol: float = 1e-5) -> bool:
    """Whether two models are equal up to rounding."""
    found, expected = weights(one), weights(other)
    return all(torch.allclose(found[name], expected[name], atol=atol) for name in expected)
