"""Tasks: plain LightningModules, replaceable by any other."""

from lit_fed.tasks.on_network import Classifier, Regressor

__all__ = ["Classifier", "Regressor"]
