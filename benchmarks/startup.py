"""What an installation weighs, and what starting costs: importing the library, ``--help``, a run's first round.

Each command is a process of its own, in turn with the others; the figures are CPU seconds (user and system) of the
process and the programs that it starts, and their medians, because a machine's clock also counts its other work. Other
libraries are measured in environments of their own, which are named by their folders:

    python benchmarks/startup.py [--repeats 5] [--output FOLDER] [--peers flwr=ENVIRONMENT nvflare=ENVIRONMENT]
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
DEMAND_S = 0.5  # ``--help``
BASE, HELP = "import torch, lightning", "lit-fed --help"
GROUPS = {  # of packages by the beginnings of their names; a later line has what is left
    "PyTorch: torch, torchvision": ("torch==", "torchvision=="),
    "CUDA for PyTorch: nvidia-*, triton": ("nvidia", "triton", "cuda"),
    "NumPy, SciPy, scikit-learn, Matplotlib, Pillow": ("numpy", "scipy", "scikit", "matplotlib", "pillow"),
    "Lightning, torchmetrics, timm": ("lightning", "pytorch-lightning", "torchmetrics", "timm"),
    "TensorBoard, gRPC, cryptography": ("tensorboard", "grpcio", "protobuf", "cryptography"),
}
SIZES = """
import json, sys
from importlib.metadata import PackageNotFoundError, distribution
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

sizes, seen, todo = {}, set(), [Requirement(sys.argv[1])]
while todo:
    wanted = todo.pop()
    asked = (wanted.name.lower().replace("_", "-"), *sorted(wanted.extras))
    if asked in seen:
        continue
    seen.add(asked)
    try:
        found = distribution(wanted.name)
    except PackageNotFoundError:  # of an extra that is not installed
        continue
    paths = [file.locate() for file in found.files or []]
    sizes[asked[0]] = sum(path.stat().st_size for path in paths if path.is_file())
    for needed in map(Requirement, found.requires or []):
        if needed.marker is None or any(needed.marker.evaluate({"extra": one}) for one in ("", *wanted.extras)):
            todo.append(needed)
print(json.dumps(sizes))
"""
"""Program that prints the bytes of a package's files, and of those of all packages that it needs, by package."""


def commands(folder: str) -> dict[str, list[str]]:
    """What is started, by name: words after the interpreter."""
    first = ["fit", "-c", "quickstart.yaml", "--trainer.max_rounds", "1", "--trainer.default_root_dir", folder]
    return {
        BASE: ["-c", BASE],
        "import lit_fed": ["-c", "import lit_fed"],
        "from lit_fed import FederatedTrainer": ["-c", "from lit_fed import FederatedTrainer"],
        "lit-fed --version": ["-m", "lit_fed", "--version"],
        HELP: ["-m", "lit_fed", "--help"],
        "lit-fed completion bash": ["-m", "lit_fed", "completion", "bash"],
        "lit-fed schema": ["-m", "lit_fed", "schema"],
        "lit-fed fit, to the end of the quickstart's first round": ["-m", "lit_fed", *first],
    }


def cpu_seconds(words: list[str]) -> float:
    """CPU time of a program, from its start to its end.

    Raises:
        SystemExit: If it fails; its last line says why.
    """
    before = os.times()
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {(ended.stderr.splitlines() or ['no word'])[-1]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def megabytes(python: str, package: str) -> dict[str, float]:
    """Size of a package and of all packages that it needs, by group."""
    done = subprocess.run([python, "-c", SIZES, package], capture_output=True, text=True, check=True)
    sizes: dict[str, int] = json.loads(done.stdout)
    if package == "lit-fed":  # installed as a link to this copy
        own = [path for room in ("lit_fed", "configs", "examples") for path in (ROOT / room).rglob("*.*")]
        sizes[package] = sum(path.stat().st_size for path in own if path.is_file() and path.suffix != ".pyc")
    groups = dict.fromkeys([package, *GROUPS, "all others"], 0.0)
    for name, size in sizes.items():
        starts_so = (group for group, starts in GROUPS.items() if f"{name}==".startswith(starts))
        groups[package if name == package else next(starts_so, "all others")] += size / 1e6
    return {
        **{group: size for group, size in groups.items() if size},
        f"all {len(sizes)} packages": sum(groups.values()),
    }


def main() -> None:
    """All commands in turn; exits with status 1 where ``--help`` takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write startup.json there")
    parser.add_argument("--peers", nargs="*", default=[], help="libraries with their environments: flwr=FOLDER")
    args = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peers)
    with tempfile.TemporaryDirectory() as folder:
        started = {name: [sys.executable, *words] for name, words in commands(folder).items()}
        for name, environment in peers.items():
            started[f"import {name}"] = [f"{environment}/bin/python", "-c", f"import {name}"]
            started[f"{name} --help"] = [f"{environment}/bin/{name}", "--help"]
        rounds = [{name: cpu_seconds(words) for name, words in started.items()} for _ in range(args.repeats)]
    cpu = {name: statistics.median(found[name] for found in rounds) for name in started}
    print("| | CPU, s |\n|---|---:|")
    for name in started:
        print(f"| `{name}` | {cpu[name]:.2f} |")
    pythons = {"lit-fed": sys.executable, **{name: f"{folder}/bin/python" for name, folder in peers.items()}}
    weights = {name: megabytes(python, name) for name, python in pythons.items()}
    for name, groups in weights.items():
        print(f"\n| {name} | MB |\n|---|---:|")
        for group, size in groups.items():
            print(f"| {group} | {size:,.0f} |")
    print(machine.line())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "startup.json").write_text(json.dumps({"cpu_s": cpu, "megabytes": weights}, indent=1))
    if cpu[HELP] > DEMAND_S:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
