"""What a round and its memory cost in a population of 1,000 clients and in one of 100,000.

Ten clients are sampled a round, each with ten samples, and the global model is tested on a shared set of fixed size:
the work of a round is the same in both. Both populations read the same million samples, so the data arrays are equal;
the clients of the smaller one own the first 1 % of them. Only the index of the partition is larger for the larger
population, necessarily: 80 bytes of sample indices and 8 bytes of offset a client.

Every run is a process of its own, and the populations take turns. Printed are the median time of a round after a
warm-up, everything included that a run does by default (checkpoint, CSV files, TensorBoard); the peak of the process's
memory, setting up included; the same less the data and partition arrays; and what the rounds add to what the process
held before the first of them.

    python benchmarks/population.py [--rounds 100] [--repeats 5]
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

import numpy as np
import torch
from torch import nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback, RoundRecord
from lit_fed.data import Arrays, Partition, Samples, TensorDataModule
from lit_fed.data.csr import CSR
from lit_fed.engine.participation import Participant
from lit_fed.engine.protocols import GlobalTest
from lit_fed.engine.run import Run
from lit_fed.engine.samplers import UniformParticipation
from lit_fed.methods import FedAvg

SMALL, LARGE = 1_000, 100_000
PER_CLIENT, FEATURES, CLASSES = 10, 8, 10
COHORT = 10
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


class Million(TensorDataModule):
    """A million random samples of a few features, whatever the number of clients."""

    num_classes = CLASSES
    input_shape = (FEATURES,)

    def load_arrays(self) -> Arrays:
        """Standard normal inputs, uniform labels; the thousand test samples are the first of the training samples."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((LARGE * PER_CLIENT, FEATURES), dtype=np.float32)
        y = rng.integers(0, CLASSES, len(x))
        return Arrays(x, y, x[:1000].copy(), y[:1000].copy(), source="random numbers")

    def num_bytes(self) -> int:
        """Bytes of the data and partition arrays."""
        tensors = [*self._x.values(), *self._y.values()]
        parts: list[Any] = [getattr(self._ready, entry.name) for entry in fields(self._ready)]
        parts += [value for part in parts if not isinstance(part, np.ndarray) for value in vars(part).values()]
        parts += [value for part in parts if isinstance(part, CSR) for value in vars(part).values()]
        arrays = {id(part): part.nbytes for part in parts if isinstance(part, np.ndarray)}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + sum(arrays.values())


class Meter(Callback):
    """Notes the time and the memory from round to round."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.resident: list[float] = []

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Everything of the round before is over, its checkpoint included."""
        if len(plan) != COHORT:
            raise ValueError(f"round {round_idx} has {len(plan)} clients, not {COHORT}")
        self.resident.append(resident_bytes())
        self.starts.append(time.perf_counter())

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """The round's memory is largest about now."""
        self.resident.append(resident_bytes())


def resident_bytes() -> float:
    """Memory that the process holds at the moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def run(num_clients: int, rounds: int) -> Figures:
    """Run one federation in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    imported = resident_bytes()
    meter, data = Meter(), Million(num_clients=num_clients, partition=FirstRows())
    network = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=WARM_UP + rounds + 1,
            participation=UniformParticipation(count=COHORT),
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


def run_in_child(num_clients: int, rounds: int) -> Figures:
    """Run one federation in a process of its own, so that peaks of memory do not mix."""
    command = [sys.executable, __file__, "--child", str(num_clients), "--rounds", str(rounds)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    result: Figures = json.loads(finished.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What a population of 100,000 costs over one of 1,000.")
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each population")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args.child, args.rounds)))
        return
    runs: dict[int, list[Figures]] = {SMALL: [], LARGE: []}
    for repeat in range(args.repeats):
        for num_clients in (SMALL, LARGE) if repeat % 2 == 0 else (LARGE, SMALL):
            runs[num_clients].append(run_in_child(num_clients, args.rounds))
    small, large = ({key: statistics.median(one[key] for one in found) for key in found[0]} for found in runs.values())
    for medians in (small, large):
        medians["beyond"] = medians["peak"] - medians["arrays"]
        medians["own"] = medians["beyond"] - medians["imported"]
    print(f"{args.repeats} runs of {args.rounds} rounds with {COHORT} clients each; medians")
    print(f"{'':58}{SMALL:>12,}{LARGE:>12,}     ratio")
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
