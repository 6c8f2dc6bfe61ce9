"""Modules and settings drawn from a seed, in groups and one after the other.

A run in groups is the sequential one but for rounding, or is refused by name and has kept no wrong round; `auto`
finishes whatever sequential finishes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_fed import Classifier, FederatedTrainer
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedProx, Scaffold
from tests.engine.vectorized.test_executor import Sized
from tests.engine.vectorized.test_probe import Beyond, Skewed
from tests.support import fit, rows, weights

SEED, MANY, SOME = 20261127, 200, 8
CHOICES: dict[str, tuple[Any, ...]] = {
    "loss": ("mean", "mean", "sum", "weighted", "ignored", "smoothed", "focal", "normalised"),
    "change": (None, None, None, ("round", 1), ("round", 3), ("step", 8)),  # of a mean to a sum
    "clock": (None, None, None, "batch_idx", "num_training_batches", "estimated_stepping_batches", "global_step"),
    "draws": (None, None, None, ("random", 0), ("random", 9), ("numpy", 7), ("own", 9), ("test", 1)),
    "seen": (None, "plain", "sized", "metric", "weighed"),
    "optimizer": ("sgd", "sgd", "momentum", "adam", "beyond"),
    "schedule": (None, None, "epoch", "step"),
    "network": ("linear", "mlp", "dropout", "norm", "embedding"),
    "sizes": ((3, 30, 5, 20, 12, 68), (1, 2, 3, 4, 5, 60), (8, 16, 24, 8, 32), (9, 9, 9, 9, 9), (2, 3, 70)),
    "skewed": (True, False),
    "work": ({"local_epochs": 1}, {"local_epochs": 2}, {"local_epochs": 0.5}, {"local_epochs": None, "local_steps": 5}),
    "settings": ({}, {}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"schedule_steps": "run"}),
    "method": (FedAvg, FedAvg, FedProx, Scaffold),
    "skips": (False, False, False, False, True),
}


def drawn(count: int) -> list[dict[str, Any]]:
    """Choices of modules and settings."""
    found = random.Random(SEED)
    return [{key: found.choice(choices) for key, choices in CHOICES.items()} for _ in range(count)]


class Words(nn.Module):
    """Embeds the signs of values, one of which is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.words((x.flatten(1) > 0).long()).mean(1))
        return found


def network(name: str) -> nn.Module:
    flat, first, last = nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 2)
    return {
        "linear": nn.Sequential(flat, nn.Linear(64, 2)),
        "mlp": nn.Sequential(flat, first, nn.Tanh(), last),
        "dropout": nn.Sequential(flat, first, nn.Dropout(0.3), nn.Tanh(), last),
        "norm": nn.Sequential(flat, first, nn.LayerNorm(8), nn.Tanh(), last),
        "embedding": Words(),
    }[name]


class Made(Classifier):
    """A module by its choices."""

    def __init__(self, choices: dict[str, Any]) -> None:
        super().__init__(network=network(choices["network"]), num_classes=2)
        self.choices, self.seen, self.own = choices, MeanMetric(), np.random.default_rng(0)

    def objective_of(self, x: Tensor, y: Tensor) -> Tensor:
        logits, kind = self(x), self.choices["loss"]
        change = self.choices["change"]
        if change is not None and (self.current_epoch if change[0] == "round" else self.global_step) >= change[1]:
            kind = "sum"
        if kind == "weighted":
            return F.cross_entropy(logits, y, weight=torch.tensor([1.0, 5.0]))
        if kind == "ignored":
            y = torch.where(x.flatten(1)[:, 0] > 0.5, -100, y)
            return F.cross_entropy(logits, y, reduction="sum") / (y >= 0).sum().clamp_min(1)
        if kind == "smoothed":
            return F.cross_entropy(logits, y, label_smoothing=0.1)
        each = F.cross_entropy(logits, y, reduction="none")
        if kind == "focal":
            return ((1 - (-each).exp()) ** 2 * each).mean()
        if kind == "normalised":
            return (each * each.detach()).sum() / each.detach().sum()
        return each.sum() / 4 if kind == "sum" else each.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.objective_of(*batch)
        if self.choices["skips"] and len(batch[0]) == 1:
            return None
        if clock := self.choices["clock"]:
            number = batch_idx if clock == "batch_idx" else getattr(self.trainer, clock)
            loss = loss / (1 + number)
        draws = self.choices["draws"]
        if draws is not None and draws[0] != "test" and self.global_step == draws[1]:
            loss = loss * self.draw(draws[0])
        match self.choices["seen"]:
            case "plain":
                self.log("seen", loss)
            case "sized":
                self.log("seen", loss, batch_size=len(batch[0]))
            case "metric":
                self.seen.update(loss.detach())
                self.log("seen", self.seen)
            case "weighed":
                self.seen.update(loss.detach(), len(batch[0]))
                self.log("seen", self.seen)
        return loss

    def draw(self, kind: str) -> float:
        makers = {"random": random.random, "numpy": np.random.random, "own": self.own.random}
        return 0.5 + float(makers[kind]())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        draws, loss = self.choices["draws"], F.cross_entropy(self(batch[0]), batch[1])
        if draws is not None and draws[0] == "test" and batch_idx == draws[1]:
            loss = loss + random.random()
        self.log("test/loss", loss)

    def configure_optimizers(self) -> Any:
        found: torch.optim.Optimizer
        match self.choices["optimizer"]:
            case "momentum":
                found = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
            case "adam":
                found = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-2)
            case "beyond":
                found = Beyond(self.parameters(), lr=0.05)
            case _:
                found = torch.optim.SGD(self.parameters(), lr=0.05)
        if (interval := self.choices["schedule"]) is None:
            return found
        schedule = torch.optim.lr_scheduler.ExponentialLR(found, 0.9)
        return {"optimizer": found, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


def run(folder: Path, how: str, choices: dict[str, Any]) -> FederatedTrainer:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # a user's own code draws from it
    data = (Skewed if choices["skewed"] else Sized)(*choices["sizes"])
    method = FedProx(mu=0.1) if choices["method"] is FedProx else choices["method"]()
    settings = choices["work"] | choices["settings"]
    return fit(folder / how, Made(choices), data, method, executor=how, max_rounds=5, **settings)


def table(folder: Path) -> list[dict[str, float]]:
    """Every kept round's metrics without times."""
    found = [row for path in folder.rglob("metrics.csv") for row in rows(path)]
    return [{key: float(row[key] or "nan") for key in row if not key.startswith("time/")} for row in found]


def check(folder: Path, choices: dict[str, Any]) -> None:
    """Compare the three executors."""
    alone = run(folder, "sequential", choices)
    expected = table(folder / "sequential")
    try:
        runs = [run(folder, "vectorized", choices)]
    except ConfigError as error:
        if not str(error).startswith("trainer.executor=vectorized cannot train these clients: "):
            raise
        runs = []
    runs.append(run(folder, "auto", choices))
    for how in ("vectorized", "auto"):
        kept = table(folder / how)
        for row, same in zip(kept, expected, strict=False):
            assert row == pytest.approx(same, rel=1e-3, abs=1e-4, nan_ok=True), how
    assert len(table(folder / "auto")) == len(expected)
    for name, tensor in weights(alone).items():
        for made in runs:
            torch.testing.assert_close(weights(made)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("idx", range(SOME))
def test_some_modules_are_right_in_groups_or_refused(tmp_path: Path, idx: int) -> None:
    check(tmp_path, drawn(SOME)[idx])


@pytest.mark.long
@pytest.mark.parametrize("idx", range(SOME, MANY))
def test_every_module_is_right_in_groups_or_refused(tmp_path: Path, idx: int) -> None:
    check(tmp_path, drawn(MANY)[idx])
