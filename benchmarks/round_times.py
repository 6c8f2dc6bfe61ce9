"""How much longer than FedAvg's a round of FedDr+ takes, by how the samples are prepared.

FedDr+ runs a second network forward, FedAvg does not; both prepare the same samples. The same images, 100 each of 100
clients of whom ten take part for three epochs of batches of 50, come either as tensors that are cropped and mirrored a
batch at a time, or as PIL images that torchvision's transforms prepare one by one in the training process;
networks from small to MobileNet. One method after the other; medians over the rounds but the first.

    python benchmarks/round_times.py [--rounds 6]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from data import Pictures  # beside this file

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.data import IID, Arrays, DatasetModule, Datasets, ImageDataModule
from lit_fed.engine.algorithm import Algorithm
from lit_fed.engine.run import Run
from lit_fed.engine.samplers import UniformParticipation
from lit_fed.methods import FedAvg, FedDrPlus

CLIENTS, IMAGES, CLASSES = 100, 10_000, 100
COHORT, EPOCHS, BATCH = 10, 3, 50
STEPS = COHORT * EPOCHS * IMAGES // CLIENTS // BATCH
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [200, 512]},
    "small_cnn": {},
    "mcmahan_cnn": {},
    "mobilenet": {"batch_stats": True},
}
METHODS: dict[str, Callable[[], Algorithm[Any]]] = {"FedAvg": FedAvg, "FedDr+": FedDrPlus}


def pixels() -> np.ndarray:
    """Bytes, shape (n, 32, 32, 3)."""
    return np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)


class AtOnce(ImageDataModule):
    """Tensors, a batch at a time."""

    num_classes = CLASSES
    stored_shape = (3, 32, 32)

    def load_arrays(self) -> Arrays:
        """Noise."""
        x, y = pixels().transpose(0, 3, 1, 2), np.arange(IMAGES) % CLASSES
        return Arrays(x, y, x[:CLIENTS], y[:CLIENTS], source="noise")


class OneByOne(DatasetModule):
    """PIL images."""

    num_classes = CLASSES
    input_shape = (3, 32, 32)

    def build_datasets(self) -> Datasets:
        """Noise."""
        labels = np.arange(IMAGES) % CLASSES
        return Datasets(Pictures(pixels()), labels, Pictures(pixels()[:CLIENTS]), labels[:CLIENTS], source="noise")


class Seconds(Callback):
    """Of the rounds."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Keeps the round's."""
        self.found.append(record.metrics["time/round_s"])


def seconds(network: str, one_by_one: bool, method: Callable[[], Algorithm[Any]], rounds: int) -> list[float]:
    """Of the rounds after the first."""
    torch.manual_seed(0)
    times = Seconds()
    settings: dict[str, Any] = {"num_clients": CLIENTS, "partition": IID(), "batch_size": BATCH}
    data = OneByOne(**settings) if one_by_one else AtOnce(crop_padding=4, horizontal_flip=True, **settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 1,
            local_epochs=EPOCHS,
            participation=UniformParticipation(count=COHORT),
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[times],
        )
        model = Classifier(
            network=network,
            num_classes=CLASSES,
            in_channels=3,
            input_shape=(3, 32, 32),
            network_args=NETWORKS[network],
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        )
        trainer.fit(model, data, method())
    return times.found[1:]


def main() -> None:
    """A row for each network and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | samples | a step of FedAvg, ms | FedDr+'s round over FedAvg's |\n|---|---|---|---|")
    for network in NETWORKS:
        for one_by_one in (False, True):
            found = {name: seconds(network, one_by_one, method, args.rounds) for name, method in METHODS.items()}
            once, both = (statistics.median(times) for times in found.values())
            way = "one by one" if one_by_one else "at once"
            print(f"| {network} | {way} | {once * 1e3 / STEPS:.1f} | {both / once:.2f} |", flush=True)
    print(f"one thread; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
