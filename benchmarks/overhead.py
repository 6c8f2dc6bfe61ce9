"""What the round loop costs over a bare hand-written PyTorch loop that does the same work.

Both run in this process, in turn, on the same tensors and with the same shuffling; the median over rounds of the ratio
of a round's two CPU times is what counts, for a machine's speed drifts. The weights of both must agree in the first
rounds, or the comparison is void: later on, networks that learn noise by heart make much of rounding. The federation
also writes its logs and a checkpoint every round, which the bare loop does not. Every row has a demand; the exit status
is 1 where one is missed.

    python benchmarks/overhead.py [--rounds 20] [--threads 1] [--only WORD] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import machine  # beside this file, as the next
import numpy as np
import torch
import torch.nn.functional as F
from networks import logistic, mlp, mobilenet, two_convs
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.engine.loop.run import Run
from lit_fed.methods import FedAvg
from lit_fed.participation import Participant
from lit_fed.seeding import derive_seed

LR = 0.05
AGREE_ROUNDS = 4
State = dict[str, Tensor]


class Noise(TensorDataModule):
    """Random samples, as many for every client, or shares drawn from Dir(α) beside one sample each."""

    num_classes = 10
    input_shape: tuple[int, ...] = ()

    def __init__(
        self,
        num_clients: int,
        samples: int,
        shape: tuple[int, ...],
        batch_size: int,
        alpha: float | None = None,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=Natural(), batch_size=batch_size)
        self.samples, self.alpha = samples, alpha
        self.input_shape = shape

    def load_arrays(self) -> Arrays:
        """Standard normal inputs, uniform labels."""
        rng = np.random.default_rng(0)
        sizes = np.full(self.num_clients, self.samples)
        if self.alpha is not None:
            shares = rng.dirichlet(np.full(self.num_clients, self.alpha))
            sizes = 1 + rng.multinomial(self.num_clients * (self.samples - 1), shares)
        clients = np.repeat(np.arange(self.num_clients), sizes)
        x = rng.standard_normal((len(clients), *self.input_shape), dtype=np.float32)
        y = rng.integers(0, 10, len(clients))
        return Arrays(x, y, x[:1000], y[:1000], clients, clients[:1000], "noise")


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
        held = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
        self.names, self.tensors = list(held), list(held.values())
        self.state = [state[name].clone() for name in held]
        self.sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in self.state]
        self.optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=momentum)
        self.generator = torch.Generator()

    def round(self, clients: list[tuple[Tensor, Tensor, int]], batch: int) -> None:
        """One round; a client is its inputs, labels and shuffling seed."""
        torch._foreach_zero_(self.sums)
        self.network.train()
        samples = 0
        for x, y, seed in clients:
            torch._foreach_copy_(self.tensors, self.state)
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
            for total, tensor in zip(self.sums, self.tensors, strict=True):
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
        if self.bare is not None and round_idx <= AGREE_ROUNDS:
            ours = federation.global_model(round_idx)
            for name, other in zip(self.bare.names, self.bare.state, strict=True):
                torch.testing.assert_close(ours[f"network.{name}"], other, rtol=1e-4, atol=1e-5)
        if self.bare is None:
            state = federation.global_model(0)
            named = {name.removeprefix("network."): tensor for name, tensor in state.items()}
            self.bare = BareLoop(self.network, named, self.momentum, self.epochs)
            generator = torch.Generator()
            for client in range(data.num_clients):
                loader: Any = data.train_loader(client, generator)
                self.data.append((loader._inputs[loader.indices], loader.targets[loader.indices]))
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


@dataclass(frozen=True)
class Row:
    """A comparison.

    Args:
        name: Of it.
        demand: The largest ratio.
        data: Makes the data.
        network: Makes the network.
        executor: How the cohort is trained.
        epochs: Passes over a client's data.
    """

    name: str
    demand: float
    data: Callable[[], Noise]
    network: Callable[[], nn.Module]
    executor: Literal["sequential", "vectorized"] = "sequential"
    epochs: int = 1


def compare(row: Row, rounds: int, momentum: float = 0.9) -> dict[str, float]:
    """Time both loops round by round; returns the median times in seconds and the median ratio."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        watch = Alternating(row.network(), momentum, row.epochs)
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 1,
            local_epochs=row.epochs,
            executor=row.executor,
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[watch],
        )
        model = Classifier(network=row.network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=momentum))
        trainer.fit(model, row.data(), FedAvg())
    columns = {loop: column[1:] for loop, column in watch.times.items()}  # the first warms up
    found = {loop: statistics.median(column) for loop, column in columns.items()}
    pairs = zip(columns["lit_fed"], columns["bare"], strict=True)
    return found | {"ratio": statistics.median(ours / bare for ours, bare in pairs)}


IMAGES, POINTS = partial(Noise, 10, 500, (3, 32, 32), 50), partial(Noise, 1000, 5, (60,), 5)
FEWER = partial(Noise, 10, 100, (3, 32, 32), 50)
SKEWED = partial(Noise, 1000, 20, (60,), 10, 0.1)
ROWS = (
    Row("2-conv CNN, 10 clients × 500 images of 32×32, batch 50", 1.03, IMAGES, two_convs),
    Row("MobileNetV2, 10 clients × 100 images of 32×32, batch 50", 1.03, FEWER, mobilenet),
    Row("logistic regression, 1,000 clients × 5 samples", 1.25, POINTS, logistic),
    Row("MLP, 1,000 clients × 5 samples, 5 epochs", 1.12, POINTS, mlp, epochs=5),
    Row("logistic regression in groups", 0.16, POINTS, logistic, "vectorized"),
    Row("MLP in groups, 5 epochs", 0.6, POINTS, mlp, "vectorized", 5),
    Row("logistic regression in groups, sizes by Dirichlet 0.1", 0.5, SKEWED, logistic, "vectorized"),
    Row("MLP in groups, 5 epochs, sizes by Dirichlet 0.1", 0.5, SKEWED, mlp, "vectorized", 5),
)


def main() -> None:
    """All comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; one gives the steadiest times")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    parser.add_argument("--output", type=Path, help="also write overhead.json there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {row: compare(row, args.rounds) for row in ROWS if args.only in row.name}
    print("| | bare, ms a round | lit_fed, ms a round | ratio | demand |\n|---|---|---|---|---|")
    for row, times in found.items():
        bare, ours = (f"{times[loop] * 1e3:.1f}" for loop in ("bare", "lit_fed"))
        print(f"| {row.name} | {bare} | {ours} | {times['ratio']:.3f} | ≤ {row.demand} |")
    print(f"{args.rounds} rounds, weights agree; {machine.line()}")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        content = [{"name": row.name, "demand": row.demand, **times} for row, times in found.items()]
        (args.output / "overhead.json").write_text(json.dumps(content, indent=1))
    if missed := [row.name for row, times in found.items() if times["ratio"] > row.demand]:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
