"""What the methods' tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from numpy.typing import NDArray
from torch import Tensor

from lit_fed import FederatedTrainer
from lit_fed.data import Arrays
from lit_fed.participation import Participation
from tests.support import LeastSquares, Points, kept, weights


class Rota(Participation):
    """Client 0 in round 0, client 1 in round 1, and so on."""

    @property
    def nominal_cohort_size(self) -> int:
        return 1

    def draw(self, round_idx: int) -> NDArray[np.int64]:
        return np.array([round_idx % self.num_clients])


class Momentum(LeastSquares):
    """`LeastSquares` by gradient descent with momentum."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class ByHand(LeastSquares):
    """`LeastSquares` with a bias, by hand: one optimizer, or one for each parameter; all step after one backward."""

    def __init__(self, num_optimizers: int = 1) -> None:
        super().__init__()
        self.network = torch.nn.Linear(2, 1)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
        self.num_optimizers = num_optimizers
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        own = list(self.parameters())
        return [torch.optim.SGD(own[i :: self.num_optimizers], lr=self.lr) for i in range(self.num_optimizers)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()


class Automatic(ByHand):
    """The same, by the engine's hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)


class Labelled(Points):
    """Client 0 has 16 samples of class 0 and one of class 1, client 1 has one of class 1 and 16 of class 2; x = 1."""

    num_classes = 3
    input_shape = (1,)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batch_size = 32

    def load_arrays(self) -> Arrays:
        clients, y = np.repeat([0, 1], 17), np.repeat([0, 1, 2], (16, 2, 16))
        x = np.ones((34, 1), dtype=np.float32)
        return Arrays(x, y, x, y, clients, clients, "labelled")


class Scores(LightningModule):
    """Class scores wx, without bias, from w = 0; cross-entropy by gradient descent with learning rate 1."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 3, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(batch[0]), batch[1])


def client_state(made: FederatedTrainer, client_id: int) -> dict[str, list[Any]]:
    """What a client keeps, as numbers."""
    return {name: tensor.tolist() for name, tensor in kept(made, client_id).items()}


def global_weight(made: FederatedTrainer) -> list[float]:
    """The global model of `tests.support.LeastSquares`: its two weights."""
    weight: list[float] = weights(made)["network.weight"].flatten().tolist()
    return weight


def run_quickstart(folder: Path, *options: str, rounds: int = 2) -> Path:
    """The quickstart with a small network for a few rounds; returns the run's folder."""
    from lit_fed.command.cli import main
    from tests.methods.run_methods import CONFIGS, SMALL

    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    rounds_args = ["--trainer.max_rounds", str(rounds), "--trainer.default_root_dir", str(folder)]
    main(["fit", "-c", str(CONFIGS / "quickstart.yaml"), *words, *rounds_args, *options])
    return folder / "lightning_logs" / "version_0"
