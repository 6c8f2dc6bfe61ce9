"""What a GPU makes of a round: by precision, layout, compiled, in groups of clients, and beside one thread of the CPU.

Federations of `round_times.py`: 100 clients with 100 images of 32×32, ten of which take part for three epochs of
batches of 50, so 60 steps a round. Medians over the rounds but the first, which starts kernels and compiles. Of every
network the ratio is to the first row of FedDr+.

    python benchmarks/gpu.py [--rounds 6] [--only WORD …] [--dry]

``--dry`` tries the script where there is no GPU: the processor in its place, two rounds of the MLP.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import machine  # beside this file, as the next
import torch
from round_times import METHODS, SIZES, AtOnce, seconds


@dataclass(frozen=True)
class Way:
    """What is timed: a network of `round_times.SIZES`, a method, and settings of the trainer."""

    network: str
    method: str = "FedDr+"
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{key}={value}" for key, value in self.settings.items()]
        return ", ".join([self.network, self.method, *said])


BF16, GROUPS, LAST = {"precision": "bf16-mixed"}, {"executor": "vectorized"}, {"channels_last": True}
GRAPH = {"compile": "graph"}
CPU = {"accelerator": "cpu", "num_threads": 1}
WAYS = [
    Way("mobilenet"),
    Way("mobilenet", "FedAvg"),
    *(Way("mobilenet", settings=s) for s in (LAST, BF16, BF16 | LAST, {"precision": "16-mixed"})),
    *(Way("mobilenet", settings=s) for s in (GRAPH, GRAPH | LAST, GRAPH | BF16, GRAPH | BF16 | LAST)),
    *(Way("small_cnn", settings=s) for s in ({}, GRAPH, GROUPS, GROUPS | {"precision": "bf16-true"})),
    *(Way("mlp", settings=s) for s in ({}, GROUPS)),
    Way("mobilenet", settings={"compile": True}),
    *(Way(network, settings=CPU) for network in ("mlp", "small_cnn", "mobilenet")),
]


def main(argv: Sequence[str] | None = None) -> None:
    """A row a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", default=[""], help="words of which a row must have one")
    parser.add_argument("--dry", action="store_true", help="two rounds of the MLP on the processor")
    args = parser.parse_args(argv)
    if not (args.dry or torch.cuda.is_available()):
        parser.error("there is no GPU here")
    rounds, only, card = (2, ["mlp"], "cpu") if args.dry else (args.rounds, args.only, "gpu")
    print(f"{'dry' if args.dry else torch.cuda.get_device_name()}, {machine.line()}")
    print("| | a round, ms | a step, ms | of FedDr+'s round | MiB at most |\n|---|---|---|---|---|")
    base: dict[str, float] = {}
    for way in (way for way in WAYS if any(word in str(way) for word in only)):
        size = SIZES[way.network]
        if card == "gpu":
            torch.cuda.reset_peak_memory_stats()
        settings = {"accelerator": card} | way.settings
        found = statistics.median(seconds(size, AtOnce, METHODS[way.method], rounds, **settings))
        if way.method == "FedDr+":
            base.setdefault(way.network, found)
        part = f"{found / base[way.network]:.2f}" if way.network in base else ""
        peak = torch.cuda.max_memory_allocated() / 2**20 if card == "gpu" else 0
        print(f"| {way} | {found * 1e3:.0f} | {found * 1e3 / size.steps:.2f} | {part} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
