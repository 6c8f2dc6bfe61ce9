"""Seconds a round of this library beside pfl, BlazeFL, Flower's simulation, a Trainer per client and a bare loop.

A duel is one federation, which every library trains in a process of its own, as `peer_loops.py` has it, several times,
in shuffled order within each repeat, whose runs are compared. A round lies between two ends of rounds, so start-up is
left out. Libraries that work in one process have one core, and their CPU times are compared; two processes or threads
have two cores, and the clock counts. Slow loops run once.

Where a duel has a demand, their processes also take turns, a round each, which is steady on a busy machine;
the median ratio of their CPU times must meet it, or the exit status is 1. With ``--turns`` nothing else runs.

With ``--check`` nothing is timed: a client's samples are alike and the network has no dropout, so that shuffling
changes nothing, and all loops must reach the same weights after two rounds: the same steps, rates, averages.

Needs an environment with all libraries and Python 3.12, the only one that both pfl and BlazeFL take::

    python3.12 -m venv .venv-peers
    .venv-peers/bin/python -m pip install -r requirements/peers.txt -e .
    .venv-peers/bin/python benchmarks/peers.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import machine  # beside this file, as the next
import numpy as np
from numpy.typing import NDArray
from peer_loops import LOOPS, Baton, run

SLOW = ("Flower's simulation", "a Trainer per client")  # run once, two rounds
CHECK_ROUNDS = 2
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_DEDUP_LOGS": "0",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class Duel:
    """A federation and its loops.

    Args:
        task: Name of the federation in ``peer_loops.TASKS``.
        loops: Names of the loops.
        rounds: Of a run, the first of which is not counted.
        cores: Of a run.
        demands: For a library and a loop of ours: the smallest ratio of their CPU times.
    """

    task: str
    loops: tuple[str, ...]
    rounds: int
    cores: int = 1
    demands: dict[tuple[str, str], float] = field(default_factory=dict)


SEQUENTIAL, VECTORIZED, AUTO = "lit_fed, sequential", "lit_fed, vectorized", "lit_fed, auto"
TWO = ("lit_fed, two processes", "BlazeFL, two processes", "BlazeFL, two threads")
DUELS = {
    "logistic regression, 1,000 clients of 5 samples": Duel(
        "logistic regression",
        (SEQUENTIAL, VECTORIZED, "bare loop", "pfl", "a Trainer per client"),
        rounds=20,
        demands={("pfl", VECTORIZED): 13},
    ),
    "MLP, 1,000 clients of 5 samples, 5 epochs": Duel(
        "MLP", (SEQUENTIAL, VECTORIZED, "bare loop", "pfl"), rounds=6, demands={("pfl", VECTORIZED): 11}
    ),
    "pfl's harness for CIFAR-10: CNN with dropout, 50 of 1,000 clients of 50 images, batches of 10": Duel(
        "pfl's harness", (AUTO, "bare loop", "pfl"), rounds=4, demands={("pfl", AUTO): 1.0}
    ),
    "BlazeFL's setting: small CNN, 100 clients of 100 images, 5 epochs, batches of 50": Duel(
        "BlazeFL's setting",
        (AUTO, "bare loop", "BlazeFL", "Flower's simulation", "a Trainer per client"),
        rounds=3,
        demands={("BlazeFL", AUTO): 1.0},
    ),
    "BlazeFL's setting on two cores": Duel("BlazeFL's setting", TWO, rounds=3, cores=2),
}


@dataclass
class Found:
    """Of one run.

    Args:
        clock: Median seconds of a round.
        cpu: Median CPU seconds of a round.
        weights: The last ones.
        remark: On the loop.
    """

    clock: float
    cpu: float
    weights: NDArray[np.float32]
    remark: str


def train(loop: str, duel: Duel, rounds: int, alike: bool = False) -> Found:
    """Run a loop in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.npz"
        finish(start(loop, duel, rounds, alike, path), path, f"{loop}, {duel.task}")
        with np.load(path) as held:
            clock, cpu = np.median(held["seconds"], axis=0)
            return Found(float(clock), float(cpu), held["weights"], str(held["remark"]))


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def _cores(count: int) -> set[int]:
    return set(sorted(os.sched_getaffinity(0))[:count])


def measure(duel: Duel, loops: Sequence[str], repeats: int) -> dict[str, list[Found]]:
    """All runs of a duel, by loop."""
    found: dict[str, list[Found]] = {loop: [] for loop in loops}
    rng = random.Random(0)
    for repeat in range(repeats):
        for loop in rng.sample(loops, len(loops)):
            if loop in SLOW and repeat:
                continue
            one = train(loop, duel, 2 if loop in SLOW else duel.rounds)
            found[loop].append(one)
            told = f"{one.cpu:.4f} s of CPU a round, {one.clock:.4f} s by the clock"
            print(f"{loop}, {duel.task}: {told}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return found


def ratio(theirs: list[Found], ours: list[Found], cores: int) -> float:
    """Median over repeats of their time in multiples of ours."""
    seconds: Callable[[Found], float] = (lambda one: one.cpu) if cores == 1 else (lambda one: one.clock)
    return statistics.median(seconds(a) / seconds(b) for a, b in zip(theirs, ours, strict=False))


def table(name: str, duel: Duel, found: dict[str, list[Found]]) -> list[str]:
    """Markdown of a duel: medians over the runs, and multiples of ours."""
    ours = [loop for loop in found if loop.startswith("lit_fed")]
    what = "CPU time" if duel.cores == 1 else "clock"
    heads = [name, "version", "CPU s a round", "s by the clock", *(f"{what} / {loop}" for loop in ours)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for loop, runs in found.items():
        cells = [f"{loop} ({runs[0].remark})" if runs[0].remark else loop, version(LOOPS[loop][0])]
        cells += [
            f"{statistics.median(one.cpu for one in runs):.3f}",
            f"{statistics.median(one.clock for one in runs):.3f}",
        ]
        cells += [f"{ratio(runs, found[own], duel.cores):.2f}" for own in ours]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def in_turn(duel: Duel, ours: str, theirs: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """CPU seconds of rounds of ours and of theirs, whose processes take turns."""
    (first_in, first_out), (second_in, second_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("ours.npz", "theirs.npz")]
        ends = [(first_in, second_out), (second_in, first_out)]
        jobs = [
            start(loop, duel, duel.rounds, False, path, pipes)
            for loop, path, pipes in zip((ours, theirs), paths, ends, strict=True)
        ]
        os.write(first_out, b"x")
        for end in (first_in, first_out, second_in, second_out):
            os.close(end)
        for job, path, loop in zip(jobs, paths, (ours, theirs), strict=True):
            finish(job, path, f"{loop}, {duel.task}")
        a, b = (np.load(path)["seconds"][:, 1] for path in paths)
        return a, b


def start(
    loop: str, duel: Duel, rounds: int, alike: bool, path: Path, pipes: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Begin to run a loop in a process that is bound to the duel's cores."""
    words = [loop, duel.task, str(rounds), str(int(alike)), str(path), *map(str, pipes)]
    return subprocess.Popen(
        [sys.executable, __file__, "--one", *words],
        stdout=subprocess.DEVNULL,
        stderr=open(path.with_suffix(".log"), "wb"),  # the process's, to its end
        env=os.environ | QUIET | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path()},
        preexec_fn=partial(os.sched_setaffinity, 0, _cores(duel.cores)),
        pass_fds=pipes,
    )


def finish(job: subprocess.Popen[bytes], path: Path, name: str) -> None:
    """Wait for a process; end this one if it failed."""
    if job.wait():
        sys.exit(f"{name} failed:\n{path.with_suffix('.log').read_text(errors='replace')[-2000:]}")


def check(duel: Duel, loops: Sequence[str]) -> None:
    """All loops reach the same weights."""
    first: Found | None = None
    for loop in loops:
        one = train(loop, duel, CHECK_ROUNDS, alike=True)
        first = first or one
        np.testing.assert_allclose(one.weights, first.weights, rtol=1e-3, atol=1e-5, err_msg=f"{loop}, {duel.task}")
        apart = np.abs(one.weights - first.weights).max()
        print(f"{loop}, {duel.task}: the weights of {loops[0]} to {apart:.1e}", flush=True)


def main() -> int:
    """Run the duels, and print their tables; the exit status."""
    if sys.argv[1:2] == ["--one"]:
        loop, task, rounds, alike, path, *pipes = sys.argv[2:]
        baton = Baton(*map(int, pipes)) if pipes else None
        run(loop, task, int(rounds), alike == "1", Path(path), baton)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=list(LOOPS), metavar="LOOP")
    parser.add_argument("--only", default="", help="duels whose names hold this")
    parser.add_argument("--check", action="store_true", help="compare the loops' weights")
    parser.add_argument("--turns", action="store_true", help="only the pairs with a demand, in turn")
    parser.add_argument("--json", type=Path, help="also write all runs there")
    options = parser.parse_args()
    kept, rows = {}, []
    for name, duel in DUELS.items():
        loops = [loop for loop in duel.loops if loop in options.loops]
        if options.only not in name or not loops:
            continue
        if options.check:
            check(duel, loops)
            continue
        for (theirs, ours), demand in duel.demands.items():
            a, b = in_turn(duel, ours, theirs)
            rows.append(
                (f"{duel.task}, {theirs} / {ours}", np.median(a), np.median(b), float(np.median(b / a)), demand)
            )
        if options.turns:
            continue
        found = measure(duel, loops, options.repeats)
        print("\n".join([*table(name, duel, found), ""]), flush=True)
        kept[name] = {
            loop: [{key: value for key, value in asdict(one).items() if key != "weights"} for one in runs]
            for loop, runs in found.items()
        }
    if options.check:
        return 0
    print("| in turn | ours, CPU s a round | theirs | ratio | demand |\n|---|---|---|---|---|")
    for name, own, other, value, demand in rows:
        print(f"| {name} | {own:.4f} | {other:.4f} | {value:.2f} | ≥ {demand:g} |")
    runs_of = "" if options.turns else f"repeats: {options.repeats}, of slow loops 1; "
    print(f"{runs_of}{machine.line()}")
    failed = [f"{row[0]}: {row[3]:.2f} < {row[4]:g}" for row in rows if row[3] < row[4]]
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine.line(), "duels": kept}, indent=1) + "\n")
    if failed:
        print(f"missed: {'; '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
