"""How near this library is to the leanest loops that one can write by hand, in groups and one client after the other.

`Lean` is a bare loop without a running loss: sums in float32, momentum zeroed in place. `Batched` is a group of clients
by hand, for one perceptron: the floor of groups, to which they are compared where there is one, because the ratio to
`Lean` follows the processor. Both run in this process in turn with a federation, round by round, on the same tensors
and with the same shuffling; what counts is the median over rounds of the ratio of two CPU times, or of their difference
by client, after the first round. After the first round all weights must agree. "Checks of groups" is the part of a run
of 100 rounds in which groups are compared with clients alone. The last row is the fixed cost of a study's cell: its CPU
seconds less its round's seconds by the clock, which count only on a quiet machine. Every row has a demand; the exit
status is 1 where one is missed.

    python benchmarks/floor.py [--seconds 12] [--only WORD] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import machine  # beside this file, as the next
import timm
import torch
import torch.nn.functional as F
import yaml
from networks import logistic, mlp
from overhead import LR, BareLoop, Noise, State
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import Run
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import Participant
from lit_fed.seeding import derive_seed

MOMENTUM = 0.9
AUTO_DEMAND, SCAFFOLD_DEMAND = 1.1, 0.25
CELL_DEMAND = 0.3
CHECKS_DEMAND = 0.02
PROCESSES_DEMAND = {"sequential": 1.6, "vectorized": 1.2}
LEAST_ROUNDS, MOST_ROUNDS = 3, 40
ClientData = tuple[Tensor, Tensor, int]
How = Literal["sequential", "vectorized"]


class Lean:
    """A bare loop as lean as one can write it.

    Args:
        network: Trains.
        state: The first global model.
        epochs: Passes over a client's data.
        lr: Learning rate.
        momentum: Of SGD.
    """

    def __init__(
        self, network: nn.Module, state: State, epochs: int, lr: float = LR, momentum: float = MOMENTUM
    ) -> None:
        self.network, self.epochs = network.train(), epochs
        self.tensors = [parameter.detach() for parameter in network.parameters()]
        self.state = [state[name].clone() for name, _ in network.named_parameters()]
        self.sums = [torch.zeros_like(tensor) for tensor in self.state]
        self.optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)
        self.generator = torch.Generator()

    def round(self, clients: Sequence[ClientData], batch: int) -> None:
        """One round; a client is its inputs, labels and shuffling seed."""
        total = sum(len(x) for x, _, _ in clients)
        for x, y, seed in clients:
            torch._foreach_copy_(self.tensors, self.state)
            self.generator.manual_seed(seed)
            if self.optimizer.state:
                torch._foreach_zero_([held["momentum_buffer"] for held in self.optimizer.state.values()])
            for _ in range(self.epochs):
                for chosen in torch.randperm(len(x), generator=self.generator).split(batch):
                    loss = F.cross_entropy(self.network(x[chosen]), y[chosen])
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
            torch._foreach_add_(self.sums, self.tensors, alpha=len(x) / total)
        torch._foreach_copy_(self.state, self.sums)
        torch._foreach_zero_(self.sums)


class Batched:
    """Groups by hand: products of matrices side by side, the gradient of cross-entropy in closed form.

    For one linear layer, or two around a ReLU, and clients of one size.

    Args:
        state: The first global model.
        epochs: Passes over a client's data.
        size: Clients in a group.
    """

    def __init__(self, state: Sequence[Tensor], epochs: int, size: int) -> None:
        self.state, self.epochs, self.size = [tensor.clone() for tensor in state], epochs, size
        self.generator = torch.Generator()

    @torch.no_grad()
    def round(self, clients: Sequence[ClientData], batch: int) -> None:
        """One round, as `Lean.round`."""
        sums = [torch.zeros_like(tensor) for tensor in self.state]
        for start in range(0, len(clients), self.size):
            found = self._group(clients[start : start + self.size], batch)
            for total, tensor in zip(sums, found, strict=True):
                total.add_(tensor.sum(0), alpha=1 / len(clients))
        self.state = sums

    def _group(self, clients: Sequence[ClientData], batch: int) -> list[Tensor]:
        inputs = torch.stack([x for x, _, _ in clients]).flatten(2)
        labels = torch.stack([y for _, y, _ in clients])
        count = inputs.shape[1]
        orders = torch.empty(len(clients), self.epochs, count, dtype=torch.int64)
        for idx, (_, _, seed) in enumerate(clients):
            self.generator.manual_seed(seed)
            for epoch in range(self.epochs):
                orders[idx, epoch] = torch.randperm(count, generator=self.generator)
        own = [tensor.unsqueeze(0).repeat(len(clients), *[1] * tensor.ndim) for tensor in self.state]
        momentum: list[Tensor] = []
        rows = torch.arange(len(clients)).unsqueeze(1)
        for epoch in range(self.epochs):
            for start in range(0, count, batch):
                chosen = orders[:, epoch, start : start + batch]
                gradients = self._gradients(own, inputs[rows, chosen], labels[rows, chosen], rows)
                if momentum:
                    torch._foreach_mul_(momentum, MOMENTUM)
                    torch._foreach_add_(momentum, gradients)
                else:
                    momentum = gradients
                torch._foreach_add_(own, momentum, alpha=-LR)
        return own

    @staticmethod
    def _gradients(own: list[Tensor], x: Tensor, y: Tensor, rows: Tensor) -> list[Tensor]:
        hidden = x
        if len(own) == 4:
            hidden = torch.baddbmm(own[1].unsqueeze(1), x, own[0].mT).relu_()
        logits = torch.baddbmm(own[-1].unsqueeze(1), hidden, own[-2].mT)
        errors = logits.softmax(2)
        errors[rows, torch.arange(errors.shape[1]), y] -= 1
        errors /= errors.shape[1]
        last = [torch.bmm(errors.mT, hidden), errors.sum(1)]
        if len(own) == 2:
            return last
        below = torch.bmm(errors, own[2]) * (hidden > 0)
        return [torch.bmm(below.mT, x), below.sum(1), *last]


class Turns(Callback):
    """Before each round of a federation, runs and times the hand-written loops; ends the run when its time is over."""

    def __init__(self, row: Row, seconds: float) -> None:
        self.row, self.seconds = row, seconds
        self.loops: dict[str, Any] = {}
        self.data: list[tuple[Tensor, Tensor]] = []
        self.times: dict[str, list[float]] = {}
        self._started: float | None = None
        self._begun = time.monotonic()

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """What lies between the end of this and the next is one round of ours."""
        self._stop()
        federation = run.federation
        held = {name.removeprefix("network."): tensor for name, tensor in federation.global_model(0).items()}
        if not round_idx:
            self._begin(held, federation.data)
        elif round_idx == 1:
            for name, loop in self.loops.items():
                for tensor, own in zip(loop.state, held.values(), strict=True):
                    torch.testing.assert_close(tensor, own, rtol=1e-4, atol=1e-5, msg=f"{name} has other weights")
        clients = [
            (*self.data[one.client_id], derive_seed(federation.seed, "train", round_idx, one.client_id, "data"))
            for one in plan
        ]
        for name in random.Random(round_idx).sample(list(self.loops), len(self.loops)):
            started = time.process_time()
            self.loops[name].round(clients, federation.data.batch_size)
            self.times.setdefault(name, []).append(time.process_time() - started)
        if round_idx >= LEAST_ROUNDS and time.monotonic() - self._begun > self.seconds:
            run.should_stop = True
        self._started = time.process_time()

    def _begin(self, held: State, data: Any) -> None:
        row = self.row
        if row.against == "bare":
            self.loops["bare"] = BareLoop(row.network(), held, MOMENTUM, row.epochs)
        elif row.against == "lean":
            self.loops["lean"] = Lean(row.network(), held, row.epochs)
        if row.batched:
            self.loops["batched"] = Batched(list(held.values()), row.epochs, row.batched)
        generator = torch.Generator()
        for client in range(data.num_clients):
            loader: Any = data.train_loader(client, generator)
            self.data.append((loader._inputs[loader.indices], loader.targets[loader.indices]))

    def on_fit_end(self, run: Run) -> None:
        """The last round is over."""
        self._stop()

    def _stop(self) -> None:
        if self._started is not None:
            self.times.setdefault("ours", []).append(time.process_time() - self._started)
            self._started = None


@dataclass(frozen=True)
class Row:
    """A comparison.

    Args:
        name: Of it.
        data: Makes the data.
        network: Makes the network.
        demands: The largest ratio of CPU times to the loop, by executor; of groups to `Batched` where there is one.
        epochs: Passes over a client's data.
        against: The loop; None compares the executors with each other only.
        batched: Clients in a group of `Batched`; 0 leaves it out.
        beyond: The largest CPU time of groups beyond `Batched`, in µs a client.
        method: Makes the method.
    """

    name: str
    data: Callable[[], Noise]
    network: Callable[[], nn.Module]
    demands: dict[How, float] = field(default_factory=dict)
    epochs: int = 1
    against: Literal["lean", "bare"] | None = "lean"
    batched: int = 0
    beyond: float = 0
    method: Callable[[], Any] = FedAvg


def pixels() -> nn.Module:
    """One layer over 784 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron(hidden: int) -> nn.Module:
    """A hidden layer over 784 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def convolutions() -> nn.Module:
    """A CNN of 672,000 parameters over 3×32×32 images."""
    first = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 10))


def transformer() -> nn.Module:
    """A vision transformer of four blocks over 3×32×32 images."""
    found: nn.Module = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=96, depth=4, num_heads=4, num_classes=10, qkv_bias=False
    )
    return found


POINTS, PIXELS = partial(Noise, 1000, 5, (60,), 5), partial(Noise, 1000, 5, (1, 28, 28), 5)
SKEWED, IMAGES = partial(Noise, 1000, 20, (60,), 10, 0.1), partial(Noise, 10, 100, (3, 32, 32), 50)
PATCHES, FEW = partial(Noise, 10, 100, (3, 32, 32), 20), partial(Noise, 10, 10, (1, 28, 28), 5)
ROWS = (
    Row("logistic regression 60-10", POINTS, logistic, {"vectorized": 8, "sequential": 1.45}, batched=500, beyond=70),
    Row("MLP 60-32-10, 5 epochs", POINTS, mlp, {"vectorized": 3.2, "sequential": 1.1}, 5, batched=128, beyond=110),
    Row("logistic regression 784-10", PIXELS, pixels, {"vectorized": 5.5}, batched=128, beyond=130),
    Row("MLP 784-200-10, 5 epochs", PIXELS, partial(perceptron, 200), {"vectorized": 2.4}, 5, batched=8, beyond=1500),
    Row("logistic regression 60-10, Dirichlet 0.1", SKEWED, logistic, {"vectorized": 0.3}, against="bare"),
    Row("CNN, 672,000 parameters", IMAGES, convolutions, {"sequential": 1.05}),
    Row("ViT, 4 blocks of 96", PATCHES, transformer, {"sequential": 1.02}),
    Row("MLP 784-10000-10, two steps", FEW, partial(perceptron, 10_000), {"sequential": 1.5}),
    Row("SCAFFOLD, logistic regression 60-10", POINTS, logistic, {"vectorized": 0.25}, against=None, method=Scaffold),
)
BOTH = 200_000  # parameters up to which both executors are measured, and `auto` compared with the better


def trainer_of(row: Row, executor: str, folder: str, **settings: Any) -> tuple[FederatedTrainer, Classifier]:
    """A row's trainer and model."""
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_rounds": MOST_ROUNDS} | settings
    made = FederatedTrainer(
        local_epochs=row.epochs,
        executor=executor,  # type: ignore[arg-type]  # one of its names
        evaluate_every=0,
        default_root_dir=folder,
        enable_progress_bar=False,
        **chosen,
    )
    return made, Classifier(network=row.network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM))


def compare(row: Row, executor: str, seconds: float) -> dict[str, float]:
    """Medians: CPU seconds of a round, ours and the loops'; ours to and beyond each loop, the latter by client."""
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(row, seconds)
        made, model = trainer_of(row, executor, folder, callbacks=[turns])
        made.fit(model, row.data(), row.method())
    columns = {name: column[1:] for name, column in turns.times.items()}  # the first warms up
    found = {name: statistics.median(column) for name, column in columns.items()}
    for name in turns.loops:
        pairs = list(zip(columns["ours"], columns[name], strict=False))
        found[f"to {name}"] = statistics.median(ours / theirs for ours, theirs in pairs)
        found[f"beyond {name}"] = statistics.median(ours - theirs for ours, theirs in pairs) / len(turns.data)
    return found | {"rounds": len(columns["ours"])}


def choice(row: Row) -> How:
    """The executor that `auto` chooses for a row."""
    with tempfile.TemporaryDirectory() as folder:
        made, model = trainer_of(row, "auto", folder)
        executor = made.assemble(model, row.data(), row.method(), "fit").federation.executor
        assert isinstance(executor, AutoExecutor)
        return "vectorized" if isinstance(executor.chosen, VectorizedExecutor) else "sequential"


class Clock(Callback):
    """Times of rounds, on the first process.

    Args:
        now: Tells the time, by default the clock's.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.times: list[float] = []
        self.now = now

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Take the time."""
        self.times.append(self.now())

    def on_fit_end(self, run: Run) -> None:
        """Take the time, and tell it."""
        self.times.append(self.now())
        if run.fabric.is_global_zero:
            print(f"seconds {statistics.median(self.rounds())}", flush=True)

    def rounds(self) -> list[float]:
        """Seconds of all rounds but the first."""
        return [end - begin for begin, end in zip(self.times, self.times[1:], strict=False)][1:]


def several(executor: str, devices: int) -> None:
    """Train the second row on some processes, in a process of its own, for its times."""
    row = ROWS[1]
    with tempfile.TemporaryDirectory() as folder:
        made, model = trainer_of(
            row, executor, folder, devices=devices, max_rounds=5, callbacks=[Clock()], num_threads=1
        )
        made.fit(model, row.data(), row.method())


def gain(executor: str) -> float:
    """Seconds of a round by one process over those by two, by the clock."""
    seconds = []
    for devices in (1, 2):
        words = [sys.executable, __file__, "--processes", executor, str(devices)]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        seconds.append(float(next(line for line in told.splitlines() if line.startswith("seconds ")).split()[1]))
    return seconds[0] / seconds[1]


def checks(row: Row) -> float:
    """CPU seconds in which groups are compared with clients alone, over those of 100 rounds without it."""
    spent, clock = dict.fromkeys(("probe", "_check"), 0.0), Clock(time.process_time)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in spent:
            original = getattr(VectorizedExecutor, name)

            def timed(*args: Any, name: str = name, original: Any = original) -> None:
                started = time.process_time()
                original(*args)
                spent[name] += time.process_time() - started

            stack.enter_context(patch.object(VectorizedExecutor, name, timed))
        made, model = trainer_of(row, "vectorized", folder, max_rounds=9, callbacks=[clock])
        made.fit(model, row.data(), row.method())
    # Five of nine rounds check a client, and eight of a hundred; the shortest does not.
    return (spent["probe"] + spent["_check"] * 8 / 5) / (100 * min(clock.rounds()))


def cell() -> float:
    """CPU seconds of a study's cell beyond its one round of one step; the median of eight."""
    study = {
        "metric": "global/acc",
        "seeds": list(range(8)),
        "configs": ["quickstart.yaml"],
        "set": {
            "trainer.max_rounds": 1,
            "trainer.local_epochs": None,
            "trainer.local_steps": 1,
            "trainer.participation.init_args.count": 1,
            "trainer.num_threads": 1,
        },
        "rows": {"fedavg": {"configs": ["method/fedavg.yaml"]}},
        "columns": {"iid": {"configs": ["data/digits_iid.yaml"]}},
        "profiles": {"pocket": {}},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cells.yaml"
        file.write_text(yaml.safe_dump(study))
        words = ["study", "-c", str(file), "--profile", "pocket", "--jobs", "1", "--output", folder]
        subprocess.run([sys.executable, "-m", "lit_fed", *words], capture_output=True, check=True)
        costs: list[float] = []
        for record in Path(folder).rglob("cell.json"):
            with open(next(record.parent.rglob("metrics.csv")), newline="", encoding="utf-8") as rounds:
                took = sum(float(row["time/round_s"]) for row in csv.DictReader(rounds))
            costs.append(json.loads(record.read_text())["cpu_seconds"] - took)
    return statistics.median(costs)


@dataclass
class Table:
    """Rows told as they are found."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, name: str, ours: str, base: str, value: float, demand: float, least: bool = False) -> None:
        """Print a row."""
        missed = value < demand if least else value > demand
        sign = "≥" if least else "≤"
        print(
            f"| {name} | {base} | {ours} | {value:.3f} | {sign} {demand} | {'missed' if missed else ''} |", flush=True
        )
        self.rows.append({"name": name, "value": value, "demand": demand, "missed": missed, "base": base, "ours": ours})


def milliseconds(found: dict[str, float], name: str | None) -> str:
    """A time of a round, for the table."""
    return "" if name is None or name not in found else f"{found[name] * 1e3:.1f}"


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="of each comparison, by the clock")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    parser.add_argument("--output", type=Path, help="also write floor.json there")
    parser.add_argument("--processes", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.processes:
        several(args.processes[0], int(args.processes[1]))
        return
    table, kept = Table(), {}
    print("| | loop, ms a round | ours, ms a round | ratio | demand | |\n|---|---|---|---|---|---|", flush=True)
    for row in ROWS:
        if args.only not in row.name:
            continue
        values = sum(parameter.numel() for parameter in row.network().parameters())
        hows: list[How] = [how for how in ("vectorized", "sequential") if how in row.demands]
        if values <= BOTH or not hows or row.batched:
            hows = ["vectorized", "sequential"]
        found = {how: compare(row, how, args.seconds) for how in hows}
        kept[row.name] = found
        for how, demand in row.demands.items():
            if row.against is None:
                ratio = found["vectorized"]["ours"] / found["sequential"]["ours"]
                ours, base = (milliseconds(found[one], "ours") for one in ("vectorized", "sequential"))
                table.tell(f"{row.name}, vectorized to sequential", ours, base, ratio, demand)
                continue
            loop, told = (row.against, "") if how == "sequential" or not row.batched else ("batched", " to by hand")
            ours, base = milliseconds(found[how], "ours"), milliseconds(found[how], loop)
            table.tell(f"{row.name}, {how}{told}", ours, base, found[how][f"to {loop}"], demand)
        if row.batched:
            groups = found["vectorized"]
            table.tell("… beyond by hand, µs a client", "", "", groups["beyond batched"] * 1e6, row.beyond)
            print(
                f"| … to the lean loop | {milliseconds(groups, 'lean')} | | {groups['to lean']:.3f} | | |", flush=True
            )
        if len(found) == 2:
            name = row.against or "ours"
            scaled = {how: one["ours"] / one[name] if row.against else one["ours"] for how, one in found.items()}
            chosen = choice(row)
            ratio = scaled[chosen] / min(scaled.values())
            table.tell(f"{row.name}, auto ({chosen}) to the better", "", "", ratio, AUTO_DEMAND)
    for executor, demand in PROCESSES_DEMAND.items():
        if args.only in "two processes" and (os.cpu_count() or 1) > 1:
            table.tell(f"{ROWS[1].name}, two processes, {executor}, wall", "", "", gain(executor), demand, least=True)
    for row in ROWS[:2]:
        if args.only in "checks of groups":
            table.tell(f"checks of groups, {row.name}, share of 100 rounds", "", "", checks(row), CHECKS_DEMAND)
    if args.only in "a study's cell":
        table.tell("a study's cell beyond its round, CPU s", "", "", cell(), CELL_DEMAND)
    print(machine.line())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine.line(), "rows": table.rows, "times": kept}
        (args.output / "floor.json").write_text(json.dumps(content, indent=1))
    if missed := [row["name"] for row in table.rows if row["missed"]]:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
