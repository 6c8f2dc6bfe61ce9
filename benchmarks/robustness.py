"""Cost of a robust rule at the end of a round: seconds and memory by cohort, on one and on two processes.

A cohort's updates are drawn, each as one vector, and spread over the processes; the rule combines them as in a run.
Seconds are wall-clock time of the slowest process and its CPU time; memory is the growth of the largest process over
its size before the first update, so that it includes the updates. Every measurement has its own processes.

    python benchmarks/robustness.py [--values 1000000] [--cohorts 10 100 1000] [--processes 1 2] [--rules Median]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import machine  # beside this file
import torch
from lightning import Fabric

from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Flat
from lit_fed.engine.wire.workers import ClientParallelStrategy, Workers, launch, leave_processes
from lit_fed.robust import NNM, Median, MultiKrum, RobustRule
from lit_fed.robust.aggregation import RuleReducer

RULES = ("Median", "MultiKrum", "Median after NNM")
GB = 1e9


def rule_of(name: str, cohort: int) -> RobustRule:
    """A rule against a fifth of the cohort."""
    attackers = cohort // 5
    return {"Median": Median(), "MultiKrum": MultiKrum(attackers), "Median after NNM": Median(NNM(attackers))}[name]


def resident(peak: bool) -> int:
    """Bytes of this process in memory, now or at most so far."""
    word = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(word)[1].split()[0])


def combine(fabric: Fabric, name: str, cohort: int, values: int) -> list[float]:
    """Seconds, CPU seconds and bytes of the largest process."""
    workers, before = Workers(fabric), resident(peak=False)
    origin = {"w": torch.zeros(values // 2, 2), "b": torch.zeros(values % 2)}
    layout = {key: tensor.shape for key, tensor in origin.items()}
    broadcast = Broadcast(0, {"model": origin})
    reducer = RuleReducer(rule_of(name, cohort), broadcast, 0, frozenset(), {})
    for client_id in range(workers.rank, cohort, workers.world_size):
        vector = torch.randn(values, generator=torch.Generator().manual_seed(client_id))
        flat = Flat(layout, vector)
        reducer.add(ClientUpdate(client_id, flat.split(vector), flat=flat))
    fabric.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    reducer.result(workers)
    found = [time.perf_counter() - started, time.process_time() - cpu, float(resident(peak=True) - before)]
    return [max(column) for column in zip(*workers.gather(found), strict=True)]


def measure(name: str, cohort: int, values: int, processes: int) -> None:
    """Print one measurement as JSON: the work of a process of this script's own."""
    torch.set_num_threads(1)
    strategy = ClientParallelStrategy("popen") if processes > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=processes, strategy=strategy)
    found = launch(fabric, lambda: combine(fabric, name, cohort, values))
    if fabric.is_global_zero:
        print(json.dumps(found), flush=True)
    leave_processes()


def main() -> None:
    """All measurements, as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1_000_000, help="of one update")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--one", action="store_true", help="the first of each, in this process")
    args = parser.parse_args()
    if args.one:
        measure(args.rules[0], args.cohorts[0], args.values, args.processes[0])
        return
    print("| rule | cohort | processes | s | CPU s | GB a process |\n|---|---|---|---|---|---|")
    for name in args.rules:
        for cohort in args.cohorts:
            for processes in args.processes:
                command = [sys.executable, __file__, "--one", "--rules", name, "--values", str(args.values)]
                command += ["--cohorts", str(cohort), "--processes", str(processes)]
                told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                wall, cpu, grown = json.loads(told.splitlines()[-1])
                numbers = f"{wall:.1f} | {cpu:.1f} | {grown / GB:.2f}"
                print(f"| `{name}` | {cohort:,} | {processes} | {numbers} |", flush=True)
    print(machine.line())


if __name__ == "__main__":
    main()
