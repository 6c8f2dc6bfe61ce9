"""What the round loop costs over a bare hand-written PyTorch loop that does the same work.

Both run in this process, in turn, on the same tensors and with the same shuffling; the median over rounds of the ratio
of a round's two times is what counts, for a machine's speed drifts. The weights of both must agree at the end, or the
comparison is void. The federation also writes its logs and a checkpoint every round, which the bare loop does not.

    python benchmarks/overhead.py [--rounds 20] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.federation import Federation
from lit_fed.methods import FedAvg
from lit_fed.seeding import derive_seed

LR = 0.05
State = dict[str, Tensor]


class Noise(TensorDataModule):
    """Random samples, as many for every client."""

    num_classes = 10
    input_shape: tuple[int, ...] = ()

    def __init__(self, num_clients: int, samples: int, shape: tuple[int, ...], batch_size: int) -> None:
        super().__init__(num_clients=num_clients, partition=Natural(), batch_size=batch_size)
        self.samples = samples
        self.input_shape = shape

    def load_arrays(self) -> Arrays:
        """Standard normal inputs, uniform labels."""
        rng = np.random.default_rng(0)
        clients = np.repeat(np.arange(self.num_clients), self.samples)
        x = rng.standard_normal((len(clients), *self.input_shape), dtype=np.float32)
        y = rng.integers(0, 10, len(clients))
        return Arrays(x, y, x[:1000], y[:1000], clients, clients[:1000], "noise")


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


def bare_round(network: nn.Module, state: State, clients: list[tuple[Tensor, Tensor, int]], batch: int) -> State:
    """One round of FedAvg as one writes it by hand; a client is its inputs, labels and shuffling seed."""
    generator = torch.Generator()
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
    samples = 0
    for x, y, seed in clients:
        network.load_state_dict(state)
        optimizer = torch.optim.SGD(network.parameters(), lr=LR)
        network.train()
        running = torch.zeros(())
        order = torch.randperm(len(x), generator=generator.manual_seed(seed))
        for start in range(0, len(x), batch):
            chosen = order[start : start + batch]
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            running += loss.detach() * len(chosen)
        if not torch.isfinite(running):
            raise ArithmeticError("the loss is not finite")
        for name, tensor in network.state_dict().items():
            total[name].add_(tensor, alpha=len(x))
        samples += len(x)
    return {name: (tensor / samples).float() for name, tensor in total.items()}


class Alternating(FederatedTrainer):
    """Before each of its rounds, runs and times a bare one."""

    def __init__(self, network: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = network
        self.state: State = {}
        self.data: list[tuple[Tensor, Tensor]] = []
        self.times: dict[str, list[float]] = {"bare": [], "lit_fed": []}

    def _run_round(self, federation: Federation, round_idx: int) -> None:
        data = federation.data
        if not self.data:
            state = federation.algorithm.global_state()
            self.state = {name.removeprefix("network."): tensor.clone() for name, tensor in state.items()}
            generator = torch.Generator()
            for client in range(data.num_clients):
                loader: Any = data.train_loader(client, generator)
                self.data.append((loader._inputs[loader._indices], loader._targets[loader._indices]))
        cohort = federation.participation.select(round_idx)
        seeds = [derive_seed(self.seed, "train", round_idx, client, "data") for client in cohort]
        started = time.perf_counter()
        clients = [(*self.data[client], seed) for client, seed in zip(cohort, seeds, strict=True)]
        self.state = bare_round(self.network, self.state, clients, data.batch_size)
        middle = time.perf_counter()
        super()._run_round(federation, round_idx)
        self.times["bare"].append(middle - started)
        self.times["lit_fed"].append(time.perf_counter() - middle)


def compare(name: str, data: Noise, network: Callable[[], nn.Module], rounds: int) -> float:
    """Time both loops round by round; returns the median ratio."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = Alternating(
            network(),
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 1,
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        module = Classifier(network=network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
        trainer.fit(module, data, FedAvg())
        assert trainer.federation is not None
        for key, tensor in trainer.federation.algorithm.global_state().items():
            torch.testing.assert_close(tensor, trainer.state[key.removeprefix("network.")], rtol=1e-4, atol=1e-5)
    print(f"{name}: {rounds} rounds, weights agree")
    medians = {loop: statistics.median(column[1:]) for loop, column in trainer.times.items()}  # the first warms up
    for loop, column in trainer.times.items():
        print(f"  {loop:8s} median {medians[loop] * 1e3:8.1f} ms   minimum {min(column[1:]) * 1e3:8.1f} ms a round")
    pairs = list(zip(trainer.times["lit_fed"][1:], trainer.times["bare"][1:], strict=True))
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    print(f"  ratio of a round's times, median {ratio:.3f}")
    return ratio


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; one gives the steadiest times")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = args.rounds
    images, points = Noise(10, 500, (3, 32, 32), 50), Noise(1000, 5, (60,), 5)
    compare("2-conv CNN, 10 clients × 500 images of 32×32, batch 50", images, two_convs, rounds)
    compare("logistic regression, 1,000 clients × 5 samples", points, lambda: nn.Linear(60, 10), rounds)


if __name__ == "__main__":
    main()
