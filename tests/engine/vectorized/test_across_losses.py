"""Losses drawn from a seed that are no mean over samples for some batches, in groups and one client after the other."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_fed import Classifier, FederatedTrainer
from lit_fed.data import Arrays
from lit_fed.engine.vectorized.executor import AutoExecutor, VectorizedExecutor
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg
from tests.engine.vectorized.test_executor import Sized
from tests.support import fit, weights

SEED, MANY, SOME = 20261128, 200, 5


class Data(Sized):
    """Clients whose inputs and labels are so that a rare case is in some batches.

    Args:
        ignored: A client's last targets that are 1, where the others are 0; 0 leaves all as they are.
        scale: Of a client's first sample, an outlier.
    """

    def __init__(self, sizes: tuple[int, ...], ignored: int = 0, scale: float = 1) -> None:
        super().__init__(*sizes)
        self.ignored, self.scale = ignored, scale

    @override
    def load_arrays(self) -> Arrays:
        found = super().load_arrays()
        for client in range(len(self.sizes)):
            mine = np.flatnonzero(found.train.clients == client)
            found.train.x[mine[0]] *= self.scale
            if self.ignored:
                found.train.y[mine] = np.arange(len(mine)) >= max(1, len(mine) - self.ignored)
        return found


DATA: list[Callable[[], Data]] = [
    lambda: Data((3, 30, 5, 20, 12, 26, 9, 68)),
    lambda: Data((9, 10, 11, 17, 18, 33), scale=6),
    lambda: Data((3, 30, 5, 20, 12, 26, 9, 41), ignored=2, scale=2),
]


def known(y: Tensor) -> Tensor:
    return (y != 1).float()


def masked(each: Tensor, x: Tensor, y: Tensor, c: float) -> Tensor:
    mask = (x.flatten(1)[:, 3] < 3 * c).float()
    return (each * mask).sum() / mask.sum().clamp_min(1)


def by_class(each: Tensor, x: Tensor, y: Tensor, c: float) -> Tensor:
    means = [(each * (y == label)).sum() / (y == label).sum().clamp_min(1) for label in range(2)]
    return torch.stack(means).max()


def hardest(each: Tensor, x: Tensor, y: Tensor, c: float) -> Tensor:
    return each.topk(min(3, len(each))).values.mean()


def balanced(each: Tensor, x: Tensor, y: Tensor, c: float) -> Tensor:
    share = known(y).mean().clamp_min(0.1)
    return (each * (1 + c * (share < 0.9))).mean()


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "mean": lambda each, x, y, c: each.mean(),
    "known": lambda each, x, y, c: (each * known(y)).sum() / known(y).sum().clamp_min(1),
    "masked": masked,
    "largest": lambda each, x, y, c: each.mean() + F.relu(each.max() - 3 * c),
    "clamped": lambda each, x, y, c: torch.minimum(each, 4 * c * each.mean().detach()).mean(),
    "clamped at a mean": lambda each, x, y, c: torch.minimum(each, 4 * c * each.mean()).mean(),
    "size": lambda each, x, y, c: each.mean() * (1 if each.shape[0] > 8 * c else 0.5),
    "root of the size": lambda each, x, y, c: each.sum() / len(each) ** 0.5,
    "hardest": hardest,
    "by class": by_class,
    "balanced": balanced,
    "trimmed": lambda each, x, y, c: each.sort().values[: max(1, int(0.9 * each.shape[0]))].mean(),
    "spread": lambda each, x, y, c: each.mean() + F.relu((each - each.mean()).square().mean() - c),
    "hinge": lambda each, x, y, c: F.relu(each.mean() - 0.5 * c),
    "root": lambda each, x, y, c: (each.square().mean() + 1e-3).sqrt(),
    "smooth largest": lambda each, x, y, c: c * torch.logsumexp(each / c, 0),
    "without NaN": lambda each, x, y, c: torch.where(x.flatten(1)[:, 3] > 2 + 2 * c, torch.nan, each).nanmean(),
    "own weights": lambda each, x, y, c: (each * each.detach()).sum() / each.detach().sum().clamp_min(c),
    "neighbours": lambda each, x, y, c: each.mean() + c * (each - each.roll(1, 0)).square().mean(),
    "median": lambda each, x, y, c: each.mean() + c * each.median(),
}


def drawn(count: int) -> list[dict[str, Any]]:
    found = random.Random(SEED)
    return [
        {
            "kind": found.choice(list(KINDS)),
            "other": found.choice([None, None, *KINDS]),
            "c": found.choice([0.3, 0.6, 0.9]),
            "ignores": found.choice(["target", "where", "none"]),
            "from": found.choice([None, None, ("round", 1), ("step", 3)]),  # before it, a plain mean
            "logs": found.choice([True, False]),
            "hidden": found.choice([0, 6]),
        }
        for _ in range(count)
    ]


class Made(Classifier):
    """A module by its choices."""

    def __init__(self, choices: dict[str, Any]) -> None:
        hidden = choices["hidden"]
        layers = [nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 2)] if hidden else [nn.Linear(64, 2)]
        super().__init__(network=nn.Sequential(nn.Flatten(), *layers), num_classes=2)
        self.choices = choices

    def loss(self, batch: Any, kind: str) -> Tensor:
        (x, y), choices = batch, self.choices
        if choices["ignores"] == "target":
            each = F.cross_entropy(self(x), y, ignore_index=1, reduction="none")
            if kind == "mean":
                return F.cross_entropy(self(x), y, ignore_index=1)
        elif choices["ignores"] == "where":
            each = F.cross_entropy(self(x), torch.where(x.flatten(1)[:, 5] > 2, -100, y), reduction="none")
        else:
            each = F.cross_entropy(self(x), y, reduction="none")
        return KINDS[kind](each, x, y, choices["c"])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        choices = self.choices
        since = choices["from"]
        now = since is None or (self.current_epoch if since[0] == "round" else self.global_step) >= since[1]
        loss = self.loss(batch, choices["kind"] if now else "mean")
        if now and choices["other"]:
            loss = loss + 0.5 * self.loss(batch, choices["other"])
        if choices["logs"]:
            self.log("seen", loss.detach())
        return loss

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch, self.choices["kind"]))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def run(folder: Path, how: str, choices: dict[str, Any], data: int) -> FederatedTrainer | str:
    """A run, or its error's first words."""
    torch.manual_seed(0)
    try:
        return fit(folder / how, Made(choices), DATA[data](), FedAvg(), executor=how, max_rounds=2, local_epochs=2)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # a client's own, such as a loss that is NaN
        return type(error).__name__


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    with next(folder.rglob(name)).open() as file:
        found = [row for row in csv.DictReader(file) if row.get("metric") != "time_s"]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in found]


def assert_same_numbers(folder: Path, how: str) -> None:
    for name in ("metrics.csv", "clients.csv"):
        found, expected = (table(folder / one, name) for one in (how, "sequential"))
        assert len(found) == len(expected), name
        key = [(row.get("round"), row.get("client_id"), row.get("stage"), row.get("metric")) for row in expected]
        other = {(row.get("round"), row.get("client_id"), row.get("stage"), row.get("metric")): row for row in found}
        for place, row in zip(key, expected, strict=True):
            for column, value in row.items():
                if column not in ("client_id", "stage", "metric"):
                    got, wanted = (float(one or "nan") for one in (other[place][column], value))
                    assert got == pytest.approx(wanted, rel=1e-3, abs=1e-4, nan_ok=True), (name, place, column)


def check(folder: Path, choices: dict[str, Any], data: int) -> str:
    """Compare the executors; say how the clients were trained."""
    alone, auto = (run(folder, how, choices, data) for how in ("sequential", "auto"))
    if isinstance(alone, str) or isinstance(auto, str):
        assert alone == auto
        return "fails"
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(auto)[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    assert_same_numbers(folder, "auto")
    executor = auto.run.federation.executor
    assert isinstance(executor, AutoExecutor)
    return "in groups" if isinstance(executor.chosen, VectorizedExecutor) else "one after the other"


@pytest.mark.parametrize("idx", range(SOME))
def test_some_losses_are_right_in_groups(tmp_path: Path, idx: int) -> None:
    check(tmp_path, drawn(SOME)[idx], idx % len(DATA))


@pytest.mark.long
@pytest.mark.parametrize("idx", range(MANY))
def test_every_loss_is_right_in_groups_or_alone(tmp_path: Path, idx: int) -> None:
    for data in range(len(DATA)):
        check(tmp_path / str(data), drawn(MANY)[idx], data)
