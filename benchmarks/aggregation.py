"""How fast updates are averaged: the bytes a second that `WeightedMean` takes in, against axpy's.

Both read the same vectors of float32 and add them, weighed, to a sum: the server in float64, as it does in a run; axpy
is ``sum.add_(vector, alpha=weight)`` on one sum of the same type and vectors of the same size, and nothing else. They
take turns in one process; the median of the ratios of their CPU times counts.

    python benchmarks/aggregation.py [--values 1000000] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine  # beside this file
import torch
from lightning import Fabric
from torch import Tensor

from lit_fed.engine.method.reducers import WeightedMean
from lit_fed.engine.wire.payload import ClientUpdate, Flat
from lit_fed.engine.wire.workers import Workers

DEMAND = 0.85  # of axpy's bandwidth
COHORTS = (10, 100, 1000)
DISTINCT = 16  # so many different updates, over and over: they do not all fit a cache, and memory stays small


def seconds(work: Callable[[], object]) -> float:
    """CPU time of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(cohort: int, values: int, rounds: int) -> dict[str, Any]:
    """The two bandwidths in GB/s for a cohort of updates of so many values each, and the median of their ratios."""
    workers = Workers(Fabric(accelerator="cpu", devices=1))
    payloads = [{"w": torch.randn(values // 2, 2), "b": torch.randn(values % 2)} for _ in range(min(cohort, DISTINCT))]
    first = Flat.copy_of(payloads[0], {})
    assert first is not None
    flats = [Flat(first.layout, torch.cat([payload["w"].flatten(), payload["b"]])) for payload in payloads]
    updates = [
        ClientUpdate(idx, payloads[idx % DISTINCT], idx + 1, flat=flats[idx % DISTINCT]) for idx in range(cohort)
    ]

    def ours() -> None:
        reducer = WeightedMean()
        for update in updates:
            reducer.add(update)
        reducer.result(workers)

    def axpy() -> Tensor:
        total = torch.zeros(values, dtype=torch.float64)
        for update in updates:
            total.add_(flats[update.client_id % DISTINCT].values, alpha=update.weight)
        return total

    ours()
    axpy()
    pairs = [(seconds(axpy), seconds(ours)) for _ in range(rounds)]
    moved = 4e-9 * cohort * values
    bare, own = (statistics.median(column) for column in zip(*pairs, strict=True))
    share = statistics.median(first / second for first, second in pairs)
    return {"cohort": cohort, "values": values, "axpy_gb_s": moved / bare, "lit_fed_gb_s": moved / own, "share": share}


def main() -> None:
    """All cohorts; exits with status 1 where one is below the demand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1_000_000, help="of one update")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write aggregation.json there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(cohort, args.values, args.rounds) for cohort in COHORTS]
    print("| cohort | axpy, GB/s | lit_fed, GB/s | share | demand |\n|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join(f"{row[key]:.2f}" for key in ("axpy_gb_s", "lit_fed_gb_s", "share"))
        print(f"| {row['cohort']:,} | {numbers} | ≥ {DEMAND} |")
    print(machine.line())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "aggregation.json").write_text(json.dumps(rows, indent=1))
    if any(row["share"] < DEMAND for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
