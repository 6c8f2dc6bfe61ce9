"""Methods that correct gradients or measure steps, under five optimizers, on quadratics whose optimum is known.

The table stands in docs/methods.md. Run with ``LIT_FED_WRITE_MATRIX=1`` (on one worker) the tests write it; else they
compare with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop, Rprop

from lit_fed.algorithm import Algorithm, EffectiveSteps
from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedDyn, FedExP, FedNova, FedProx, Scaffold
from lit_fed.methods.fednova import UNEVEN
from tests.support import ROOT, fit, weights
from tests.test_docs import blocks

DOCS = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- optimizers:begin -->\n", "<!-- optimizers:end -->"
WRITE = "LIT_FED_WRITE_MATRIX"

OPTIMA = np.array([[3, 1], [-1, 2], [1, -3]], dtype=np.float32)  # their mean, (1, 0), is the optimum
SIZES = (1, 2, 3)  # samples, and so steps an epoch
ROUNDS, EPOCHS, FARTHEST = 40, 2, 1.5

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, lr=0.1),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.1),
    "RMSprop": lambda parameters: RMSprop(parameters, lr=0.02),
}


def documented(name: str) -> Callable[..., Algorithm[Any]]:
    """A class of the page of one's own method."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs/own_method.md", "python"):
        exec(compile(block, "own_method.md", "exec"), names)
    found: Callable[..., Algorithm[Any]] = names[name]
    return found


METHODS: dict[str, Callable[[], Algorithm[Any]]] = {
    "`FedAvg`": lambda: FedAvg(weighting="uniform"),
    "`FedProx`, μ = 0.1": lambda: FedProx(mu=0.1, weighting="uniform"),
    "`Scaffold`": lambda: Scaffold(),
    "`Scaffold`, option 1": lambda: Scaffold(option=1),
    "`Scaffold`, option 2": lambda: Scaffold(option=2),
    "`FedDyn`, α = 0.1": lambda: FedDyn(alpha=0.1),
    "`FedNova`": lambda: FedNova(weighting="uniform"),
    "`FedExP`, ε = 1": lambda: FedExP(epsilon=1.0, weighting="uniform"),
    "[FedCM](own_method.md#fedcm-from-the-paper-to-a-class), α = 0.5": lambda: documented("FedCM")(
        alpha=0.5, weighting="uniform"
    ),
}


class Wells(TensorDataModule):
    """Three clients; all samples of a client are its optimum."""

    num_classes = 1
    input_shape = (2,)

    def __init__(self) -> None:
        super().__init__(num_clients=3, partition=Natural(), batch_size=1)

    def load_arrays(self) -> Arrays:
        clients = np.repeat(np.arange(3), SIZES)
        x, y = OPTIMA[clients], np.zeros(len(clients), dtype=np.int64)
        return Arrays(x, y, x, y, clients, clients, "wells")


class Quadratic(LightningModule):
    """½ Σ h (w − a)² with h = (1, ¼) for every client, from w = (8, −6)."""

    h: Tensor

    def __init__(self, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([8.0, -6.0]))
        self.register_buffer("h", torch.tensor([1.0, 0.25]), persistent=False)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = 0.5 * (self.h * (self.w - batch[0]).square()).sum(dim=1).mean()
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.training_step(batch, batch_idx))


def cell(folder: Path, method: str, optimizer: str) -> float | None:
    """How far the run ends from the optimum; None where it is refused by the optimizer's name."""
    settings = {"max_rounds": ROUNDS, "local_epochs": EPOCHS, "evaluate_every": ROUNDS, "executor": "sequential"}
    try:
        made = fit(folder, Quadratic(OPTIMIZERS[optimizer]), Wells(), METHODS[method](), **settings)
    except ConfigError as error:
        refused = str(error)
    else:
        return float((weights(made)["w"] - torch.from_numpy(OPTIMA.mean(axis=0))).norm())
    assert optimizer in refused
    return None


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_method_ends_farther_from_the_optimum_than_fedavg_unless_it_is_refused(
    tmp_path: Path, optimizer: str
) -> None:
    column = {method: cell(tmp_path, method, optimizer) for method in METHODS}
    fedavg = column["`FedAvg`"]
    assert fedavg is not None
    too_far = {method: found for method, found in column.items() if found is not None and found > FARTHEST * fedavg}
    assert not too_far
    if os.environ.get(WRITE):
        write(optimizer, column)
    assert table()[optimizer] == {
        method: "refused" if found is None else pytest.approx(found, abs=0.006) for method, found in column.items()
    }


def test_only_steps_in_proportion_to_gradients_are_measured(tmp_path: Path) -> None:
    """Along a gradient twice as large."""
    for name, make in OPTIMIZERS.items():
        moved = []
        for gradient in (1.0, 2.0):
            number = nn.Parameter(torch.zeros(()))
            optimizer = make([number])
            for _ in range(3):
                number.grad = torch.tensor(gradient)
                optimizer.step()
            moved.append(number.item())
        assert EffectiveSteps.measures(type(optimizer)) is (moved[1] == pytest.approx(2 * moved[0])), name


@pytest.mark.parametrize("kind", [Adadelta, Adagrad, Adam, AdamW, RMSprop, Rprop, SGD])
def test_steps_of_even_length_are_counted_and_others_refused(kind: type[Optimizer]) -> None:
    """Along a gradient of 1."""
    number, places = nn.Parameter(torch.zeros((), dtype=torch.float64)), [0.0]
    optimizer = kind([number], lr=0.01)  # type: ignore[call-arg]  # all of these have one
    for _ in range(3):
        number.grad = torch.ones_like(number)
        optimizer.step()
        places.append(number.item())
    first, _, last = np.diff(places)
    assert issubclass(kind, UNEVEN) is (last != pytest.approx(first, rel=1e-3))  # AdamW decays


def test_every_method_that_corrects_or_measures_is_in_the_table() -> None:
    from lit_fed import methods

    classes = [one for one in vars(methods).values() if isinstance(one, type) and issubclass(one, FedAvg)]
    found = {one for one in classes if one.correct is not Algorithm.correct or "one_optimizer" in one.needs}
    # FedSAM and its kin minimise another objective, of perturbed weights: no optimizer leads them to the optimum.
    # q-FedAvg's L is one over the learning rate, whatever the optimizer makes of it, and no measure of steps.
    others = (methods.FedSAM, methods.QFedAvg)
    assert {one for one in found if not issubclass(one, others)} == {FedDyn, FedNova, Scaffold}


def table() -> dict[str, dict[str, Any]]:
    """The table of the docs, by column and row."""
    text = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in text.splitlines() if line.strip()]
    rows = {line[0]: line[1:] for line in lines[2:]}
    return {
        optimizer: {method: one if one == "refused" else float(one) for method, row in rows.items() for one in [row[n]]}
        for n, optimizer in enumerate(OPTIMIZERS)
        if rows
    }


def write(optimizer: str, column: dict[str, float | None]) -> None:
    """Write a column of the table."""
    whole = {name: dict.fromkeys(METHODS, 0.0) for name in OPTIMIZERS} | table()
    whole[optimizer] = {method: "refused" if found is None else found for method, found in column.items()}
    text = DOCS.read_text(encoding="utf-8")
    lines = [f"| method | {' | '.join(OPTIMIZERS)} |", "|---" * (len(OPTIMIZERS) + 1) + "|"]
    for method in METHODS:
        found = [whole[name][method] for name in OPTIMIZERS]
        lines.append(f"| {method} | {' | '.join(f if isinstance(f, str) else f'{f:.2f}' for f in found)} |")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")
