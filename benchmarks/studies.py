"""How long studies take on this machine's cores when nothing else runs on them.

Of every study that is named, the cells of its first seeds run as `lit-fed study` runs them, as many side by side as
there are cores: of one seed, or of so many that there are four cells; then, of the first study alone, the same command
again, which has nothing left to run: that is what a start takes. What a study took beyond its start, times what there
is of such parts, and the start once, is what the whole takes. A simulation's start is not told apart: the time of its
first seed is multiplied. Beside it stands half of the processors' time that ``docs/results/studies.csv`` has of the
runs behind the claims, whatever ran beside them.

With a number after its profile a study has its rounds divided by it: its cells run a share of them, and twice that
share, and what the second took beyond the first is taken for every further share.

    python benchmarks/studies.py uwa:pocket raf_table3:pocket:10 fedfrozen_proposition1:simulation
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CELLS = 4  # fewer would leave cores without work that have some in the whole study
BUSY = 0.5  # a load above this before the first study: something else is running
ROUNDS = "trainer.max_rounds"


def recorded() -> dict[str, dict[str, str]]:
    """The lines of ``docs/results/studies.csv`` by ``study:profile``."""
    with open(ROOT / "docs/results/studies.csv", newline="", encoding="utf-8") as file:
        return {f"{line['study']}:{line['profile']}": line for line in csv.DictReader(file)}


def command(name: str, profile: str, parts: int, folder: Path, share: tuple[int, int] = (1, 1)) -> list[str]:
    """The command line that runs a study's first seeds, or a simulation's, over a share of its rounds.

    Raises:
        SystemExit: If there is no such file.
    """
    kind = "simulations" if profile == "simulation" else "studies"
    found = sorted(ROOT.glob(f"configs/papers/*/{kind}/{name}.yaml"))
    if not found:
        raise SystemExit(f"there is no configs/papers/*/{kind}/{name}.yaml")
    path = found[0]
    if kind == "simulations":
        return ["simulate", "-c", str(path), "--simulate.seeds", str(parts), "--output", str(folder / name)]
    study = yaml.safe_load(path.read_text(encoding="utf-8"))
    seeds = study["profiles"][profile].get("seeds") or study["seeds"]
    if share != (1, 1):
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(shortened(study, profile, share), sort_keys=False), encoding="utf-8")
    only = [f"*/*/{seed}" for seed in seeds[:parts]]
    return ["study", "-c", str(path), "--profile", profile, "--only", *only, "--output", str(folder / "out")]


def shortened(study: Mapping[str, Any], profile: str, share: tuple[int, int]) -> dict[str, Any]:
    """The study file with this profile alone and a share of the rounds that it or its first configurations have."""
    profiles = {profile: study["profiles"][profile]}
    while "again" in (last := list(profiles.values())[-1]):
        profiles[last["again"]] = study["profiles"][last["again"]]
    settings = dict(study.get("set", {}))
    said = any(ROUNDS in (content.get("set") or {}) for content in (study, *profiles.values()))
    for file in [] if said else last.get("configs") or study.get("configs", []):
        rounds = yaml.safe_load((ROOT / file).read_text(encoding="utf-8")).get("trainer", {}).get("max_rounds")
        settings |= {} if rounds is None else {ROUNDS: rounds}
    found: dict[str, Any] = scaled({**study, "set": settings, "profiles": profiles}, share)
    return found


def scaled(node: Any, share: tuple[int, int]) -> Any:
    """A copy in which all rounds are that share of what they were.

    Raises:
        SystemExit: If they cannot be divided so.
    """
    if isinstance(node, list):
        return [scaled(item, share) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {key: scaled(value, share) for key, value in node.items()}
    if ROUNDS in copy:
        copy[ROUNDS], left = divmod(node[ROUNDS] * share[0], share[1])
        if left:
            raise SystemExit(f"{node[ROUNDS]} rounds cannot be divided by {share[1]}")
    return copy


def parts_of(line: dict[str, str]) -> int:
    """How many seeds are run of a study."""
    if line["profile"] == "simulation":
        return 1
    return math.ceil(CELLS * int(line["seeds"]) / int(line["cells"].split()[-1]))


def elapsed(words: Sequence[str]) -> float:
    """Seconds by the clock from a command's start to its end.

    Raises:
        SystemExit: If it fails; its last line says why.
    """
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "cli.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {(ended.stderr.splitlines() or ['no word'])[-1]}")
    return time.monotonic() - began


def main() -> None:
    """One after the other, and a line of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", metavar="STUDY:PROFILE", help="as docs/results/studies.csv has them")
    args = parser.parse_args()
    lines = recorded()
    named = [tuple([*study.split(":"), "1"][:3]) for study in args.studies]
    if unknown := [study for study in named if ":".join(study[:2]) not in lines]:
        raise SystemExit(f"docs/results/studies.csv has no {':'.join(unknown[0][:2])}; it has {', '.join(lines)}")
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"the load is {load:.1f}: something else is running", file=sys.stderr)
    print("| study | profile | seeds | rounds | took, s | all seeds, min | half of the CPU minutes, then |")
    print("|---|---|---|---|---|---|---|")
    start: float | None = None
    for name, profile, divided in named:
        line, shares = lines[f"{name}:{profile}"], int(divided)
        parts, cpu = parts_of(line), line["cpu"]
        with tempfile.TemporaryDirectory() as folder:
            words = command(name, profile, parts, Path(folder), (1, shares))
            took = [elapsed(words)]
            if start is None and profile != "simulation":
                start = elapsed(words)
        if shares > 1:
            with tempfile.TemporaryDirectory() as folder:
                took.append(elapsed(command(name, profile, parts, Path(folder), (2, shares))))
        rest = 0.0 if start is None or profile == "simulation" else start
        seeds = took[0] - rest + (took[-1] - took[0]) * (shares - 1)
        whole = (seeds * int(line["seeds"]) / parts + rest) / 60
        then = f"{float(cpu) / 2:.1f}" if cpu != "not measured" else cpu
        of = f"{parts} of {line['seeds']}"
        ran = "all" if shares == 1 else f"1/{shares}, 2/{shares}"
        print(
            f"| `{name}` | {profile} | {of} | {ran} | {sum(took):.0f} | {whole:.1f} | {then} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
