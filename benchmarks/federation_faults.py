"""Kills, stops and cuts off the processes of a federation on this machine in every phase of a run.

One federation of two nodes with two clients each. A process is killed (SIGKILL) or told to end (SIGTERM), or the link
between a node and the server carries nothing for a while, at a seeded moment of a phase; what has ended is started
again, the server with ``--ckpt_path last``; every round's weights are compared with the simulation's. Processes are
forked from one that has imported lit_fed. What is done is kept in the folder, and a second call goes on::

    python benchmarks/federation_faults.py FOLDER               # 48 faults
    python benchmarks/federation_faults.py FOLDER --share 0 3   # every third of them, for three calls at a time
    python benchmarks/federation_faults.py FOLDER --table       # only print what is done
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import machine  # beside this file, as the next
from federation import ROOT, free_port

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import RoundRecord, Run

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
CUTS_S = {"cut of 10 s": 10.0, "cut of 40 s": 40.0}
FAULTS = {"server": tuple(SIGNALS), "node": tuple(SIGNALS), "link": tuple(CUTS_S)}
LONGEST_S = {"waiting": 15.0, "training": 0.3, "evaluating": 0.3, "checkpoint": 0.05}
HOMES = ("[0,1]", "[2,3]")
GIVE_UP_S = 240.0


class Phases(Callback):
    """Writes down what a run does and, with every round, the hash of its weights.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_fit_start(self, run: Run) -> None:
        """All nodes are there."""
        self._write("begun", run.start_round)

    def on_round_start(self, run: Run, round_idx: int, plan: Any) -> None:
        """Clients train from here."""
        self._write("training", round_idx)

    def on_evaluation_start(self, run: Run, round_idx: int) -> None:
        """Clients are tested from here."""
        self._write("evaluating", round_idx)

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Files are written from here, the checkpoint last."""
        digest = hashlib.sha256()
        for name, tensor in sorted(run.federation.global_model(record.round_idx).items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        self._write("checkpoint", record.round_idx, digest.hexdigest())

    def _write(self, *words: object) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(" ".join(map(str, words)) + "\n")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "lit_fed.command.cli",
        "lit_fed.federation.commands.federate",
        "lit_fed.federation.commands.node",
        "lit_fed.methods",
        "lit_fed.federation.server.federate",
        "lit_fed.federation.transport.serving",
        "lit_fed.federation.transport.calling",
        "federation_faults",
    ]
)


def _work(words: list[str], log: str) -> None:
    """Run a command of ours, whose output goes to a file."""
    from lit_fed.command.cli import main

    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["lit-fed", *words]
    main(words)


class Started:
    """A process with a command of ours.

    Args:
        words: The command.
        log: The file for its output.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        log.write_bytes(b"")
        self._process = FORKS.Process(target=_work, args=(words, str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end; kill it if it takes longer."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            sys.exit(f"process {self.pid} did not end within {seconds} s")


class Link:
    """A node's way to the server; while it is cut, connections stay open and nothing comes through.

    Args:
        address: The server's.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.to = host, int(port)
        self._open = threading.Event()
        self._open.set()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> threading.Timer:
        """Carry nothing for a while; what ends with it."""
        self._open.clear()
        healing = threading.Timer(seconds, self._open.set)
        healing.start()
        return healing

    def _accept(self) -> None:
        while True:
            near, _ = self._door.accept()
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        self._open.wait()
        with near, suppress(OSError), socket.create_connection(self.to) as far:
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other = {near: far, far: near}
            while True:
                for one in select.select([near, far], [], [])[0]:
                    self._open.wait()
                    if not (data := one.recv(2**16)):
                        return
                    other[one].sendall(data)


class Bench:
    """The federation, and what is done to it.

    Args:
        folder: Where all of it lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phases = folder / "phases.txt"
        self.address = f"127.0.0.1:{free_port()}"
        self.links = [Link(self.address) for _ in HOMES]
        self.server: Started | None = None
        self.nodes: list[Started | None] = [None, None]

    def words(self, name: str, *more: str, max_rounds: int = 500) -> list[str]:
        """A command on the small federation."""
        small = {
            "trainer.max_rounds": max_rounds, "trainer.local_epochs": 1, "trainer.participation": "FullParticipation",
            "data.num_clients": 4, "data.max_train_samples": 200, "data.partition": "IID",
        }  # fmt: skip
        options = [word for key, value in small.items() for word in (f"--{key}", str(value))]
        return [name, "-c", str(ROOT / "configs" / "quickstart.yaml"), *options, *more]

    def simulated(self, rounds: int) -> list[str]:
        """The hash of the weights after every round of the simulation."""
        path = self.folder / "simulated.txt"
        if not path.is_file():
            self.run(self.words("fit", *self.listening(path), max_rounds=rounds), "simulated").wait()
        return [line.split()[2] for line in path.read_text().splitlines() if line.startswith("checkpoint")]

    def listening(self, path: Path) -> list[str]:
        """The options of a run that writes down its phases."""
        own = ["--trainer.callbacks+=federation_faults.Phases", f"--trainer.callbacks.path={path}"]
        return [*own, "--trainer.default_root_dir", str(self.folder / path.stem)]

    def run(self, words: list[str], name: str) -> Started:
        """Start a process whose output goes to a file."""
        return Started(words, self.folder / f"{name}.log")

    def start(self) -> None:
        """Start what is not running."""
        for place, node in enumerate(self.nodes):
            if node is None or node.poll() is not None:
                own = ["--server", self.links[place].address, "--client", HOMES[place]]
                own += ["--state_dir", str(self.folder / f"node_{place}")]
                self.nodes[place] = self.run(self.words("node", *own), f"node_{place}")
        if self.server is None or self.server.poll() is not None:
            own = ["--server", self.address, "--ckpt_path", "last", *self.listening(self.phases)]
            self.server = self.run(self.words("federate", *own), "server")

    def stop(self) -> None:
        """End everything, as a service manager would."""
        for process in (self.server, *self.nodes):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)

    def said(self) -> list[list[str]]:
        """What the run has written down so far."""
        return [line.split() for line in self.phases.read_text().splitlines()] if self.phases.is_file() else []

    def pid(self, process: str, place: int) -> int | None:
        """Of one of the processes."""
        owner = self.server if process == "server" else self.nodes[place]
        return None if owner is None or owner.poll() is not None else owner.pid

    def do(self, how: str, process: str, phase: str, delay: float, place: int) -> dict[str, Any]:
        """Kill or stop a process, or cut a link, in a phase; what became of it."""
        if phase == "waiting" and self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)
        self.start()
        before, end = len(self.said()), time.monotonic() + GIVE_UP_S
        while phase != "waiting" and not any(words[0] == phase for words in self.said()[before:]):
            if time.monotonic() > end:
                sys.exit(f"no phase {phase!r} within {GIVE_UP_S:g} s; see {self.folder / 'server.log'}")
            self.start()  # what an earlier fault ends only now
            time.sleep(0.01)
        time.sleep(delay)
        at = len(self.said())
        round_idx = int(self.said()[-1][1]) if at else 0
        if process == "link":
            healing = self.links[place].cut(CUTS_S[how])
            found = self.outcome(at, time.monotonic(), process, phase)
            healing.join()
            return {"round": round_idx, **found}
        end = time.monotonic() + 60
        while (pid := self.pid(process, place)) is None and time.monotonic() < end:
            time.sleep(0.1)
        if pid is None:
            return {"outcome": "was not running"}
        os.kill(pid, SIGNALS[how])
        return {"round": round_idx, **self.outcome(at, time.monotonic(), process, phase)}

    def outcome(self, at: int, begun: float, process: str, phase: str) -> dict[str, Any]:
        """What the server made of it."""
        assert self.server is not None
        while (seconds := time.monotonic() - begun) < GIVE_UP_S:
            if self.server.poll() is not None:
                lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
                told = next((line for line in reversed(lines) if line.startswith("lit-fed: error: ")), "")
                own = process == "server"
                return {
                    "seconds": None if own else seconds,
                    "outcome": "it is the one" if own else told.removeprefix("lit-fed: error: "),
                }
            if phase == "waiting" and seconds > 5:
                self.start()  # a node that has ended is started again, as its service manager would
            if sum(words[0] == "checkpoint" for words in self.said()[at:]) > (phase != "waiting"):
                return {"seconds": None, "outcome": "the run goes on"}
            time.sleep(0.05)
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()
        return {"seconds": None, "outcome": f"nothing within {GIVE_UP_S:g} s"}


def plan(repeats: int) -> list[tuple[str, str, str, float, int]]:
    """How to disturb what, in which phase, how far into it, and on which node: the same for everybody."""
    draw = random.Random(17)
    kills = [
        (how, process, phase, round(draw.uniform(0, LONGEST_S[phase]), 3), draw.randrange(2))
        for process, ways in FAULTS.items() for how in ways for phase in LONGEST_S for _ in range(repeats)
    ]  # fmt: skip
    draw.shuffle(kills)
    return kills


def table(folder: Path, simulated: list[str]) -> int:
    """Print what became of the faults; how many rounds had other weights."""
    done = [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]
    rounds = [line.split() for line in (folder / "phases.txt").read_text().splitlines() if line.startswith("check")]
    odd = [words for words in rounds if words[2] != simulated[int(words[1])]]
    print("| fault | of | phase | round | seconds to notice | what the server says | the next round's weights |")
    print("|---|---|---|---|---|---|---|")
    for one in sorted(done, key=lambda one: (list(FAULTS).index(one["process"]), list(LONGEST_S).index(one["phase"]))):
        later = [words for words in rounds[one.get("rounds_before", 0) :] if int(words[1]) >= one.get("round", 0)]
        equal = "none yet" if not later else "equal" if later[-1][2] == simulated[int(later[-1][1])] else "differ"
        noticed = "" if one.get("seconds") is None else f"{one['seconds']:.0f}"
        begun = [one["how"], one["process"], one["phase"], str(one.get("round", ""))]
        print("| " + " | ".join([*begun, noticed, one["outcome"], equal]) + " |")
    print(f"\n{len(done)} faults, {len(rounds)} rounds finished, {len(odd)} with other weights than the simulation's")
    print(machine.line())
    return len(odd)


def main() -> int:
    """Do what is left to do; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=2, help="faults of a kind and process in a phase")
    parser.add_argument("--rounds", type=int, default=400, help="rounds to simulate: more than will be run")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="place and number of the parts of the plan")
    parser.add_argument("--table", action="store_true", help="only print what is done")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench, kills, done = Bench(folder), folder / "kills.jsonl", 0
    simulated = bench.simulated(options.rounds)
    done = len(kills.read_text().splitlines()) if kills.is_file() else 0
    try:
        for how, process, phase, delay, place in plan(options.repeats)[options.share[0] :: options.share[1]][done:]:
            if options.table:
                break
            before = sum(words[0] == "checkpoint" for words in bench.said())
            found = bench.do(how, process, phase, delay, place)
            row = {"how": how, "process": process, "phase": phase, "delay": delay, "rounds_before": before, **found}
            with open(kills, "a", encoding="utf-8") as file:
                _write(file, row)
        if not options.table:
            _finish(bench)
    finally:
        bench.stop()
    return int(table(folder, simulated) > 0)


def _write(file: IO[str], row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
    print(row, flush=True)


def _finish(bench: Bench) -> None:
    """Let one more round end after the last fault."""
    bench.start()
    before = sum(words[0] == "checkpoint" for words in bench.said())
    end = time.monotonic() + GIVE_UP_S
    while sum(words[0] == "checkpoint" for words in bench.said()) == before and time.monotonic() < end:
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
