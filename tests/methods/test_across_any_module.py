"""Methods on a LightningModule that knows nothing of them: it names its own submodules, metrics, and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lit_fed import FederatedTrainer
from lit_fed.data import Digits
from lit_fed.methods import (
    AFL,
    ClientMomentum,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedExP,
    FedLC,
    FedNova,
    FedNTD,
    FedPer,
    FedProx,
    FedRep,
    FedRS,
    FedSAM,
    FedSMOO,
    FedSpeed,
    FedYogi,
    LocalOnly,
    MoFedSAM,
    Moon,
    PerFedAvg,
    QFedAvg,
    Scaffold,
)
from tests.support import assert_same, fit, kept, weights


class Stranger(LightningModule):
    """Batch norm, a metric object in every step, a schedule, and a branch that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.decide = nn.Linear(16, 10)
        self.forgotten = nn.Linear(3, 3)
        self.hits, self.test_hits = MulticlassAccuracy(10), MulticlassAccuracy(10)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        scores = self.decide(self.encoder(batch[0]))
        self.hits(scores, batch[1])
        self.log("train_hits", self.hits)
        return {"loss": F.cross_entropy(scores, batch[1])}

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.test_hits(self.decide(self.encoder(batch[0])), batch[1])
        self.log("test_hits", self.test_hits)


METHODS: dict[str, Any] = {
    "fedavg": FedAvg,
    "fedprox": lambda: FedProx(mu=0.1),
    "scaffold": lambda: Scaffold(freeze_head=True, head="decide"),
    "scaffold_1": lambda: Scaffold(option=1),
    "fedavgm": FedAvgM,
    "client_momentum": ClientMomentum,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fednova": FedNova,
    "fedexp": FedExP,
    "qfedavg": QFedAvg,
    "afl": AFL,
    "feddyn": FedDyn,
    "fedntd": lambda: FedNTD(head="decide"),
    "fedlc": lambda: FedLC(head="decide"),
    "fedrs": lambda: FedRS(head="decide"),
    "fedsam": FedSAM,
    "fedspeed": FedSpeed,
    "fedsmoo": FedSMOO,
    "mofedsam": MoFedSAM,
    "moon": lambda: Moon(head="decide"),
    "fedper": lambda: FedPer(personal=["decide", "encoder.2"]),
    "fedrep": lambda: FedRep(head="decide"),
    "ditto": Ditto,
    "per_fedavg": PerFedAvg,
    "per_fedavg_second_order": lambda: PerFedAvg(first_order=False),
    "local_only": LocalOnly,
}


def run(folder: Path, name: str, rounds: int, **kwargs: Any) -> FederatedTrainer:
    torch.manual_seed(0)
    data = Digits(num_clients=3, max_train_samples=300, batch_size=32)
    return fit(folder, Stranger(), data, METHODS[name](), max_rounds=rounds, **kwargs)


@pytest.mark.parametrize("name", METHODS)
def test_a_strangers_module_learns_and_resumes(name: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", name, 4, evaluate_every=2, local_epochs=2)
    assert whole.metrics["clients/hits_mean"] > 0.25, "guessing gives 0.1"
    assert whole.metrics["train/hits"] > 0.25
    run(tmp_path / "parts", name, 2, evaluate_every=2, local_epochs=2)
    parts = run(tmp_path / "parts", name, 4, evaluate_every=2, local_epochs=2, ckpt_path="last")
    assert_same(weights(parts), weights(whole))
    if whole.run.federation.store.get(0) is not None:
        assert_same(kept(parts, 0), kept(whole, 0))
