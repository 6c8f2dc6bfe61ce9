"""A client's step on a GPU: lit_fed beside hand-written loops, eager and with one CUDA graph a step.

FedAvg on noise that lies on the GPU; SGD with momentum. Medians over the rounds but the first, by the clock. The
hand-written loops neither log nor save anything, and the one with a graph replays the optimizer's step, too. Ends with
1 where a bar is missed: one client after the other 1.3 times the eager loop, graphs 1.5 times the hand-written graph
for MobileNet and the transformer, groups .02 of one after the other for the MLP and .05 for logistic regression.

    python benchmarks/graphs.py [--rounds 4] [--only WORD …] [--dry]

``--dry`` tries the script where there is no GPU: the processor in its place, logistic regression without graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import machine  # beside this file, as the next but two
import numpy as np
import torch
from round_times import Seconds
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.methods import FedAvg
from lit_fed.networks import build_network

LR, MOMENTUM = 0.01, 0.9
CARD = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = ["by hand", "sequential", "a graph by hand", "graphs", "groups"]


@dataclass(frozen=True)
class Work:
    """A network, its clients and their work in a round; every client takes part."""

    name: str
    make: Callable[[], nn.Module]
    clients: int
    samples: int
    shape: tuple[int, ...]
    batch: int
    epochs: int
    classes: int = 10

    @property
    def steps(self) -> int:
        """Of all clients of a round."""
        return self.clients * self.epochs * -(-self.samples // self.batch)


def network(name: str, classes: int, **kwargs: Any) -> Callable[[], nn.Module]:
    """Makes one of lit_fed's networks."""
    return lambda: build_network(name, num_classes=classes, in_channels=3, input_shape=(3, 32, 32), **kwargs)


IMAGES: dict[str, Any] = {"clients": 10, "samples": 100, "shape": (3, 32, 32), "batch": 50, "epochs": 3}
WORKS = [
    Work("mobilenet", network("mobilenet", 100, batch_stats=True), classes=100, **IMAGES),
    Work("vit", network("vit_tiny_patch16_224", 10, patch_size=4, depth=6), **IMAGES),
    Work("cnn", network("mcmahan_cnn", 10), **IMAGES),
    Work("mlp", lambda: nn.Sequential(nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 10)), 500, 5, (60,), 5, 5),
    Work("logistic", lambda: nn.Linear(60, 10), 1000, 5, (60,), 5, 1),
]


class Noise(TensorDataModule):
    """Every client's samples."""

    def __init__(self, work: Work) -> None:
        super().__init__(num_clients=work.clients, partition=Natural(), batch_size=work.batch)
        self.work = work

    @property
    def num_classes(self) -> int:
        """See `FederatedDataModule`."""
        return self.work.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """See `FederatedDataModule`."""
        return self.work.shape

    def load_arrays(self) -> Arrays:
        """Drawn from seed 0."""
        work, draw = self.work, np.random.default_rng(0)
        own = np.repeat(np.arange(work.clients), work.samples)
        x = draw.standard_normal((len(own), *work.shape), dtype=np.float32)
        y = draw.integers(0, work.classes, len(own))
        return Arrays(x, y, x[:100], y[:100], own, own[:100], "noise")


def ours(work: Work, rounds: int, **settings: Any) -> list[float]:
    """Seconds of lit_fed's rounds but the first."""
    times = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator=CARD, devices=1, max_rounds=rounds + 1, local_epochs=work.epochs, evaluate_every=0,
            default_root_dir=folder, enable_progress_bar=False, callbacks=[times], **settings,
        )  # fmt: skip
        torch.manual_seed(0)
        task = Classifier(
            network=work.make(),
            num_classes=work.classes,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM),
        )
        trainer.fit(task, Noise(work), FedAvg())
    return times.found[1:]


class ByHand:
    """FedAvg in a dozen lines."""

    def __init__(self, work: Work) -> None:
        torch.manual_seed(0)
        self.work, count = work, work.clients * work.samples
        self.x = torch.randn(count, *work.shape, device=CARD)
        self.y = torch.randint(0, work.classes, (count,), device=CARD)
        self.model = work.make().to(CARD).train()
        self.own = [parameter.detach() for parameter in self.model.parameters()]
        self.server = [tensor.clone() for tensor in self.own]
        self.sums = [torch.zeros_like(tensor) for tensor in self.own]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.rows = torch.zeros(work.batch, dtype=torch.int64, device=CARD)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, rows: Tensor, to_none: bool = True) -> None:
        """A step on some samples."""
        self.optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()

    def record(self) -> None:
        """The step as a graph that reads ``self.rows``."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(self.rows, to_none=False)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.step(self.rows, to_none=False)

    def round(self) -> None:
        """All clients, one after the other."""
        work = self.work
        for client in range(work.clients):
            torch._foreach_copy_(self.own, self.server)
            if self.graph is None:
                self.optimizer.state.clear()
            else:
                torch._foreach_zero_([state["momentum_buffer"] for state in self.optimizer.state.values()])
            for _ in range(work.epochs):
                order = torch.randperm(work.samples, device=CARD) + client * work.samples
                for rows in order.split(work.batch):
                    if self.graph is None:
                        self.step(rows)
                    else:
                        self.rows.copy_(rows)
                        self.graph.replay()
            torch._foreach_add_(self.sums, self.own, alpha=1 / work.clients)
        torch._foreach_copy_(self.server, self.sums)
        torch._foreach_zero_(self.sums)


def wait() -> None:
    """Let the GPU finish."""
    if CARD == "cuda":
        torch.cuda.synchronize()


def by_hand(work: Work, rounds: int, graph: bool = False) -> list[float]:
    """Seconds of the hand-written rounds."""
    loop, times = ByHand(work), []
    if graph:
        loop.record()
    for _ in range(rounds + 1):
        wait()
        begun = time.perf_counter()
        loop.round()
        wait()
        times.append(time.perf_counter() - begun)
    return times[1:]


def main(argv: Sequence[str] | None = None) -> int:
    """A row a network; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[work.name for work in WORKS], help="networks")
    parser.add_argument("--dry", action="store_true", help="logistic regression on the processor, without graphs")
    args = parser.parse_args(argv)
    if not (args.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here")
    only, count = (["logistic"], 1) if args.dry else (args.only, args.rounds)
    print(f"{'dry' if args.dry else torch.cuda.get_device_name()}, {machine.line()}; ms a round")
    print(f"| | steps | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    missed = []
    for work in (work for work in WORKS if work.name in only):
        small = work.name in ("mlp", "logistic")
        ways = {
            "by hand": partial(by_hand, work, count),
            "sequential": partial(ours, work, count),
            **({} if small else {"a graph by hand": partial(by_hand, work, count, graph=True)}),
            **({} if args.dry else {"graphs": partial(ours, work, count, compile="graph")}),
            **({} if work.name == "mobilenet" else {"groups": partial(ours, work, count, executor="vectorized")}),
        }
        found = {name: statistics.median(way()) * 1e3 for name, way in ways.items()}
        cells = [f"{found[name]:.0f}" if name in found else "" for name in COLUMNS]
        print(f"| {work.name} | {work.steps} | {' | '.join(cells)} |", flush=True)
        bars = [("sequential", "by hand", 1.3)]
        if work.name in ("mobilenet", "vit"):
            bars.append(("graphs", "a graph by hand", 1.5))
        if small:
            bars.append(("groups", "sequential", 0.02 if work.name == "mlp" else 0.05))
        for name, base, bar in bars:
            if (ratio := found[name] / found[base]) > bar:
                missed.append(f"{work.name}: {name} / {base} is {ratio:.3f}; the bar is {bar}")
    print("\n".join(missed))
    return int(bool(missed) and not args.dry)


if __name__ == "__main__":
    sys.exit(main())
