"""A federation on this machine, end to end: a server and three nodes, whose weights must be the simulation's.

Every end is a process of its own, as it would be on a machine of its own; messages cross by
gRPC over loopback.
Prints a table of hashes and exits with 1 where they differ, where a command fails, or where a process is left behind::

    python benchmarks/federation.py            # plain
    python benchmarks/federation.py --tls      # with TLS, and nodes known by their keys
    python benchmarks/federation.py --every    # also in two processes, in groups, and over nodes in memory
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine  # beside this file
import torch

ROOT = Path(__file__).parents[1]
HOMES: tuple[str, ...] = ("[0,1,2,3,4,5,6]", "[7,8,9,10,11,12,13]", "[14,15,16,17,18,19]")


def main() -> int:
    """Simulate, federate, compare; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--config", nargs="*", default=[str(ROOT / "configs" / "quickstart.yaml")])
    parser.add_argument("--tls", action="store_true", help="with TLS and keys")
    parser.add_argument("--every", action="store_true", help="also in the other ways in which a cohort is trained")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lit_fed_federation_") as name:
        folder = Path(name)
        run = [word for file in options.config for word in ("-c", file)] + ["--trainer.max_rounds", str(options.rounds)]
        started = time.monotonic()
        hashes = {"simulated": simulate(run, folder, options.limit)}
        simulated = time.monotonic()
        if options.every:
            two = simulate(run, folder, options.limit, "two processes", "--trainer.devices", "2")
            hashes |= {"two processes": two, "in memory": in_memory(run, folder)}
            simulate(run, folder, options.limit, "vectorized", "--trainer.executor", "vectorized")
            apart = farthest(folder / "simulated", folder / "vectorized")
            print(f"vectorized: weights within {apart:.1e} of the simulation's")
        begun, worked = time.monotonic(), cpu_seconds()
        hashes["federated"] = federate(run, folder, options.limit, options.tls)
        federated, working = time.monotonic(), cpu_seconds() - worked
        left = processes_of(folder)
    for name, found in hashes.items():
        print(f"{name:15}{found}")
    seconds = f"federation {federated - begun:.0f} s from nothing running, {working:.0f} s of CPU"
    print(f"simulation {simulated - started:.0f} s, {seconds}; {machine.line()}")
    for process in left:
        print(f"left behind: {process}")
    return int(len(set(hashes.values())) > 1 or bool(left))


def simulate(run: Sequence[str], folder: Path, limit: float, name: str = "simulated", *more: str) -> str:
    """The hash of the simulation's weights."""
    call("fit", *run, *more, "--trainer.default_root_dir", str(folder / name), limit=limit)
    return weights_sha256(folder / name)


def in_memory(run: Sequence[str], folder: Path) -> str:
    """The hash of a federation's weights whose nodes are in this process; every message crosses as bytes."""
    from contextlib import ExitStack

    from lit_fed.command.command import Call
    from lit_fed.command.reading.parts import ReadParts
    from lit_fed.command.reading.words import CommandLine
    from lit_fed.command.roots import import_named
    from lit_fed.federation.commands import node
    from lit_fed.federation.commands.deployed import make
    from lit_fed.federation.node.node import Node
    from lit_fed.federation.server.federate import federate as federate_over
    from lit_fed.federation.transport.grid import MemoryGrid
    from lit_fed.parsing import Parser

    import_named()

    def made(name: str) -> tuple[Any, ReadParts]:
        parser = Parser(exit_on_error=False)
        node.add_arguments(parser)
        line = CommandLine(
            ["node", *run, "--client", "0", "--trainer.default_root_dir", str(folder / "in memory" / name)]
        )
        return make(Call(line.parse(parser), parser, line.words))

    with ExitStack() as stack:
        handlers = {}
        for place, clients in enumerate(HOMES):
            trainer, parts = made(f"node_{place}")
            home = Node(trainer, *parts, json.loads(clients), folder / "in memory" / f"states_{place}")
            handlers[place] = stack.enter_context(home.at_work()).handle
        trainer, parts = made("server")
        federate_over(MemoryGrid(handlers), trainer, *parts)
    return weights_sha256(folder / "in memory" / "server")


def farthest(one: Path, other: Path) -> float:
    """The largest difference between two runs' weights."""
    first, second = (torch.load(_last(folder), weights_only=True)["state_dict"] for folder in (one, other))
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def federate(run: Sequence[str], folder: Path, limit: float, tls: bool) -> str:
    """The hash of the federation's weights."""
    address = f"127.0.0.1:{free_port()}"
    own, of_node = list[str](), [list[str]() for _ in HOMES]
    if tls:
        from certificates import make_keys  # beside this file

        own, of_node = make_keys(folder, HOMES, any(Path(word).stem.startswith("secure_sum") for word in run))
    to = ["--server", address]
    with nodes(run, folder, to, of_node):
        call("federate", *run, *to, *own, "--trainer.default_root_dir", str(folder / "federated"), limit=limit)
    return weights_sha256(folder / "federated")


@contextmanager
def nodes(run: Sequence[str], folder: Path, to: Sequence[str], own: Sequence[Sequence[str]]) -> Iterator[None]:
    """Three nodes at work, which are told to end as a service manager would tell them."""
    started = []
    for place, clients in enumerate(HOMES):
        state = folder / f"node_{place}"
        with open(folder / f"node_{place}.log", "wb") as log:
            words = ["node", *run, *to, *own[place], "--client", clients, "--state_dir", str(state)]
            started.append(subprocess.Popen(command(*words), stdout=log, stderr=log, env=environment()))
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for place, process in enumerate(started):
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                print((folder / f"node_{place}.log").read_text()[-2000:], file=sys.stderr)
                print(f"node {place} ended with status {status}", file=sys.stderr)


def call(*words: str, limit: float) -> None:
    """Run a command of ours to its end."""
    subprocess.run(command(*words), check=True, timeout=limit, env=environment())


def command(*words: str) -> list[str]:
    """The command line in this interpreter."""
    return [sys.executable, str(ROOT / "cli.py"), *words]


def environment() -> dict[str, str]:
    """One thread each: all ends share this machine."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def weights_sha256(folder: Path) -> str:
    """Of the global model in the newest run's last checkpoint."""
    digest = hashlib.sha256()
    for name, tensor in sorted(torch.load(_last(folder), weights_only=True)["state_dict"].items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _last(folder: Path) -> Path:
    return folder / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"


def processes_of(folder: Path, patience_s: float = 20) -> list[str]:
    """The processes that were started for a folder and still run, after a while in which they may end."""
    end = time.monotonic() + patience_s
    while (found := list(_running(folder))) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _running(folder: Path) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, inside = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if words and path.name != str(os.getpid()) and str(folder).encode() in words + inside:
            yield f"{path.name} {words.replace(bytes(1), b' ').decode(errors='replace')[:150]}"


def cpu_seconds() -> float:
    """Of all processes that have been started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
