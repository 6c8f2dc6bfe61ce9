"""How long studies take on this machine's cores when nothing else runs on them.

Of every study that is named, the cells of its first seeds run as `lit-fed study` runs them, as many side by side as
there are cores: of one seed, or of so many that there are four cells; then, of the first study alone, the same command
again, which has nothing left to run: that is what a start takes. What a study took beyond its start, times what there
is of such parts, and the start once, is what the whole takes. A simulation's start is not told apart: the time of its
first seed is multiplied. Beside it stands half of the processors' time that ``docs/results/studies.csv`` has of the
runs behind the claims, whatever ran beside them. What cannot run, for want of a file, is told and left out.

    python benchmarks/studies.py uwa:pocket fedfrozen_proposition1:simulation
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine  # beside this file
import yaml

ROOT = Path(__file__).resolve().parents[1]
CELLS = 4  # fewer would leave cores without work that have some in the whole study
SIMULATION = "simulation"
BUSY = 0.5  # a load above this before the first study: something else is running


def recorded() -> dict[str, dict[str, str]]:
    """The lines of ``docs/results/studies.csv`` by ``study:profile``."""
    with open(ROOT / "docs/results/studies.csv", newline="", encoding="utf-8") as file:
        return {f"{line['study']}:{line['profile']}": line for line in csv.DictReader(file)}


def is_simulation(profile: str) -> bool:
    """Whether it is a simulation's, or that of a second one, which asks again."""
    return profile.startswith(SIMULATION)


def command(name: str, profile: str, parts: int, folder: Path) -> list[str]:
    """The command line that runs a study's first seeds, or a simulation's.

    Raises:
        SystemExit: If there is no such file.
    """
    kind = "simulations" if is_simulation(profile) else "studies"
    if kind == "simulations":  # the file of what is asked again is called so
        name += profile.removeprefix(SIMULATION)
    found = sorted(ROOT.glob(f"configs/papers/*/{kind}/{name}.yaml"))
    if not found:
        raise SystemExit(f"there is no configs/papers/*/{kind}/{name}.yaml")
    if kind == "simulations":
        return ["simulate", "-c", str(found[0]), "--simulate.seeds", str(parts), "--output", str(folder / name)]
    study = yaml.safe_load(found[0].read_text(encoding="utf-8"))
    seeds = study["profiles"][profile].get("seeds") or study["seeds"]
    only = [f"*/*/{seed}" for seed in seeds[:parts]]
    return ["study", "-c", str(found[0]), "--profile", profile, "--only", *only, "--output", str(folder)]


def parts_of(line: dict[str, str]) -> int:
    """How many seeds are run of a study."""
    if is_simulation(line["profile"]):
        return 1
    return math.ceil(CELLS * int(line["seeds"]) / int(line["cells"].split()[-1]))


def elapsed(words: Sequence[str]) -> float:
    """Seconds by the clock from a command's start to its end.

    Raises:
        RuntimeError: If it fails; its last line says why.
    """
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(ended.stderr.splitlines() or ['no word'])[-1]}")
    return time.monotonic() - began


def main() -> None:
    """One after the other, and a line of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", metavar="STUDY:PROFILE", help="as docs/results/studies.csv has them")
    args = parser.parse_args()
    lines = recorded()
    if unknown := [study for study in args.studies if study not in lines]:
        raise SystemExit(f"docs/results/studies.csv has no {unknown[0]}; it has {', '.join(lines)}")
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"the load is {load:.1f}: something else is running", file=sys.stderr)
    print("| study | profile | seeds | took, s | all seeds, min | half of the CPU minutes, then |")
    print("|---|---|---|---|---|---|")
    start: float | None = None
    failed = 0
    for study in args.studies:
        line = lines[study]
        parts, cpu = parts_of(line), line["cpu"]
        with tempfile.TemporaryDirectory() as folder:
            words = command(line["study"], line["profile"], parts, Path(folder))
            try:
                took = elapsed(words)
                if start is None and not is_simulation(line["profile"]):
                    start = elapsed(words)
            except RuntimeError as error:  # those after it are timed all the same
                print(error, file=sys.stderr)
                failed += 1
                continue
        rest = 0.0 if start is None or is_simulation(line["profile"]) else start
        whole = ((took - rest) * int(line["seeds"]) / parts + rest) / 60
        then = f"{float(cpu) / 2:.1f}" if cpu != "not measured" else cpu
        of = f"{parts} of {line['seeds']}"
        print(f"| `{line['study']}` | {line['profile']} | {of} | {took:.0f} | {whole:.1f} | {then} |", flush=True)
    print(machine.line())
    if failed:
        raise SystemExit(f"{failed} of {len(args.studies)} studies could not be timed")


if __name__ == "__main__":
    main()
