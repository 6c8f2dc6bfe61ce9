"""How much longer than FedAvg's a round of FedDr+ takes, by how the samples are prepared.

FedDr+ runs a second network forward, FedAvg does not; both prepare the same samples. The same images come either as
tensors that are cropped and mirrored a batch at a time, or as PIL images that torchvision's transforms prepare one by
one in the training process. The first rows are as large as FedDr+'s pocket studies; in the others each of 100 clients
has 100 images of 32×32, and ten take part for three epochs of batches of 50. One method after the other; medians over
the rounds but the first.

    python benchmarks/round_times.py [--rounds 6] [--networks digits mobilenet]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import machine  # beside this file, as the next but two
import numpy as np
import torch
from data import Pictures

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.data import IID, Arrays, DatasetModule, Datasets, ImageDataModule
from lit_fed.engine.loop.run import Run
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.methods import FedAvg, FedDrPlus
from lit_fed.participation import UniformParticipation


@dataclass(frozen=True)
class Size:
    """Of a federation and its images."""

    network: str
    network_args: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, int, int] = (3, 32, 32)
    classes: int = 100
    images: int = 10_000
    clients: int = 100
    cohort: int = 10
    epochs: int = 3
    batch: int = 50

    @property
    def steps(self) -> int:
        """Of all clients of a round."""
        return self.cohort * self.epochs * -(-self.images // self.clients // self.batch)

    def pixels(self) -> np.ndarray:
        """Bytes, shape (n, side, side, 3), or (n, side, side) where they are grey."""
        channels, *sides = self.shape
        wanted = (self.images, *sides, channels) if channels > 1 else (self.images, *sides)
        return np.random.default_rng(0).integers(0, 256, wanted, dtype=np.uint8)

    def labels(self) -> np.ndarray:
        """By turns."""
        return np.arange(self.images) % self.classes


SIZES = {
    "digits": Size("mlp", {"hidden": [64, 512]}, (1, 8, 8), 10, 1440, 20, 5, 5, 20),
    "mlp": Size("mlp", {"hidden": [200, 512]}),
    "small_cnn": Size("small_cnn"),
    "mcmahan_cnn": Size("mcmahan_cnn"),
    "mobilenet": Size("mobilenet", {"batch_stats": True}),
}
METHODS: dict[str, Callable[[], Algorithm[Any]]] = {"FedAvg": FedAvg, "FedDr+": FedDrPlus}


class AtOnce(ImageDataModule):
    """Tensors, a batch at a time."""

    def __init__(self, size: Size, **kwargs: Any) -> None:
        self.size = size
        super().__init__(crop_padding=4, horizontal_flip=True, **kwargs)

    @property
    def num_classes(self) -> int:
        """See `FederatedDataModule`."""
        return self.size.classes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """See `ImageDataModule`."""
        return self.size.shape

    def load_arrays(self) -> Arrays:
        """Noise."""
        x, y, few = self.size.pixels().reshape(-1, *self.size.shape), self.size.labels(), self.size.clients
        return Arrays(x, y, x[:few], y[:few], source="noise")


class OneByOne(DatasetModule):
    """PIL images."""

    def __init__(self, size: Size, **kwargs: Any) -> None:
        self.size = size
        super().__init__(**kwargs)

    @property
    def num_classes(self) -> int:
        """See `FederatedDataModule`."""
        return self.size.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """See `FederatedDataModule`."""
        return self.size.shape

    def build_datasets(self) -> Datasets:
        """Noise."""
        pixels, labels, few = self.size.pixels(), self.size.labels(), self.size.clients
        return Datasets(Pictures(pixels), labels, Pictures(pixels[:few]), labels[:few], source="noise")


class Seconds(Callback):
    """Of the rounds."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Keeps the round's."""
        self.found.append(record.metrics["time/round_s"])


def seconds(
    size: Size, make: type[AtOnce | OneByOne], method: Callable[[], Algorithm[Any]], rounds: int, **settings: Any
) -> list[float]:
    """Of the rounds after the first; with settings of the trainer."""
    torch.manual_seed(0)
    times = Seconds()
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            **(where | settings),
            max_rounds=rounds + 1,
            local_epochs=size.epochs,
            participation=UniformParticipation(count=size.cohort),
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[times],
        )
        model = Classifier(
            network=size.network,
            num_classes=size.classes,
            in_channels=size.shape[0],
            input_shape=size.shape,
            network_args=size.network_args,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        )
        trainer.fit(model, make(size, num_clients=size.clients, partition=IID(), batch_size=size.batch), method())
    return times.found[1:]


def main() -> None:
    """A row for each network and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--networks", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | samples | a step of FedAvg, ms | FedDr+'s round over FedAvg's |\n|---|---|---|---|")
    ways: dict[str, type[AtOnce | OneByOne]] = {"at once": AtOnce, "one by one": OneByOne}
    for name in args.networks:
        size = SIZES[name]
        for way, make in ways.items():
            found = {label: seconds(size, make, method, args.rounds) for label, method in METHODS.items()}
            once, both = (statistics.median(times) for times in found.values())
            print(f"| {name} | {way} | {once * 1e3 / size.steps:.1f} | {both / once:.2f} |", flush=True)
    print(machine.line())


if __name__ == "__main__":
    main()
