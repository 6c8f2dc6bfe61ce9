"""What it costs to test 1,000 clients that share a model, over one pass of that model over all their test samples.

Both in this process, in turn; the median of the ratios of their CPU times. `ClientTest` also makes a row of metrics for
every client, which is what is left of the difference where the network is so small that a pass takes milliseconds.
Below it, what testing models of the clients' own takes one after the other and in groups.

    python benchmarks/evaluation.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import machine  # beside this file, as the next two
import numpy as np
import torch
from networks import logistic, mlp, two_convs
from overhead import LR
from torch import nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.loop.run import Run
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.methods import FedAvg, LocalOnly
from lit_fed.participation import Participant
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest

Times = list[tuple[float, ...]]
CLIENTS = 1000
DEMAND = 1.3
ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "2-conv CNN, 2,000 images of 32×32": (two_convs, (3, 32, 32), 2_000),
    "MLP, 100,000 samples": (mlp, (60,), 100_000),
    "logistic regression, 100,000 samples": (logistic, (60,), 100_000),
}


class Tests(TensorDataModule):
    """Noise: two training samples a client, and test samples whose clients are drawn."""

    num_classes = 10
    input_shape: tuple[int, ...] = ()

    def __init__(self, shape: tuple[int, ...], samples: int) -> None:
        super().__init__(num_clients=CLIENTS, partition=Natural(), batch_size=2, shared_batch_size=500)
        self.input_shape, self.samples = shape, samples

    def load_arrays(self) -> Arrays:
        """Standard normal inputs, uniform labels."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((max(self.samples, 2 * CLIENTS), *self.input_shape), dtype=np.float32)
        y, n = rng.integers(0, 10, len(x)), 2 * CLIENTS
        owners = np.sort(rng.integers(0, CLIENTS, self.samples))
        train = np.repeat(np.arange(CLIENTS), 2)
        return Arrays(x[:n], y[:n], x[: self.samples], y[: self.samples], train, owners, "noise")


class Timing(Callback):
    """Tests before the second round, both ways in turn."""

    def __init__(self, repeats: int, *protocols: Protocol) -> None:
        self.repeats, self.protocols = repeats, protocols
        self.seconds: list[tuple[float, ...]] = []

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """The first time warms up."""
        for _ in range(self.repeats + 1 if round_idx == 1 else 0):
            self.seconds.append(tuple(cpu_seconds(protocol, run, round_idx) for protocol in self.protocols))


def cpu_seconds(protocol: Protocol, run: Run, round_idx: int) -> float:
    """Of one evaluation."""
    started = time.process_time()
    protocol.run(run.federation, round_idx, "test")
    return time.process_time() - started


def measure(name: str, executor: Any, repeats: int, method: Algorithm[Any], *protocols: Protocol) -> Times:
    """CPU seconds of some protocols, by repeat."""
    network, shape, samples = ROWS[name]
    torch.manual_seed(0)
    timing = Timing(repeats, *protocols)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=2,
            executor=executor,
            evaluate_every=0,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[timing],
        )
        model = Classifier(network=network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
        trainer.fit(model, Tests(shape, samples), method)
    return timing.seconds[1:]


def main() -> None:
    """All rows; the exit status is 1 where groups of clients take longer than demanded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines, missed = ["| | executor | one pass, ms | 1,000 clients, ms | ratio |", "|---|---|---|---|---|"], []
    for name in ROWS:
        for executor in ("sequential", "vectorized"):
            found = measure(name, executor, args.repeats, FedAvg(), GlobalTest(), ClientTest())
            once, clients = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
            ratio = statistics.median(b / a for a, b in found)
            lines.append(f"| {name} | {executor} | {once:.1f} | {clients:.1f} | {ratio:.2f} |")
            if executor == "vectorized" and ratio > DEMAND:
                missed.append(name)
    print("\n".join([*lines, "", "| own models | alone, ms | in groups, ms | ratio |", "|---|---|---|---|"]))
    for name in list(ROWS)[1:]:
        for method, protocol in ((LocalOnly, ClientTest), (FedAvg, PersonalTest)):
            alone, groups = (
                statistics.median(times[0] for times in measure(name, executor, args.repeats, method(), protocol()))
                * 1e3
                for executor in ("sequential", "vectorized")
            )
            called = f"{name}, {method.__name__}, {protocol.__name__}"
            print(f"| {called} | {alone:.0f} | {groups:.0f} | {groups / alone:.2f} |", flush=True)
    print(machine.line())
    if missed:
        raise SystemExit(f"above {DEMAND}: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
