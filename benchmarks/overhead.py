"""What the round loop costs over a bare hand-written PyTorch loop that does the same work.

Both run in this process, in turn, on the same tensors and with the same shuffling; the median over rounds of the ratio
of a round's two CPU times is what counts, for a machine's speed drifts. The weights of both must agree at the end, or
the comparison is void. The federation also writes its logs and a checkpoint every round, which the bare loop does not.

    python benchmarks/overhead.py [--rounds 20] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.engine.participation import Participant
from lit_fed.engine.run import Run
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


def mlp() -> nn.Module:
    """A hidden layer of 32 units over 60 numbers."""
    return nn.Sequential(nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 10))


class BareLoop:
    """FedAvg as one writes it by hand, leanly: one optimizer object, tensors copied and summed in one call each.

    Args:
        network: Trains.
        state: The first global model.
        momentum: Of SGD.
        epochs: Passes over a client's data.
    """

    def __init__(self, network: nn.Module, state: State, momentum: float, epochs: int) -> None:
        self.network, self.epochs = network, epochs
        self.parameters = [parameter.data for parameter in network.parameters()]
        self.state = [state[name].clone() for name, _ in network.named_parameters()]
        self.sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in self.state]
        self.optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum)
        self.generator = torch.Generator()

    def round(self, clients: list[tuple[Tensor, Tensor, int]], batch: int) -> None:
        """One round; a client is its inputs, labels and shuffling seed."""
        torch._foreach_zero_(self.sums)
        self.network.train()
        samples = 0
        for x, y, seed in clients:
            torch._foreach_copy_(self.parameters, self.state)
            self.optimizer.state.clear()
            self.generator.manual_seed(seed)
            running = torch.zeros(())
            for _ in range(self.epochs):
                order = torch.randperm(len(x), generator=self.generator)
                for start in range(0, len(x), batch):
                    chosen = order[start : start + batch]
                    self.optimizer.zero_grad()
                    loss = F.cross_entropy(self.network(x[chosen]), y[chosen])
                    loss.backward()
                    self.optimizer.step()
                    running += loss.detach() * len(chosen)
            if not torch.isfinite(running):
                raise ArithmeticError("the loss is not finite")
            for total, tensor in zip(self.sums, self.parameters, strict=True):
                total.add_(tensor, alpha=len(x))
            samples += len(x)
        torch._foreach_copy_(self.state, torch._foreach_div(self.sums, samples))


class Alternating(Callback):
    """Before each round of a federation, runs and times a bare one."""

    def __init__(self, network: nn.Module, momentum: float, epochs: int) -> None:
        self.network, self.momentum, self.epochs = network, momentum, epochs
        self.bare: BareLoop | None = None
        self.data: list[tuple[Tensor, Tensor]] = []
        self.times: dict[str, list[float]] = {"bare": [], "lit_fed": []}
        self._started: float | None = None

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """What lies between two of these is one round of ours, and then a bare one."""
        self._stop()
        federation, data = run.federation, run.federation.data
        if self.bare is None:
            state = federation.global_model(0)
            named = {name.removeprefix("network."): tensor for name, tensor in state.items()}
            self.bare = BareLoop(self.network, named, self.momentum, self.epochs)
            generator = torch.Generator()
            for client in range(data.num_clients):
                loader: Any = data.train_loader(client, generator)
                self.data.append((loader._inputs[loader._indices], loader._targets[loader._indices]))
        seeds = [derive_seed(federation.seed, "train", round_idx, one.client_id, "data") for one in plan]
        started = time.process_time()
        clients = [(*self.data[one.client_id], seed) for one, seed in zip(plan, seeds, strict=True)]
        self.bare.round(clients, data.batch_size)
        self._started = time.process_time()
        self.times["bare"].append(self._started - started)

    def on_fit_end(self, run: Run) -> None:
        """The last round is over."""
        self._stop()

    def _stop(self) -> None:
        if self._started is not None:
            self.times["lit_fed"].append(time.process_time() - self._started)


def compare(
    name: str, data: Noise, network: Callable[[], nn.Module], rounds: int, momentum: float, epochs: int
) -> float:
    """Time both loops round by round; returns the median ratio."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        watch = Alternating(network(), momentum, epochs)
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 1,
            local_epochs=epochs,
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[watch],
        )
        model = Classifier(network=network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=momentum))
        trainer.fit(model, data, FedAvg())
        assert watch.bare is not None
        for tensor, other in zip(trainer.run.federation.global_model(rounds).values(), watch.bare.state, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)
    print(f"{name}: {rounds} rounds, weights agree")
    medians = {loop: statistics.median(column[1:]) for loop, column in watch.times.items()}  # the first warms up
    for loop, column in watch.times.items():
        print(f"  {loop:8s} median {medians[loop] * 1e3:8.1f} ms   minimum {min(column[1:]) * 1e3:8.1f} ms a round")
    pairs = list(zip(watch.times["lit_fed"][1:], watch.times["bare"][1:], strict=True))
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    print(f"  ratio of a round's CPU times, median {ratio:.3f}")
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
    compare("2-conv CNN, 10 clients × 500 images of 32×32, batch 50", images, two_convs, rounds, 0.9, 1)
    compare("logistic regression, 1,000 clients × 5 samples", points, lambda: nn.Linear(60, 10), rounds, 0.9, 1)
    compare("MLP, 1,000 clients × 5 samples, 5 epochs", points, mlp, rounds, 0.9, 5)


if __name__ == "__main__":
    main()
