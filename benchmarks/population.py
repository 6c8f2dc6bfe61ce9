"""What a round and its memory cost in a population of 1,000 clients and in one of 100,000, or of any two sizes.

Ten clients are sampled a round, each with ten samples, and the global model is tested on a shared set of fixed size:
the work of a round is the same in both. Both populations read the same samples, ten for each client of the larger one,
so the data arrays are equal. Only the index of the partition is larger for the larger population, necessarily: 80 bytes
of sample indices and 8 bytes of offset a client.

Every run is a process of its own, and the populations take turns. Printed are the median time of a round after a
warm-up, everything included that a run does by default (checkpoint, CSV files, TensorBoard); the peak of the process's
memory, setting up included; the same less the data and partition arrays; and what the rounds add to what the process
held before the first of them.

    python benchmarks/population.py [--rounds 100] [--repeats 5] [--clients 1000 100000] [--cohort 10]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import machine  # beside this file
import numpy as np
import torch
from torch import nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.data import Arrays, Partition, Samples, TensorDataModule
from lit_fed.data.partitions.csr import CSR
from lit_fed.engine.loop.run import Run
from lit_fed.methods import FedAvg
from lit_fed.participation import Participant, UniformParticipation
from lit_fed.protocols import GlobalTest

PER_CLIENT, FEATURES, CLASSES = 10, 8, 10
WARM_UP = 10
BAR = 1.10  # what a hundred times the clients may cost
MIB = 2.0**20

Figures = dict[str, float]


class FirstRows(Partition):
    """Client k owns samples 10k to 10k + 9; the rest is nobody's."""

    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """See `Partition.__call__`."""
        owned = np.arange(num_clients * PER_CLIENT, dtype=np.int64)
        return CSR.from_sizes(owned, np.full(num_clients, PER_CLIENT, dtype=np.int64))


class Many(TensorDataModule):
    """Random samples of a few features, ten for each of some number of clients, of whom the first are there."""

    num_classes = CLASSES
    input_shape = (FEATURES,)

    def __init__(self, num_clients: int, enough_for: int) -> None:
        super().__init__(num_clients=num_clients, partition=FirstRows())
        self.enough_for = enough_for

    def load_arrays(self) -> Arrays:
        """Standard normal inputs, uniform labels; the thousand test samples are the first of the training samples."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.enough_for * PER_CLIENT, FEATURES), dtype=np.float32)
        y = rng.integers(0, CLASSES, len(x))
        return Arrays(x, y, x[:1000].copy(), y[:1000].copy(), source="random numbers")

    def num_bytes(self) -> int:
        """Bytes of the data and partition arrays."""
        tensors = [*self._x.values(), *self._y.values()]
        parts: list[Any] = [getattr(self._ready, entry.name) for entry in fields(self._ready)]
        for part in parts:  # which grows by what its parts hold
            parts += getattr(part, "__dict__", {}).values()
        arrays = {id(part): part.nbytes for part in parts if isinstance(part, np.ndarray)}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + sum(arrays.values())


class Meter(Callback):
    """Notes the time and the memory from round to round."""

    def __init__(self, cohort: int) -> None:
        self.cohort = cohort
        self.starts: list[float] = []
        self.resident: list[float] = []

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Everything of the round before is over, its checkpoint included."""
        if len(plan) != self.cohort:
            raise ValueError(f"round {round_idx} has {len(plan)} clients, not {self.cohort}")
        self.resident.append(resident_bytes())
        self.starts.append(time.perf_counter())

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """The round's memory is largest about now."""
        self.resident.append(resident_bytes())


def resident_bytes() -> float:
    """Memory that the process holds at the moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def run(num_clients: int, enough_for: int, cohort: int, rounds: int) -> Figures:
    """Run one federation in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    imported = resident_bytes()
    meter, data = Meter(cohort), Many(num_clients, enough_for)
    network = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=WARM_UP + rounds + 1,
            participation=UniformParticipation(count=cohort),
            protocols=[GlobalTest()],
            callbacks=[meter],
            default_root_dir=folder,
            enable_progress_bar=False,
            num_threads=1,
        )
        trainer.fit(Classifier(network=network), data, FedAvg())
        checkpoint = (trainer.log_dir / "checkpoints" / "last.ckpt").stat().st_size
    times = np.diff(meter.starts)[WARM_UP:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {
        "round": float(np.median(times)),
        "start": meter.starts[0] - started,
        "imported": imported,
        "arrays": float(data.num_bytes()),
        "before": meter.resident[0],
        "peak": peak,
        "rounds_add": max(meter.resident) - meter.resident[0],
        "last_rounds_add": meter.resident[-1] - meter.resident[2 * WARM_UP],
        "checkpoint": float(checkpoint),
    }


def run_in_child(num_clients: int, *same: int) -> Figures:
    """Run one federation in a process of its own, so that peaks of memory do not mix."""
    command = [sys.executable, __file__, "--child", *map(str, (num_clients, *same))]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    result: Figures = json.loads(finished.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What a large population costs over a small one.")
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each population")
    parser.add_argument("--clients", type=int, nargs=2, default=[1_000, 100_000], help="of both populations")
    parser.add_argument("--cohort", type=int, default=10, help="clients of a round")
    parser.add_argument("--child", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(*args.child)))
        return
    few, many = args.clients
    runs: dict[int, list[Figures]] = {few: [], many: []}
    for repeat in range(args.repeats):
        for num_clients in (few, many) if repeat % 2 == 0 else (many, few):
            runs[num_clients].append(run_in_child(num_clients, many, args.cohort, args.rounds))
    small, large = ({key: statistics.median(one[key] for one in found) for key in found[0]} for found in runs.values())
    for medians in (small, large):
        medians["beyond"] = medians["peak"] - medians["arrays"]
        medians["own"] = medians["beyond"] - medians["imported"]
    print(f"{args.repeats} runs of {args.rounds} rounds with {args.cohort} clients each; medians; {machine.line()}")
    print(f"{'':58}{few:>12,}{many:>12,}     ratio")
    for key, label, unit in (
        ("round", "a round, ms", 1e-3),
        ("peak", "peak memory of the process, MiB", MIB),
        ("arrays", "  of it data and partition arrays, MiB", MIB),
        ("beyond", "  beyond those arrays, MiB", MIB),
        ("own", "  beyond those arrays and the imported libraries, MiB", MIB),
        ("before", "memory before the first round, MiB", MIB),
        ("imported", "  of it there once lit_fed is imported, MiB", MIB),
        ("rounds_add", "what the rounds add, MiB", MIB),
        ("last_rounds_add", f"  of it after {WARM_UP} rounds, MiB", MIB),
        ("checkpoint", "a checkpoint, KiB", 1024.0),
        ("start", "from start to the first round, s", 1.0),
    ):
        one, other = small[key] / unit, large[key] / unit
        print(f"{label:58}{one:12.2f}{other:12.2f}{other / one if one > 0 else float('nan'):10.3f}")
    held = {"a round": "round", "peak memory": "peak", "memory beyond the arrays": "beyond"}
    for label, key in held.items():
        ratio = large[key] / small[key]
        print(f"{label}: {ratio - 1:+.1%}, {'within' if ratio <= BAR else 'NOT within'} {BAR - 1:.0%}")


if __name__ == "__main__":
    main()
