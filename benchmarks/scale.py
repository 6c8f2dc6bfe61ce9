"""What groups of clients gain under SCAFFOLD, and what a second process gains.

The same federation is run two ways in turn, each in a process of its own with one thread; the median over repeats of
the ratio of the times of a round counts.

SCAFFOLD keeps a state for every client, which is written in every round: 1,000 clients with logistic regression,
trained in groups, over the same one after the other; CPU time.

Two processes share the clients of a cohort: ten clients with a 2-conv CNN. What that gains is compared with what two
bare loops gain that are run at the same time over one alone, for the cores of a machine share its memory; wall-clock
time, on an idle machine of at least two cores.

    python benchmarks/scale.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine  # beside this file, as the next but two
import numpy as np
import torch
from networks import logistic, two_convs
from overhead import LR, BareLoop, Noise

from lit_fed import Classifier, FederatedTrainer
from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import Run
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import Participant

GROUPS_DEMAND, PROCESSES_DEMAND = 0.25, 0.9
ROUNDS = {"bare": 5, "fedavg": 5, "scaffold": 8}
IMAGES = 200  # of a client


class Starts(Callback):
    """When rounds begin, by both clocks."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Take the time."""
        self.times.append((time.monotonic(), time.process_time()))

    def on_fit_end(self, run: Run) -> None:
        """Take the time."""
        self.times.append((time.monotonic(), time.process_time()))


def federate(algorithm: Any, data: Any, network: Callable[[], Any], rounds: int, **settings: Any) -> list[list[float]]:
    """Wall-clock and CPU seconds of rounds, without the first."""
    starts = Starts()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu",
            max_rounds=rounds + 1,
            evaluate_every=0,
            num_threads=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[starts],
            **settings,
        )
        model = Classifier(network=network(), optimizer=lambda p: torch.optim.SGD(p, lr=LR))
        trainer.fit(model, data, algorithm)
    return between(starts.times)


def bare(rounds: int) -> list[list[float]]:
    """The same work as ``fedavg`` by hand."""
    torch.manual_seed(0)
    network = two_convs()
    loop = BareLoop(network, network.state_dict(), 0.0, 1)
    clients = [(torch.randn(IMAGES, 3, 32, 32), torch.randint(0, 10, (IMAGES,)), seed) for seed in range(10)]
    times = []
    for _ in range(rounds + 1):
        times.append((time.monotonic(), time.process_time()))
        loop.round(clients, 50)
    times.append((time.monotonic(), time.process_time()))
    return between(times)


def between(times: list[tuple[float, float]]) -> list[list[float]]:
    """What lies between instants, without the first, which warms up."""
    found: list[list[float]] = np.diff(np.array(times), axis=0)[1:].tolist()
    return found


def work(what: str, how: str, path: str) -> None:
    """Do one thing, and write its times."""
    torch.set_num_threads(1)
    rounds = ROUNDS[what]
    if what == "bare":
        times = bare(rounds)
    elif what == "scaffold":
        times = federate(Scaffold(), Noise(1000, 5, (60,), 5), logistic, rounds, devices=1, executor=how)
    else:
        times = federate(FedAvg(), Noise(10, IMAGES, (3, 32, 32), 50), two_convs, rounds, devices=int(how))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(json.dumps(times), encoding="utf-8")


def seconds(what: str, how: str, at_once: int = 1) -> tuple[float, float]:
    """Median wall-clock and CPU seconds of a round, the slowest of so many processes that do the same at once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{idx}.json" for idx in range(at_once)]
        words = [sys.executable, __file__, "--work", what, how]
        started = [
            subprocess.Popen([*words, str(path)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for path in paths
        ]
        for process in started:
            error = process.communicate()[1]
            if process.returncode:
                raise SystemExit(f"{what} failed: {error.decode(errors='replace')[-1000:]}")
        found = [np.median(json.loads(path.read_text(encoding="utf-8")), axis=0).tolist() for path in paths]
    return max(wall for wall, _ in found), max(cpu for _, cpu in found)


def main() -> None:
    """Both comparisons; the exit status is 1 where one misses what is demanded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return
    groups, gains = [], []
    for _ in range(args.repeats):
        groups.append(seconds("scaffold", "vectorized")[1] / seconds("scaffold", "sequential")[1])
        print(f"SCAFFOLD: {groups[-1]:.3f}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    for _ in range(args.repeats):
        ours = seconds("fedavg", "1")[0] / seconds("fedavg", "2")[0]
        gains.append(ours / (2 * seconds("bare", "")[0] / seconds("bare", "", 2)[0]))
        print(f"processes: {gains[-1]:.3f}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    ratio, gain = statistics.median(groups), statistics.median(gains)
    print(f"SCAFFOLD in groups / one client after the other: {ratio:.3f} (demand ≤ {GROUPS_DEMAND})")
    print(f"gain of a second process / of a second bare loop: {gain:.3f} (demand ≥ {PROCESSES_DEMAND})")
    print(f"{args.repeats} repeats; {machine.line()}")
    if ratio > GROUPS_DEMAND or gain < PROCESSES_DEMAND:
        raise SystemExit("missed")


if __name__ == "__main__":
    main()
