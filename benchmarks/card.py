"""Everything that a borrowed GPU is to answer, in parts of minutes, and one table of how they ended.

| part | what it runs |
|---|---|
| tests | `tests/engine/test_across_on_a_gpu.py`: every method beside the CPU, resumed, in groups and graphs |
| graphs | `graphs.py`: a step beside loops by hand |
| gpu | `gpu.py`: a round by precision, layout, graphs and groups |
| feddr_plus | does FedDr+ lead dot-regression after 320 rounds? nine runs of data/cifar100.npz |

Each part's output goes to ``<out>/<part>.txt`` as it comes, and a row to ``<out>/card.jsonl`` when it ends. No part
starts with less time left than it needs; the table says which. Started again with ``--parts``, it goes on with the
others, and the study with its unfinished cells.

    python benchmarks/card.py --out OUT [--parts tests graphs …] [--budget 570] [--processes 12] [--dry]

``--dry`` tries all of it on a processor in a minute: a few of the tests with the processor in the GPU's place, the
smallest row of each benchmark, and the study's list of cells.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import machine  # beside this file
import torch

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = "tests/engine/test_across_on_a_gpu.py"
STUDY = "configs/papers/feddr_plus/studies/feddr_plus_figures_2_to_5.yaml"


class Part(NamedTuple):
    """A command, what it makes of ``--dry``, and the seconds that it needs."""

    words: list[str]
    dry: list[str]
    seconds: int


def parts_of(out: Path, processes: int) -> dict[str, Part]:
    """The parts by name, in the order of their worth."""
    tests = ["-m", "pytest", GPU_TESTS, "-p", "no:cacheprovider"]
    study = ["-m", "lit_fed", "study", "-c", STUDY, "--profile", "cifar100_card", "--output", str(out / "studies")]
    return {
        "tests": Part([*tests, "-n", str(processes)], [*tests, "-k", "a_base_from or dropout_and_what"], 200),
        "graphs": Part(["benchmarks/graphs.py"], ["benchmarks/graphs.py", "--dry"], 60),
        "gpu": Part(["benchmarks/gpu.py"], ["benchmarks/gpu.py", "--dry"], 60),
        "feddr_plus": Part([*study, "--jobs", "3"], [*study, "--dry_run"], 300),
    }


def run(words: Sequence[str], file: Path, limit: float, dry: bool) -> int:
    """Run a command of Python with its output in a file; returns its exit status, 124 if the time is over."""
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | ({"LIT_FED_CARD": "cpu"} if dry else {})
    with file.open("w", encoding="utf-8") as output:
        try:
            return subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                timeout=limit, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124


def last_line(file: Path) -> str:
    """What a part said last."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""


def commit() -> str:
    """The commit that is tried, or "unknown" in a copy without a repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """A row a part; returns 1 if one failed or did not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(parts_of(Path(), 1)), help="all by default")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all of it")
    parser.add_argument("--processes", type=int, default=12, help="of the tests, side by side on the GPU")
    parser.add_argument("--dry", action="store_true", help="on a processor, the least of each part")
    args = parser.parse_args(argv)
    if not (args.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here; --dry tries the script without one")
    out, begun = args.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    card = "dry" if args.dry else torch.cuda.get_device_name()
    rows = []
    for name, part in parts_of(out, args.processes).items():
        if args.parts and name not in args.parts:
            continue
        left = args.budget - (time.monotonic() - begun)
        row = {"part": name, "card": card, "commit": commit(), "torch": torch.__version__}
        if left < part.seconds and not args.dry:
            row |= {"seconds": "0", "status": "not started", "said": f"{left:.0f} s are left, it needs {part.seconds}"}
        else:
            at, file = time.monotonic(), out / f"{name}.txt"
            status = run(part.dry if args.dry else part.words, file, left, args.dry)
            row |= {"seconds": f"{time.monotonic() - at:.0f}", "status": str(status), "said": last_line(file)}
        rows.append(row)
        with (out / "card.jsonl").open("a", encoding="utf-8") as kept:
            print(json.dumps(row), file=kept)
    print(f"{card}, {machine.line()}, commit {commit()}")
    print("| part | seconds | exit status | last line |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['part']} | {row['seconds']} | {row['status']} | {row['said'].replace('|', '/')} |")
    return int(any(row["status"] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
