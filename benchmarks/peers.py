"""Seconds a round of this library beside Flower's simulation, pfl and a Trainer for every client, on one core.

Every library runs the same federation in a process of its own that is bound to one core, as `peer_loops.py` has them,
in shuffled order, several times. A round lies between two ends of rounds, so start-up is left out. Needs an environment
with all three::

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

from peer_loops import LOOPS, TASKS  # beside this file

ROUNDS = {"flower": 3, "trainer": 2}  # the others have more, for theirs are short
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}


def main() -> int:
    """Run all, and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    options = parser.parse_args()
    runs = [(loop, task) for loop in options.loops for task in options.tasks] * options.repeats
    random.Random(0).shuffle(runs)
    found: dict[tuple[str, str], list[float]] = {}
    for loop, task in runs:
        seconds = measure(loop, task, ROUNDS.get(loop, options.rounds))
        found.setdefault((loop, task), []).append(seconds)
        print(f"{loop}, {task}: {seconds:.4f} s a round, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print("\n".join(table(found, options.loops, options.tasks)))
    if options.json is not None:
        told = [{"loop": loop, "task": task, "seconds": seconds} for (loop, task), seconds in found.items()]
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(loop: str, task: str, rounds: int) -> float:
    """The median round of one run."""
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
        seconds: list[float] = json.loads(path.read_text(encoding="utf-8"))
        return statistics.median(seconds)


def table(found: dict[tuple[str, str], list[float]], loops: list[str], tasks: list[str]) -> list[str]:
    """As Markdown: median seconds a round, and how often as long as ours."""
    ours = [loop for loop in loops if loop.startswith("lit_fed")]
    heads = ["", *(f"{task}, s a round" for task in tasks), *(f"{task} / {loop}" for loop in ours for task in tasks)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for loop in loops:
        medians = [statistics.median(found[loop, task]) for task in tasks]
        ratios = [
            statistics.median(a / b for a, b in zip(found[loop, task], found[own, task], strict=True))
            for own in ours
            for task in tasks
        ]
        lines.append("| " + " | ".join([loop, *(f"{m:.4f}" for m in medians), *(f"{r:.2f}" for r in ratios)]) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
