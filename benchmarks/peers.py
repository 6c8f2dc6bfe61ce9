"""Seconds a round of this library beside Flower's simulation, pfl and a Trainer for every client, on one core.

Every library runs the same federation in a process of its own that is bound to one core, as `peer_loops.py` has them,
several times, in shuffled order within each repeat, whose runs are compared. A round lies between two ends of rounds,
so start-up is left out. The ratios are of CPU times, as in the other benchmarks. Needs an environment with all three::

    python -m venv .venv-peers
    .venv-peers/bin/python -m pip install -c requirements/flower.txt -r requirements/peers.txt -e .
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
from pathlib import Path
from typing import NamedTuple

from peer_loops import LOOPS, TASKS  # beside this file

ROUNDS = {"flower": 3, "trainer": 2}  # the others have more, for theirs are short
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}


class Seconds(NamedTuple):
    """Of a round.

    Args:
        clock: Between its end and that of the one before.
        cpu: Which the library's processes used in it.
    """

    clock: float
    cpu: float


Found = dict[tuple[str, str], list[Seconds]]


def main() -> int:
    """Run all, and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    every = [(loop, task) for loop in options.loops for task in options.tasks]
    rng = random.Random(0)
    runs = [run for _ in range(options.repeats) for run in rng.sample(every, len(every))]
    found: Found = {}
    for loop, task in runs:
        seconds = measure(loop, task, ROUNDS.get(loop, options.rounds))
        found.setdefault((loop, task), []).append(seconds)
        told = f"{seconds.cpu:.4f} s a round, {seconds.clock:.4f} by the clock"
        print(f"{loop}, {task}: {told}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print("\n".join(table(found, options.loops, options.tasks)))
    if options.json is not None:
        rows = [
            {"loop": loop, "task": task, "runs": [seconds._asdict() for seconds in runs_of]}
            for (loop, task), runs_of in found.items()
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(loop: str, task: str, rounds: int) -> Seconds:
    """The median round of one run, by both clocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        words = [sys.executable, "-c", "import peer_loops; peer_loops.main()", loop, task, str(rounds), str(path)]
        log = Path(folder) / "log"
        with open(log, "wb") as file:
            done = subprocess.run(
                words,
                stdout=file,
                stderr=file,
                env=os.environ | QUIET | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
                preexec_fn=lambda: os.sched_setaffinity(0, {0}),
                check=False,
            )
        if done.returncode:
            sys.exit(f"{loop}, {task} failed:\n{log.read_text(errors='replace')[-2000:]}")
        clock, cpu = zip(*json.loads(path.read_text(encoding="utf-8")), strict=True)
        return Seconds(statistics.median(clock), statistics.median(cpu))


def table(found: Found, loops: list[str], tasks: list[str]) -> list[str]:
    """As Markdown: median seconds a round of both clocks, and of how much more CPU time than ours."""
    ours = [loop for loop in loops if loop.startswith("lit_fed")]
    clocks = (f"{task}, {clock}" for task in tasks for clock in ("s of CPU a round", "s by the clock"))
    heads = ["", *clocks, *(f"{task} / {loop}" for loop in ours for task in tasks)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for loop in loops:
        medians = [
            statistics.median(getattr(seconds, clock) for seconds in found[loop, task])
            for task in tasks
            for clock in ("cpu", "clock")
        ]
        ratios = [
            statistics.median(a.cpu / b.cpu for a, b in zip(found[loop, task], found[own, task], strict=True))
            for own in ours
            for task in tasks
        ]
        lines.append("| " + " | ".join([loop, *(f"{m:.4f}" for m in medians), *(f"{r:.2f}" for r in ratios)]) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
