"""What a federation of a model of 88 million parameters needs beside the training of one client.

A cohort of 50 clients trains ViT-B/16 with FedAvg, one sample each. Its peak memory is compared with that of a process
which trains the same network on the same sample by hand, each in a process of its own.

    python benchmarks/large_model.py [--cohort 50]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile

import machine  # beside this file
import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.methods import FedAvg

BAR = 3.0  # models
LR = 0.01


class Pictures(TensorDataModule):
    """One random picture for every client."""

    num_classes = 1000
    input_shape = (3, 224, 224)

    def load_arrays(self) -> Arrays:
        """Standard normal inputs; the test set is one of them."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.num_clients, *self.input_shape), dtype=np.float32)
        y = rng.integers(0, self.num_classes, len(x))
        return Arrays(x, y, x[:1], y[:1], np.arange(len(x)), np.zeros(1, dtype=np.int64), "noise")


def network() -> nn.Module:
    """ViT-B/16."""
    made: nn.Module = timm.create_model("vit_base_patch16_224", pretrained=False)
    return made


def by_hand(cohort: int) -> None:
    """One client's work, with everybody's data in memory."""
    data = Pictures(num_clients=cohort, partition=Natural(), batch_size=1)
    arrays, model = data.load_arrays(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = torch.from_numpy(arrays.train.x), torch.from_numpy(arrays.train.y)
    F.cross_entropy(model(x[:1]), y[:1]).backward()
    optimizer.step()


def federate(cohort: int) -> None:
    """One round."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=1,
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        model = Classifier(network=network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
        trainer.fit(model, Pictures(num_clients=cohort, partition=Natural(), batch_size=1), FedAvg())


def peak(what: str, cohort: int) -> float:
    """Peak memory in bytes of a process that does it."""
    command = [sys.executable, __file__, "--child", what, "--cohort", str(cohort)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return float(json.loads(finished.stdout.splitlines()[-1]))


def main() -> None:
    """Both, and the difference in models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--child", choices=("by_hand", "federate"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (by_hand if args.child == "by_hand" else federate)(args.cohort)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in network().parameters())
    one, all_of_them = (peak(what, args.cohort) for what in ("by_hand", "federate"))
    models = (all_of_them - one) / model_bytes
    print(
        f"{model_bytes / 2**20:.0f} MiB a model: one client by hand {one / 2**20:.0f} MiB, a round of {args.cohort} "
        f"{all_of_them / 2**20:.0f} MiB, so {models:.2f} models more (at most {BAR})"
    )
    print(machine.line())
    if models > BAR:
        raise SystemExit(f"missed: {models:.2f} models beside one client's training")


if __name__ == "__main__":
    main()
