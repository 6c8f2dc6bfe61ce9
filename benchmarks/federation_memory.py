"""Peak memory of a server and two nodes with a large model, beside that of a simulation, and the hashes of the weights.

A multilayer perceptron of 197 MB on the digits, two clients, two rounds. Each end is a process of its own; its peak is
the resident memory that the kernel has counted (``ru_maxrss``), libraries included::

    python benchmarks/federation_memory.py
    python benchmarks/federation_memory.py --width 64 --runs 1   # a trial
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import federation  # beside this file, as the next
import machine

HOMES = ("[0]", "[1]")
LAYERS = 5


def run_of(width: int) -> list[str]:
    """Return the options of a run."""
    settings = {
        "model.network": "mlp", "model.network_args.hidden": [width] * LAYERS, "trainer.max_rounds": 2,
        "trainer.local_epochs": 1, "trainer.participation": "FullParticipation", "data.num_clients": len(HOMES),
        "data.max_train_samples": 40, "data.partition": "IID",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["-c", str(federation.ROOT / "configs" / "quickstart.yaml"), *words]


class End:
    """A process with a command of ours.

    Args:
        words: The command.
        log: The file for its output.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        with open(log, "wb") as file:
            command = federation.command(*words)
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=federation.environment())

    def peak(self) -> int:
        """Wait for its end, and return its peak memory, MiB; print the end of its output if it failed."""
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            sys.exit(f"{self.log.read_text(errors='replace')[-2000:]}\n{self.log.stem} ended with status {status}")
        return used.ru_maxrss // 2**10


def measure(run: list[str], folder: Path) -> tuple[dict[str, int], set[str]]:
    """Simulate and federate once; the peaks by end, MiB, and the hashes of both runs' weights."""
    peaks = {"fit": End(["fit", *run, "--trainer.default_root_dir", str(folder / "fit")], folder / "fit.log").peak()}
    to = ["--server", f"127.0.0.1:{federation.free_port()}"]
    nodes = {
        f"node {place}": End(
            ["node", *run, *to, "--client", clients, "--state_dir", str(folder / f"node_{place}")],
            folder / f"node_{place}.log",
        )
        for place, clients in enumerate(HOMES)
    }
    server = ["federate", *run, *to, "--trainer.default_root_dir", str(folder / "federate")]
    try:
        peaks["server"] = End(server, folder / "server.log").peak()
    finally:
        for node in nodes.values():
            node.process.send_signal(signal.SIGTERM)
    peaks |= {name: node.peak() for name, node in nodes.items()}
    return peaks, {federation.weights_sha256(folder / name) for name in ("fit", "federate")}


def main() -> int:
    """Print a row a run; exit with 1 where the weights differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=3500, help="units of each of the five hidden layers")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    differ = False
    for place in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="lit_fed_memory_") as folder:
            peaks, hashes = measure(run_of(options.width), Path(folder))
        differ |= len(hashes) > 1
        told = ", ".join(f"{name} {peak:,} MiB" for name, peak in peaks.items())
        print(f"run {place}: {told}; weights {'differ' if len(hashes) > 1 else 'equal'}", flush=True)
    print(machine.line())
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
