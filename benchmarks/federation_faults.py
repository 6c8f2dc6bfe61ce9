"""Disturb a federation on this machine in every phase of a run, and compare it with a simulation.

The federation has two nodes with two clients each, TLS and keys, and SCAFFOLD, whose clients keep states. At a seeded
moment of a phase, a process is killed (SIGKILL) or told to end (SIGTERM), or the link between a node and the server is
disturbed. The benchmark starts again what has ended, the server with ``--ckpt_path last``. After some kills it also
cuts the end of the killed process's audit log off, as a loss of power may.

After every fault, the weights of every round and all clients' states on the nodes must equal the simulation's, and the
audit logs of all ends must be whole: every torn line is one that the benchmark tore. At the end, ``lit-fed log`` checks
the logs. Processes are forked from one that has imported lit_fed. The folder keeps the results, and a second call
continues::

    python benchmarks/federation_faults.py FOLDER           # 60 kills, 8 stops, 25 faults of a link
    python benchmarks/federation_faults.py FOLDER --kills 2 --stops 0 --links 2
    python benchmarks/federation_faults.py FOLDER --table   # only print the results
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
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import machine  # beside this file, as the next two
from certificates import make_keys
from federation import ROOT, free_port

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.engine.storage.chain import ChainReading
from lit_fed.engine.storage.packs import checksum, clients_of, read_pack
from lit_fed.federation.audit import NAME

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
LINKS_S = {
    "cut of 10 s": 10.0, "cut of 40 s": 40.0, "delay": 5.0, "trickle": 5.0, "reset": 0.0, "half-open": 0.0,
    "duplicate": 0.0, "flipped bit": 0.0, "torn": 0.0,
}  # fmt: skip
"""Faults of a link, and for how long they last; 0 for the next bytes that pass."""
PROCESSES = ("server", "node", "link")
LONGEST_S = {"waiting": 6.0, "training": 0.3, "evaluating": 0.3, "checkpoint": 0.05}
HOMES = ("[0,1]", "[2,3]")
GIVE_UP_S = 240.0


class Phases(Callback):
    """Write down what a run does and, with every round, the hash of its weights and the versions of clients' states.

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
        states = (f"{name}:{at}:{number}" for name, (at, number) in run.federation.store.state_dict().items())
        self._write("checkpoint", record.round_idx, digest.hexdigest(), *states)

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
    """A node's way to the server, which can be disturbed.

    Args:
        address: The server's.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.to = host, int(port)
        self.fault = ""
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def disturb(self, how: str) -> threading.Timer:
        """Begin a fault; what ends with it."""
        self.fault = how
        healing = threading.Timer(LINKS_S[how] or 2.0, self.heal)  # some seconds, if no bytes pass at all
        healing.start()
        return healing

    def heal(self) -> None:
        """End a fault."""
        self.fault = ""

    def _accept(self) -> None:
        while True:
            near, _ = self._door.accept()
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _wait(self) -> None:
        while self.fault.startswith("cut"):
            time.sleep(0.02)

    def _carry(self, near: socket.socket) -> None:
        self._wait()
        far = socket.socket()
        with near, far, suppress(OSError):
            far.connect(self.to)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other = {near: far, far: near}
            while True:
                for one in select.select([near, far], [], [])[0]:
                    self._wait()
                    if not (data := one.recv(2**16)):
                        return
                    self._pass_on(data, near, other[one])

    def _pass_on(self, data: bytes, near: socket.socket, to: socket.socket) -> None:
        """Send bytes on, as the fault leaves them; raise `ConnectionError` where it ends the connection."""
        fault, half = self.fault, len(data) // 2
        if fault and not LINKS_S[fault]:
            self.heal()  # each fault of some bytes happens once
        if fault == "delay":
            time.sleep(0.3)
        if fault == "trickle":
            for at in range(0, len(data), 1000):
                to.sendall(data[at : at + 1000])
                time.sleep(0.02)
            return
        if fault == "reset":
            for one in (near, to):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault == "half-open":  # the node sees the end, and the server keeps a connection without a node
            near.shutdown(socket.SHUT_RDWR)
            threading.Event().wait(60)
        if fault == "torn":
            to.sendall(data[:half])
        if fault in ("reset", "half-open", "torn"):
            raise ConnectionError(fault)
        if fault == "flipped bit":
            data = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        to.sendall(data * 2 if fault == "duplicate" else data)


class Simulated(NamedTuple):
    """The hash of the weights by round, and the checksum of clients' states by client and round."""

    weights: list[str]
    states: dict[tuple[str, int], int]


class Bench:
    """The federation, and what is done to it.

    Args:
        folder: Where all of it lies.
        rounds: The rounds of the run: more than will be run.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.phases, self.kills = folder / "phases.txt", folder / "kills.jsonl"
        self.address = f"127.0.0.1:{free_port()}"
        self.links = [Link(self.address) for _ in HOMES]
        self.own, self.of_node = make_keys(folder, HOMES)
        self.torn, self.compared = dict.fromkeys(self.logs(), 0), 0
        self.server: Started | None = None
        self.nodes: list[Started | None] = [None, None]

    def words(self, name: str, *more: str) -> list[str]:
        """A command on the small federation."""
        small = {
            "trainer.max_rounds": self.rounds, "trainer.local_epochs": 1, "algorithm": "Scaffold",
            "trainer.participation": "FullParticipation", "data.num_clients": 4, "data.max_train_samples": 200,
            "data.partition": "IID",
        }  # fmt: skip
        options = [word for key, value in small.items() for word in (f"--{key}", str(value))]
        return [name, "-c", str(ROOT / "configs" / "quickstart.yaml"), *options, *more]

    def simulated(self) -> Simulated:
        """The simulation's weights and states after every round."""
        path = self.folder / "simulated.txt"
        if not path.is_file():
            self.run(self.words("fit", *self.listening(path)), "simulated").wait()
        lines = [line.split() for line in path.read_text().splitlines() if line.startswith("checkpoint")]
        states = (word.split(":") for line in lines for word in line[3:])
        return Simulated([line[2] for line in lines], {(name, int(at)): int(crc) for name, at, crc in states})

    def logs(self) -> dict[str, Path]:
        """The audit log of each end."""
        nodes = {f"node_{place}": self.folder / f"node_{place}" / "audit" for place in range(len(HOMES))}
        return {"server": self.folder / self.phases.stem / "lightning_logs" / "audit", **nodes}

    def tear(self, end: str, part: float) -> None:
        """Cut off a part of the last line of an end's log."""
        path = self.logs()[end] / NAME
        *before, last = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*before, last[: 1 + int(part * (len(last) - 2))]]))
        self.torn[end] += 1

    def wrong(self, simulated: Simulated) -> list[str]:
        """All that differs from the simulation, and the faults of the logs."""
        rounds = [words for words in self.said() if words[0] == "checkpoint"]
        odd = [f"the weights of round {words[1]}" for words in rounds if words[2] != simulated.weights[int(words[1])]]
        for path in self.folder.glob("node_*/states/*/*.states"):
            at = int(path.stem.rpartition(".r")[2])
            with suppress(FileNotFoundError):  # its node deletes what no checkpoint needs
                for name, state in read_pack(path, clients_of(path)).items():
                    self.compared += 1
                    del state["/version"]
                    if checksum(name, state) != simulated.states[name, at]:
                        odd.append(f"the state of client {name} after round {at}")
        for end, folder in self.logs().items():
            reading = ChainReading(folder / NAME).to_the_end()
            odd += [f"{end}: {fault}" for fault in reading.faults]
            if len(reading.torn) != self.torn[end]:
                odd.append(f"{end}: {len(reading.torn)} torn lines, {self.torn[end]} due")
        return odd

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
                own = ["--server", self.links[place].address, "--client", HOMES[place], *self.of_node[place]]
                own += ["--state_dir", str(self.folder / f"node_{place}")]
                self.nodes[place] = self.run(self.words("node", *own), f"node_{place}")
        if self.server is None or self.server.poll() is not None:
            own = ["--server", self.address, *self.own, "--ckpt_path", "last", *self.listening(self.phases)]
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

    def done(self) -> list[str]:
        """The results so far."""
        return self.kills.read_text().splitlines() if self.kills.is_file() else []

    def pid(self, process: str, place: int) -> int | None:
        """Of one of the processes."""
        owner = self.server if process == "server" else self.nodes[place]
        return None if owner is None or owner.poll() is not None else owner.pid

    def do(self, how: str, process: str, phase: str, delay: float, place: int, part: float) -> dict[str, Any]:
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
            healing = self.links[place].disturb(how)
            found = self.outcome(at, time.monotonic(), process, phase)
            healing.join()
            return {"round": round_idx, **found}
        end = time.monotonic() + 60
        while (pid := self.pid(process, place)) is None and time.monotonic() < end:
            time.sleep(0.1)
        if pid is None:
            return {"outcome": "was not running"}
        os.kill(pid, SIGNALS[how])
        if how == "kill" and part:
            while self.pid(process, place) is not None:
                time.sleep(0.01)
            self.tear("server" if process == "server" else f"node_{place}", part)
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


def plan(kills: int, stops: int, links: int) -> list[tuple[str, str, str, float, int, float]]:
    """How to disturb what, in which phase, how far into it, on which node, and how much of a log's line to keep."""
    draw, phases, ways = random.Random(17), list(LONGEST_S), list(LINKS_S)
    numbered = [("kill", i) for i in range(kills)] + [("stop", i) for i in range(stops)]
    faults = [(how, PROCESSES[i % 2], phases[i // 2 % 4]) for how, i in numbered]
    faults += [(ways[i % len(ways)], "link", phases[(i + i // len(ways)) % 4]) for i in range(links)]
    every = [
        (*fault, round(draw.uniform(0, LONGEST_S[fault[2]]), 3), draw.randrange(2), draw.choice((0.0, draw.random())))
        for fault in faults
    ]
    draw.shuffle(every)
    return every


def table(bench: Bench, simulated: Simulated) -> int:
    """Print what became of the faults; the number of wrong rounds, states and logs."""
    done = [json.loads(line) for line in bench.done()]
    rounds = [words for words in bench.said() if words[0] == "checkpoint"]
    print("| fault | of | phase | round | seconds to notice | what the server says | wrong |")
    print("|---|---|---|---|---|---|---|")
    for one in sorted(done, key=lambda one: (PROCESSES.index(one["process"]), list(LONGEST_S).index(one["phase"]))):
        noticed = "" if one.get("seconds") is None else f"{one['seconds']:.0f}"
        begun = [one["how"], one["process"], one["phase"], str(one.get("round", ""))]
        print("| " + " | ".join([*begun, noticed, one["outcome"], "; ".join(one["wrong"])]) + " |")
    wrong = bench.wrong(simulated)
    counts = Counter("link" if one["process"] == "link" else one["how"] for one in done)
    counted = ", ".join(f"{count} of {how}" for how, count in counts.items())
    compared = f"{len(rounds)} rounds finished, {bench.compared} states of clients compared"
    torn = f"{sum(bench.torn.values())} lines of logs torn and named"
    print(f"\n{counted}; {compared}; {torn}; wrong: {wrong or 'nothing'}")
    print(machine.line())
    return len(wrong) + sum(len(one["wrong"]) for one in done)


def main() -> int:
    """Do what is left to do; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=60, help="processes to kill")
    parser.add_argument("--stops", type=int, default=8, help="processes to stop")
    parser.add_argument("--links", type=int, default=25, help="faults of a link")
    parser.add_argument("--rounds", type=int, default=800, help="rounds to simulate: more than will be run")
    parser.add_argument("--table", action="store_true", help="only print what is done")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, options.rounds)
    simulated, done = bench.simulated(), bench.done()
    for row in map(json.loads, done):
        bench.torn, bench.compared = row["torn"], row["states"]
    try:
        for how, process, phase, delay, place, part in plan(options.kills, options.stops, options.links)[len(done) :]:
            if options.table:
                break
            found = bench.do(how, process, phase, delay, place, part)
            row = {"how": how, "process": process, "phase": phase, "delay": delay, **found}
            with open(bench.kills, "a", encoding="utf-8") as file:
                _write(file, row | {"torn": bench.torn, "wrong": bench.wrong(simulated), "states": bench.compared})
        if not options.table:
            _finish(bench)
    finally:
        bench.stop()
    return int(table(bench, simulated) > 0)


def _write(file: IO[str], row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
    print(row, flush=True)


def _finish(bench: Bench) -> None:
    """Let one more round end after the last fault, and read every log by its command."""
    bench.start()
    before = sum(words[0] == "checkpoint" for words in bench.said())
    end = time.monotonic() + GIVE_UP_S
    while sum(words[0] == "checkpoint" for words in bench.said()) == before and time.monotonic() < end:
        time.sleep(0.5)
    bench.stop()
    for name, folder in bench.logs().items():
        reading = bench.run(["log", str(folder)], f"log_{name}")
        reading.wait()
        print(f"lit-fed log of {name}: exit status {reading.poll()}")


if __name__ == "__main__":
    sys.exit(main())
