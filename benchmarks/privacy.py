"""What privacy costs a round: the same federation with and without `ClientLevel`, round by round in one process.

The median over rounds of the ratio of a round's two CPU times is what counts, for a machine's speed drifts. Neither
evaluates nor writes files. Every row has a demand; the exit status is 1 where one is missed.

    python benchmarks/privacy.py [--rounds 20] [--threads 1] [--only WORD]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import machine  # beside this file, as the next two
import torch
from networks import mlp, two_convs
from overhead import LR, Noise, Row
from torch import nn

from lit_fed import Classifier, FederatedTrainer
from lit_fed.engine.loop.rounds import run_round
from lit_fed.engine.loop.run import Run
from lit_fed.methods import FedAvg
from lit_fed.privacy import ClientLevel

ROWS = (
    Row("2-conv CNN, 10 clients × 100 images of 32×32", 1.1, lambda: Noise(10, 100, (3, 32, 32), 50), two_convs),
    Row("MLP, 500 clients × 5 samples, 5 epochs", 1.1, lambda: Noise(500, 5, (60,), 5), mlp, epochs=5),
    Row("MLP in groups, 500 clients × 5 samples", 1.3, lambda: Noise(500, 5, (60,), 5), mlp, "vectorized"),
    Row("MLP in groups, 5 epochs", 1.3, lambda: Noise(500, 5, (60,), 5), mlp, "vectorized", 5),
)


def federation(row: Row, folder: str, private: bool) -> Run:
    """A federation after its first round, without listeners."""
    torch.manual_seed(0)
    network: nn.Module = row.network()
    trainer = FederatedTrainer(
        accelerator="cpu", devices=1, max_rounds=1, local_epochs=row.epochs, executor=row.executor, evaluate_every=0,
        default_root_dir=folder, enable_progress_bar=False, enable_checkpointing=False, logger=False,
        client_store="memory", privacy=ClientLevel(0.5, 1.0) if private else None,
    )  # fmt: skip
    model = Classifier(network=network, optimizer=lambda p: torch.optim.SGD(p, lr=LR))
    trainer.fit(model, row.data(), FedAvg(weighting="uniform"))
    run = trainer.run
    run.callbacks, run._listeners = (), {}
    for wrapper in run.federation.wrappers.stack:
        wrapper._spent = lambda: 0.0  # type: ignore[attr-defined]  # .1 to .3 s a round, whatever the network
    return run


def compare(row: Row, rounds: int) -> dict[str, float]:
    """Median times of a round in seconds, and the median ratio."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        runs = {private: federation(row, folder, private) for private in times}
        for run in runs.values():
            held.enter_context(run.federation.session.at_work())
        for round_idx in range(1, rounds + 2):
            for private in (False, True) if round_idx % 2 else (True, False):
                started = time.process_time()
                run_round(runs[private], round_idx)
                times[private].append(time.process_time() - started)
    columns: dict[bool, Any] = {private: column[1:] for private, column in times.items()}  # the first warms up
    ratios = [private / plain for private, plain in zip(columns[True], columns[False], strict=True)]
    return {
        "plain": statistics.median(columns[False]),
        "private": statistics.median(columns[True]),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """All comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; one gives the steadiest times")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {row: compare(row, args.rounds) for row in ROWS if args.only in row.name}
    print("| | plain, ms a round | private, ms a round | ratio | demand |\n|---|---|---|---|---|")
    for row, times in found.items():
        plain, private = (f"{times[name] * 1e3:.1f}" for name in ("plain", "private"))
        print(f"| {row.name} | {plain} | {private} | {times['ratio']:.3f} | ≤ {row.demand} |")
    print(f"{args.rounds} rounds; {machine.line()}")
    if missed := [row.name for row, times in found.items() if times["ratio"] > row.demand]:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
