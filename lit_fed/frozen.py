"""A classifier whose last layer neither trains nor travels."""

from __future__ import annotations

from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.client import Split
from lit_fed.errors import ConfigError
from lit_fed.networks import classifier, classifier_path


class FrozenClassifier(Classifier):
    """Cross-entropy on a network whose last layer keeps its first weights.

    They are drawn when the module is made, from torch's global generator, and are part of the server's model, so every
    client and process has the same ones. Optimizers never see them: neither momentum nor weight decay moves them.

    Args:
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Raises:
        ConfigError: If the network has no single classifier, or nothing to train below it.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        path = self.make_head()
        head = classifier(self.network).named_parameters(prefix=f"network.{path}")
        self.frozen = tuple(name for name, parameter in head if not parameter.requires_grad)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ConfigError(
                f"network {type(self.network).__name__} has nothing to train below its classifier, which "
                f"{type(self).__name__} freezes; choose a network with hidden layers"
            )

    def make_head(self) -> str:
        """Freeze the classifier, or put a frozen one in its place; returns its name in the network."""
        classifier(self.network).requires_grad_(False)
        return classifier_path(self.network)

    def split(self, round_idx: int) -> Split:
        """Everything travels but the frozen weights."""
        whole = super().split(round_idx)
        return Split(tuple(name for name in whole.shared if name not in self.frozen), whole.personal, self.frozen)
