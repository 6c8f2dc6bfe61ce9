"""What is learnt: plain LightningModules, of which any other may stand in their place."""

from lit_fed.tasks.classifier import Classifier
from lit_fed.tasks.regressor import Regressor

__all__ = ["Classifier", "Regressor"]
