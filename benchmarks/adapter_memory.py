"""Peak memory of a client that fine-tunes a language model of 85 million weights: all of it, and with LoRA.

A client trains two steps of AdamW, as the only client of a federation whose server is in the same process, and by hand,
without a server. Each way has processes of its own: one for its resident memory, one that counts torch's allocations;
both above the memory after the imports. Beside them are parameters, gradients and moments as `lit-fed cost` computes
them, and the rest, which is activations (by hand).

    python benchmarks/adapter_memory.py [--depth 12]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the examples lie there, so that what follows cannot stand above

import machine  # noqa: E402  # beside this file
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from examples.language_model.instructions import ANSWER, FIRST  # noqa: E402
from examples.language_model.model import LanguageModel  # noqa: E402
from lit_fed import FederatedTrainer  # noqa: E402
from lit_fed.command.commands.cost import foresee  # noqa: E402
from lit_fed.data import Arrays, Natural, TensorDataModule  # noqa: E402
from lit_fed.methods import FedAvg  # noqa: E402
from lit_fed.networks import Adapter  # noqa: E402

STEPS, BATCH, LENGTH = 2, 4, 128
WAYS = {"full": None, "LoRA, rank 8": Adapter(rank=8, targets=["*_proj"], train=[])}


class Lines(TensorDataModule):
    """One client with random rows of tokens, a quarter of them prompt."""

    num_classes = 1
    input_shape = (LENGTH,)

    def load_arrays(self) -> Arrays:
        """Rows for all steps; the test set is one of them."""
        x = np.random.default_rng(0).integers(FIRST, FIRST + 256, (STEPS * BATCH, LENGTH), dtype=np.int32)
        x[:, LENGTH // 4] = ANSWER
        y, owner = np.zeros(len(x), np.int64), np.zeros(len(x), np.int64)
        return Arrays(x, y, x[:1], y[:1], owner, owner[:1], "noise")


def parts(way: str, depth: int, folder: str) -> tuple[FederatedTrainer, LanguageModel, Lines]:
    """A federation of one client."""
    network = {"dim": 768, "hidden": 2048, "depth": depth, "heads": 12, "kv_heads": 12}
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=1, local_epochs=1, evaluate_every=0, default_root_dir=folder, num_threads=2,
        enable_progress_bar=False, logger=False, callbacks=[], enable_checkpointing=False,
    )  # fmt: skip
    return trainer, LanguageModel(network, WAYS[way]), Lines(num_clients=1, partition=Natural(), batch_size=BATCH)


def federate(way: str, depth: int) -> None:
    """One round."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, task, data = parts(way, depth, folder)
        trainer.fit(task, data, FedAvg())


def by_hand(way: str, depth: int) -> None:
    """The same steps."""
    torch.set_num_threads(2)
    _, task, data = parts(way, depth, ".")
    x, optimizer = torch.from_numpy(data.load_arrays().train.x), task.configure_optimizers()
    for step, rows in enumerate(x.split(BATCH)):
        optimizer.zero_grad()
        task.training_step((rows, rows[:, 0]), step).backward()
        optimizer.step()


def resident(work: Callable[[], None]) -> int:
    """Growth of the peak of resident memory, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def allocated(work: Callable[[], None]) -> int:
    """Peak of torch's allocations, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        work()
    events = [event for event in made.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


WORK, MEASURES = {"federation": federate, "by hand": by_hand}, {"resident": resident, "torch": allocated}


def measured(*words: str) -> int:
    """The bytes that a process of its own measures."""
    finished = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return int(json.loads(finished.stdout.splitlines()[-1]))


def computed(way: str, depth: int) -> int:
    """Bytes of parameters, gradients and AdamW's moments, as `lit-fed cost` prints them."""
    with torch.device("meta"):
        trainer, task, data = parts(way, depth, ".")
        cost = foresee(trainer, task, data, FedAvg())
    whole, trained = cost.memory.get("model", (4 * cost.parameters["model"],) * 2)
    return whole + 3 * trained


def main() -> None:
    """A row for each way, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12, help="blocks of the decoder")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, work, measure = args.child
        print(MEASURES[measure](lambda: WORK[work](way, args.depth)))
        return
    columns = [f"{work}, {measure}" for work in WORK for measure in MEASURES]
    print("| MiB | computed | " + " | ".join(columns) + " |\n|---|" + "---|" * (1 + len(columns)))
    rows = []
    for way in WAYS:
        found = [
            measured("--depth", str(args.depth), "--child", way, work, measure) for work in WORK for measure in MEASURES
        ]
        rows.append([computed(way, args.depth), *found])
        print(f"| {way} | " + " | ".join(f"{number / 2**20:,.0f}" for number in rows[-1]) + " |", flush=True)
    print("| ratio | " + " | ".join(f"{lora / full:.2f}" for full, lora in zip(*rows, strict=True)) + " |")
    print(f"{STEPS} steps of AdamW with {BATCH} rows of {LENGTH} tokens; {machine.line()}")


if __name__ == "__main__":
    main()
