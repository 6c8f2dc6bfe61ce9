"""Cost of RAF beside FedAvg in one step of a client: pixels, tensors kept for the backward pass, and CPU seconds.

Clients see drawn figures at 64×48, 48×36 and 32×24 pixels, in batches of 8. RAF shows the network a client's pictures
at the lower resolutions too. "Kept" is the bytes that autograd saves for the backward pass, each storage once, without
parameters. The two methods take steps in turn, and each time is the smallest of several.

    python benchmarks/raf.py [--networks pose_vit_tiny pose_cnn] [--repeats 5] [--steps 10]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import machine  # beside this file
import torch

from lit_fed import objective_of
from lit_fed.methods import FedAvg, FedRAF
from lit_fed.poses import KeypointEstimator, Puppets

METHODS: dict[str, Callable[[], FedAvg]] = {"FedAvg": FedAvg, "RAF": lambda: FedRAF(alpha=0.3)}
LEVELS = {"64×48": [1, 0, 0], "48×36": [0, 1, 0], "32×24": [0, 0, 1]}
MB = 1e6


def pixels(batch: Any, top: bool = False) -> int:
    """Pixels of a picture, at all of the batch's resolutions or the client's own alone."""
    seen = (batch,) if top else (batch, *batch.get("levels", ()))
    return sum(one["image"].shape[-2] * one["image"].shape[-1] for one in seen)


def kept(module: Any, batch: Any) -> int:
    """Bytes saved for the backward pass of a step."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step(batch, 0)
        total = sum(sizes.values())
    del loss
    return total


def model_for(data: Puppets, network: str) -> KeypointEstimator:
    """A task for drawn figures."""
    joints, pairs = data.num_joints, data.flip_pairs
    return KeypointEstimator(network, num_joints=joints, flip_pairs=pairs, input_shape=data.input_shape)


def seconds(module: Any, batch: Any, steps: int) -> float:
    """CPU seconds of a forward and a backward pass, the mean of some."""
    begun = time.process_time()
    for _ in range(steps):
        module.training_step(batch, 0).backward()
    return (time.process_time() - begun) / steps


def main() -> None:
    """A table of the clients of each resolution and network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["pose_vit_tiny", "pose_cnn"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | client | method | pixels | kept, MB | ms a step |\n|---|---|---|---|---|---|")
    for network in args.networks:
        for client, per_level in LEVELS.items():
            data = Puppets(clients_per_level=per_level, samples_per_client=8, test_samples=4)
            data.setup("fit")
            (batch,) = data.train_loader(0, torch.Generator().manual_seed(0))
            modules = {name: objective_of(model_for(data, network), make()) for name, make in METHODS.items()}
            found = {name: kept(module, batch) for name, module in modules.items()}
            took: dict[str, list[float]] = {name: [] for name in METHODS}
            for name in args.repeats * list(METHODS):
                took[name].append(seconds(modules[name], batch, args.steps))
            shown = {"FedAvg": pixels(batch, top=True), "RAF": pixels(batch)}
            for name in METHODS:
                numbers = f"{shown[name]:,} | {found[name] / MB:.1f} | {1000 * min(took[name]):.0f}"
                print(f"| `{network}` | {client} | {name} | {numbers} |", flush=True)
    print(machine.line())


if __name__ == "__main__":
    main()
