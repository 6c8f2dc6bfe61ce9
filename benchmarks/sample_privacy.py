"""The cost of privacy for every sample beside plain training and beside an Opacus loop, in CPU seconds of one run.

``python benchmarks/sample_privacy.py``: 20 clients of 60 samples in batches of 20 make ten rounds of an epoch each. The
Opacus loop does the same work: Poisson batches, clipping to the same norm, the same noise multiplier, FedAvg. Without
Opacus (``pip install opacus``) its column is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import machine  # beside this file, as `overhead`
import torch
import torch.nn.functional as F
from overhead import Noise
from torch import Tensor, nn

from lit_fed import FederatedTrainer
from lit_fed.engine.loop.rounds import run_round
from lit_fed.methods import FedAvg
from lit_fed.privacy import SampleLevel
from lit_fed.tasks import Classifier

CLIENTS, SAMPLES, BATCH, RATE, CLIP, NOISE = 20, 60, 20, 0.1, 1.0, 1.0
SHAPE = (1, 28, 28)


class Adapted(nn.Module):
    """A transformer block whose frozen projections have adapters of rank 4, after a patch embedding, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(49, 32).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.block = layer.requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (b, 10)."""
        tokens = self.patches(x.reshape(len(x), 16, 49))
        found: Tensor = self.head(self.block(tokens + self.up(self.down(tokens))).mean(1))
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(784, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"MLP": mlp, "small CNN": cnn, "transformer, adapters": Adapted}


def ours(make: Callable[[], nn.Module], rounds: int, executor: Any, privacy: SampleLevel | None) -> float:
    """CPU seconds of some rounds after the first, without evaluation, files and account."""
    task = Classifier(make(), num_classes=10, optimizer=lambda p: torch.optim.SGD(p, RATE))
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = FederatedTrainer(
            accelerator="cpu", devices=1, max_rounds=1, local_epochs=1, executor=executor, privacy=privacy,
            evaluate_every=0, enable_checkpointing=False, enable_progress_bar=False, logger=False,
            client_store="memory", default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(task, Noise(CLIENTS, SAMPLES, SHAPE, BATCH), FedAvg(weighting="uniform"))
        run = trainer.run
        run.callbacks, run._listeners = (), {}
        if privacy is not None:
            privacy.release = lambda aggregate, cohort: (aggregate, cohort, {})  # type: ignore[method-assign]
        with run.federation.session.at_work("fit"):
            started = time.process_time()
            for round_idx in range(1, rounds + 1):
                run_round(run, round_idx)
            return time.process_time() - started


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the lines of a run to itself."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def opacus(make: Callable[[], nn.Module], rounds: int) -> float | None:
    """CPU seconds of the same rounds by Opacus; None where it is not installed."""
    try:
        from opacus import GradSampleModule  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from opacus.optimizers import DPOptimizer  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, *SHAPE, generator=drawn)
    y = torch.randint(10, (CLIENTS * SAMPLES,), generator=drawn)
    with quiet():
        network = GradSampleModule(make())
        generator = torch.Generator().manual_seed(0)
        server = [p.detach().clone() for p in network.parameters()]
        took = 0.0
        for round_idx in range(rounds + 1):
            started = time.process_time()
            total = [torch.zeros_like(p) for p in server]
            for client in range(CLIENTS):
                with torch.no_grad():
                    for p, begun in zip(network.parameters(), server, strict=True):
                        p.copy_(begun)
                trained = [p for p in network.parameters() if p.requires_grad]
                optimizer = DPOptimizer(
                    torch.optim.SGD(trained, RATE), noise_multiplier=NOISE, max_grad_norm=CLIP,
                    expected_batch_size=BATCH, generator=generator,
                )  # fmt: skip
                for _ in range(SAMPLES // BATCH):
                    rows = (torch.rand(SAMPLES, generator=generator) < BATCH / SAMPLES).nonzero().squeeze(1)
                    optimizer.zero_grad()
                    own = client * SAMPLES + rows
                    F.cross_entropy(network(x[own]), y[own]).backward()
                    optimizer.step()
                for part, p in zip(total, network.parameters(), strict=True):
                    part += p.detach()
            server = [part / CLIENTS for part in total]
            took += (time.process_time() - started) * (round_idx > 0)
    return took


def grouped(rows: int, of_group: bool) -> float:
    """CPU milliseconds of the MLP's clipped gradients of one step of 20 clients with 20 samples each.

    Args:
        rows: Samples at a time.
        of_group: Take all clients' together, each with its client's weights, as groups of clients would have to; else
            one client after the other.
    """
    network = mlp()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    whose = torch.arange(CLIENTS).repeat_interleave(BATCH)
    x, y = torch.randn(len(whose), *SHAPE), torch.randint(10, (len(whose),))

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(network, weights, (x[None],)), y[None])

    stacks = {name: p.expand(CLIENTS, *p.shape).clone() for name, p in weights.items()}
    started = time.process_time()
    for _ in range(10):
        for part in torch.arange(len(whose)).split(rows):
            own = stacks if of_group else weights
            each = {n: p[whose[part]] if of_group else p.expand(len(part), *p.shape) for n, p in own.items()}
            leaves = {name: p.detach().requires_grad_() for name, p in each.items()}
            total = torch.vmap(loss)(leaves, x[part], y[part]).sum()
            for gradient in torch.autograd.grad(total, list(leaves.values())):
                scaled = gradient * 2.0**30
                scaled -= scaled.frac()
                if of_group:
                    torch.zeros(CLIENTS, *gradient.shape[1:]).double().index_add_(0, whose[part], scaled.double())
                else:
                    scaled.sum(0, dtype=torch.float64)
    return (time.process_time() - started) * 100


def main() -> None:
    """Print a table of CPU seconds."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=10)
    rounds = asked.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'CPU seconds':24}{'plain':>9}{'groups':>9}{'private':>9}{'Opacus':>9}{'private / Opacus':>18}")
    for name, make in NETWORKS.items():
        plain, groups = (ours(make, rounds, executor, None) for executor in ("sequential", "vectorized"))
        found, peer = ours(make, rounds, "sequential", SampleLevel(CLIP, NOISE, delta=1e-3)), opacus(make, rounds)
        there = f"{peer:9.2f}{found / peer:18.2f}" if peer else "  not installed"
        print(f"{name:24}{plain:9.2f}{groups:9.2f}{found:9.2f}{there}")
    alone, some, many = (grouped(*way) for way in ((BATCH, False), (64, True), (256, True)))
    print(
        f"a step of 20 clients, MLP: {alone:.0f} ms one after the other; as a group {some:.0f} ms with 64 samples "
        f"at a time, {many:.0f} ms with 256"
    )
    print(machine.line())


if __name__ == "__main__":
    main()
