"""What starting costs: importing the library, ``--help``, and a run to the end of its first round.

Each is a process of its own, in turn with one that only imports torch and Lightning; CPU times of the processes and
the programs that they start, and their medians.

    python benchmarks/startup.py [--repeats 5] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import machine  # beside this file

ROOT = Path(__file__).resolve().parents[1]
DEMAND_S = 1.0  # ``--help`` beyond the two imports
BASE, HELP = "import torch, lightning", "python cli.py --help"


def commands(folder: str) -> dict[str, list[str]]:
    """What is started, by name."""
    first = ["cli.py", "fit", "-c", "configs/quickstart.yaml", "--trainer.max_rounds", "1"]
    return {
        BASE: ["-c", BASE],
        "import lit_fed": ["-c", "import lit_fed"],
        HELP: ["cli.py", "--help"],
        "first round of the quickstart": [*first, "--trainer.default_root_dir", folder],
    }


def cpu_seconds(arguments: list[str]) -> float:
    """CPU time of a Python process, from its start to its end.

    Raises:
        SystemExit: If it fails; its last line says why.
    """
    before = os.times()
    ended = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {(ended.stderr.splitlines() or ['no word'])[-1]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """All commands in turn; exits with status 1 where ``--help`` takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write startup.json there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        all_commands = commands(folder)
        rounds = [{name: cpu_seconds(each) for name, each in all_commands.items()} for _ in range(args.repeats)]
    cpu = {name: statistics.median(found[name] for found in rounds) for name in all_commands}
    beyond = {name: statistics.median(found[name] - found[BASE] for found in rounds) for name in all_commands}
    print(f"| | CPU, s | beyond {BASE}, s |\n|---|---|---|")
    for name in all_commands:
        print(f"| {name} | {cpu[name]:.2f} | {beyond[name]:.2f} |")
    print(machine.line())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "startup.json").write_text(json.dumps({"cpu_s": cpu, "beyond_s": beyond}, indent=1))
    if beyond[HELP] > DEMAND_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
