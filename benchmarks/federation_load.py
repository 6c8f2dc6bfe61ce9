"""What a federation costs its server: memory and CPU per round, over few rounds or many.

A client a node, a small convolutional network on the digits. Nodes are processes on this machine, or objects in the
server's process, whose CPU time is then told apart; there, memory is that of all ends::

    python benchmarks/federation_load.py --nodes 2 --rounds 300     # memory at round 50 and at the end
    python benchmarks/federation_load.py --nodes 10 --rounds 20
    python benchmarks/federation_load.py --nodes 100 --rounds 20 --memory
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import federation  # beside this file, as the next
import machine

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import RoundRecord, Run

EARLY = 50  # round whose memory is compared with the last one's


class Watch(Callback):
    """Writes down, after every round, the time, the process's CPU time and its resident memory, bytes.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            print(record.round_idx, time.monotonic(), time.process_time(), resident(os.getpid()), file=file)


def resident(process: int) -> int:
    """Return the memory that a process uses, bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_of(num_nodes: int, rounds: int, log: Path) -> list[str]:
    """Return the options of the run."""
    small = {
        "trainer.max_rounds": rounds, "trainer.local_epochs": 1, "trainer.participation": "FullParticipation",
        "data.num_clients": num_nodes, "data.max_train_samples": 10 * num_nodes, "data.partition": "IID",
        "trainer.callbacks+": "federation_load.Watch", "trainer.callbacks.path": log,
    }  # fmt: skip
    words = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    return ["-c", str(federation.ROOT / "configs" / "quickstart.yaml"), *words]


def as_processes(run: list[str], folder: Path, log: Path, rounds: int) -> list[str]:
    """Run all ends as processes; return the nodes' memory, largest first, at round `EARLY` and in the last rounds."""
    to, homes, found = ["--server", f"127.0.0.1:{federation.free_port()}"], federation.HOMES, {}
    before = {path.name for path in Path("/proc").glob("[0-9]*")}
    with federation.nodes(run, folder, to, [()] * len(homes)):
        own = [*to, "--trainer.default_root_dir", str(folder / "federated")]
        server = subprocess.Popen(federation.command("federate", *run, *own), env=environment())
        nodes = children() - {server.pid}
        assert not {str(one) for one in nodes} & before
        while server.poll() is None:
            done = len(log.read_text().splitlines()) if log.is_file() else 0
            if done in (EARLY, EARLY + 1) or done >= rounds - 3:
                found[min(done, EARLY + 2)] = max(map(resident, nodes))
            time.sleep(0.02)
    if server.returncode:
        sys.exit(server.returncode)
    return [f"{size / 2**20:.0f} MiB" for size in found.values()][-2:]


def children() -> set[int]:
    """Return the processes that this one has started."""
    return {int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def environment() -> dict[str, str]:
    """Return the environment in which a run finds `Watch`."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{federation.ROOT}:{federation.ROOT / 'benchmarks'}"}


def in_memory(run: list[str], folder: Path) -> float:
    """Run all ends in this process; return the nodes' CPU time."""
    from lit_fed.federation.node.node import Node

    spent, handle = [0.0], Node.handle

    def timed(node: Node, blob: bytes | bytearray) -> bytearray:
        begun = time.process_time()
        try:
            return handle(node, blob)
        finally:
            spent[0] += time.process_time() - begun

    Node.handle = timed  # type: ignore[method-assign, assignment]
    federation.in_memory(run, folder)
    return spent[0]


def main() -> int:
    """Run a federation and print what it cost; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--memory", action="store_true", help="nodes in the server's process")
    options = parser.parse_args()
    federation.HOMES = tuple(f"[{place}]" for place in range(options.nodes))
    federation.environment = environment
    with tempfile.TemporaryDirectory(prefix="lit_fed_load_") as name:
        folder, log = Path(name), Path(name) / "rounds.txt"
        run = run_of(options.nodes, options.rounds, log)
        if options.memory:
            told = f"nodes {in_memory(run, folder):.1f} s of CPU"
        else:
            told = f"largest node {' and then '.join(as_processes(run, folder, log, options.rounds))}"
        rounds: list[Any] = [[float(word) for word in line.split()] for line in log.read_text().splitlines()]
    first, early, last = rounds[0], rounds[min(EARLY, len(rounds)) - 1], rounds[-1]
    count = last[0] - first[0]
    print(f"{options.nodes} nodes {'in memory' if options.memory else 'as processes'}, {len(rounds)} rounds; {told}")
    print(
        f"server: {(last[1] - first[1]) / count:.3f} s and {(last[2] - first[2]) / count:.3f} s of CPU a round, "
        f"{last[2]:.1f} s of CPU in all; memory after round {early[0] + 1:.0f} {early[3] / 2**20:.0f} MiB, after round "
        f"{last[0] + 1:.0f} {last[3] / 2**20:.0f} MiB"
    )
    print(machine.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
