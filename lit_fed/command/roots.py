"""The classes from which a configuration's parts derive, in one place."""

from __future__ import annotations

import importlib

from lightning import LightningModule
from torch.optim import SGD, Adam

from lit_fed.data import FeatureSkew, FederatedDataModule, Partition
from lit_fed.engine.method.algorithm import Algorithm, Regularizer
from lit_fed.engine.method.wrapper import Privacy
from lit_fed.participation import Participation
from lit_fed.trainer import FederatedTrainer

PARTS: dict[str, type] = {"model": LightningModule, "data": FederatedDataModule, "algorithm": Algorithm}
"""What a run is made of, by key: any class that derives from these."""

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
}
"""Where settings have their home, and of which classes they are."""

_PACKAGES = ("algorithm", "callbacks", "codecs", "data", "methods", "participation", "privacy", "protocols", "tasks")


def import_named() -> None:
    """Import what is called by short names in configurations: they resolve to classes that are there already."""
    for name in _PACKAGES:
        importlib.import_module(f"lit_fed.{name}")
