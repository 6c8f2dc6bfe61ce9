"""Base classes of a configuration's parts, and where each class's settings stand."""

from __future__ import annotations

import importlib

from lightning import LightningModule
from torch.optim import SGD, Adam

from lit_fed.data import FeatureSkew, FederatedDataModule, Partition
from lit_fed.engine.method.algorithm import Algorithm, Regularizer
from lit_fed.engine.method.wrapper import Aggregation, Attack, Privacy
from lit_fed.participation import Participation
from lit_fed.trainer import FederatedTrainer
from lit_fed.wings import WITH_CLASSES

PARTS: dict[str, type] = {"model": LightningModule, "data": FederatedDataModule, "algorithm": Algorithm}
"""Parts of a run by key: any class that derives from these."""

PLACES: dict[str, tuple[type, ...]] = {
    "trainer": (FederatedTrainer,),
    "data.init_args": (FederatedDataModule,),
    "data.init_args.partition.init_args": (Partition,),
    "data.init_args.skew.init_args": (FeatureSkew,),
    "model.init_args": (LightningModule,),
    "model.init_args.optimizer.init_args": (SGD, Adam),
    "algorithm.init_args": (Algorithm,),
    "algorithm.init_args.regularizer.init_args": (Regularizer,),
    "trainer.participation.init_args": (Participation,),
    "trainer.privacy.init_args": (Privacy,),
    "trainer.aggregation.init_args": (Aggregation,),
    "trainer.attack.init_args": (Attack,),
}
"""Classes whose settings stand at a place of the configuration, by place."""

_PACKAGES = (
    "algorithm", "callbacks", "codecs", "data", "methods", "participation", "privacy", "protocols", "robust", "tasks"
)  # fmt: skip


def import_named() -> None:
    """Import classes that configurations call by short names: such a name resolves only to an imported class."""
    for name in (*_PACKAGES, *WITH_CLASSES):
        importlib.import_module(f"lit_fed.{name}")
