"""A federation of ours beside Flower's own FedAvg: seconds, CPU and bytes a round, and the server's memory over rounds.

The same three nodes with the same samples each, the same network, local work and test set, over loopback, one after
the other: ours served by the server itself, Flower's by a SuperLink. Flower's is its PyTorch quickstart: a `ClientApp`
that trains and a `ServerApp` with its `FedAvg`, whose model is tested by the server after every round, as ours is. A
round is what lies between two tests; the first one is left out on both sides, where everything is imported. Bytes are
those that crossed loopback, where Flower's own cross twice, since a SuperLink lies between. Seconds of CPU are those of
all processes that were waited for: ours import PyTorch once each, Flower's once for every message to a node::

    python benchmarks/federation_peer.py                  # ten rounds of each
    python benchmarks/federation_peer.py --rounds 100 --ours
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import flower_programs as programs  # beside this file, as the next three
import machine
from federation import ROOT, call, command, cpu_seconds, environment, free_port
from flower_fedavg.marks import mark

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import RoundRecord, Run

NODES = 3
_SUBREAPER = 36  # of Linux's prctl: children of ended processes become those of this one
APP = Path(__file__).parent / "flower_fedavg"
SAME = (
    *("--trainer.participation", "FullParticipation", "--trainer.protocols", '[{"class_path": "GlobalTest"}]'),
    *("--data.num_clients", str(NODES), "--data.val_fraction", "0"),
)


class Marks(Callback):
    """Marks the end of every round of ours.

    Args:
        path: Where to.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """A round and its test have ended."""
        mark(self.path)


def main() -> None:
    """Run both, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ours", action="store_true", help="without Flower's own")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="lit_fed_peer_") as name:
        folder = Path(name)
        run = ["-c", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.max_rounds", str(options.rounds), *SAME]
        call("split", *run, "--output", str(folder / "parts"), limit=options.limit)
        print("| | s a round | kB over loopback a round | server's memory after round 2, last, MB | s of CPU |")
        print("|---|---|---|---|---|")
        ways = {"lit_fed": ours} | ({} if options.ours else {"Flower's FedAvg": flowers})
        for way, federate in ways.items():
            path = folder / f"{way}.jsonl"
            before = cpu_seconds()
            federate(folder, path, options.rounds, options.limit)
            reap()
            told(way, [json.loads(line) for line in path.read_text().splitlines()], cpu_seconds() - before)
    print(machine.line())


def reap(seconds: float = 30) -> None:
    """Wait for what programs have started and left, so that its CPU counts."""
    end = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)


def told(way: str, marks: Sequence[Sequence[Any]], cpu: float) -> None:
    """Print a line of the table."""
    pairs = list(pairwise(marks[1:]))  # the first round begins with imports
    seconds = [later[0] - earlier[0] for earlier, later in pairs]
    crossed = [(later[1] - earlier[1]) / 1e3 for earlier, later in pairs]
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    memory = f"{marks[1][2] / 1024:.0f}, {marks[-1][2] / 1024:.0f}"
    line = f"{middle:.1f} ({low:.1f} to {high:.1f}) | {statistics.median(crossed):.0f} | {memory} | {cpu:.0f}"
    print(f"| {way} | {line} |", flush=True)


def ours(folder: Path, path: Path, rounds: int, limit: float) -> None:
    """A server and three nodes, each of which has its own client's samples only."""
    address, parts = f"127.0.0.1:{free_port()}", folder / "parts"
    marks = {"class_path": "federation_peer.Marks", "init_args": {"path": str(path)}}
    mine = ["--trainer.callbacks", json.dumps([marks])]
    with ExitStack() as stack:
        for client in range(NODES):
            words = ["node", "-c", f"client_{client}/config.yaml", "--server", address, "--client", str(client)]
            words += ["--state_dir", str(folder / f"node_{client}")]
            process = subprocess.Popen(command(*words), cwd=parts, env=_env(), stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGTERM)
        words = ["federate", "-c", "server/config.yaml", "--server", address, *mine]
        words += ["--trainer.default_root_dir", str(folder / "ours")]
        subprocess.run(command(*words), cwd=parts, env=_env(), check=True, timeout=limit, stdout=subprocess.DEVNULL)


def flowers(folder: Path, path: Path, rounds: int, limit: float) -> None:
    """Flower's programs alone, with its quickstart's app."""
    address, home, parts = f"127.0.0.1:{free_port()}", folder / "flowers", folder / "parts"
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    app = folder / "app"
    shutil.copytree(APP, app / "flower_fedavg", ignore=shutil.ignore_patterns("*.toml", "__pycache__"))
    shutil.copy(APP / "pyproject.toml", app)
    with ExitStack() as stack:
        host, _, port = address.rpartition(":")
        words = ["flower-superlink", "--insecure", "--host", host, "--port", port]
        stack.enter_context(programs.running([*words, "--disable-runtime-dependency-installation"], home))
        programs.wait_for(address, 60)
        for client in range(NODES):
            words = ["flower-supernode", "--insecure", "--superlink", address, "--host", "127.0.0.1"]
            words += ["--port", str(free_port()), "--node-config", f'data="{parts / f"client_{client}" / "data.npz"}"']
            stack.enter_context(programs.running(words, folder / f"flowers_{client}"))
        config = f'rounds={rounds} nodes={NODES} marks="{path}" data="{parts / "server" / "data.npz"}"'
        name = programs.connection(address, home)
        words = [programs.program("flwr"), "run", str(app), name, "--run-config", config]
        subprocess.run(words, env=programs.environment(home), check=True, stdout=subprocess.DEVNULL, timeout=120)
        end = time.monotonic() + limit
        while not path.is_file() or len(path.read_text().splitlines()) < rounds + 1:  # it is also tested before any
            if time.monotonic() > end:
                sys.exit(f"Flower's run did not end within {limit:g} s; see {home}")
            time.sleep(0.5)


def _env() -> dict[str, str]:
    return environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}


if __name__ == "__main__":
    main()
