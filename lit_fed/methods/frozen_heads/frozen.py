"""A classifier whose last layer neither trains nor travels."""

from __future__ import annotations

from typing import Any

from lit_fed.classifier import Classifier
from lit_fed.client import Split
from lit_fed.errors import ConfigError
from lit_fed.networks import classifier


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
        self.make_head()
        trains = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        self.frozen = tuple(name for name in self.head_names() if not trains[name])
        if not any(trains.values()):
            raise ConfigError(
                f"network {type(self.network).__name__} has nothing to train below its classifier, which "
                f"{type(self).__name__} freezes; choose a network with hidden layers"
            )

    def make_head(self) -> None:
        """Freeze the classifier, or put a frozen one in its place; by default its first weights are kept."""
        classifier(self.network).requires_grad_(False)

    def split(self, round_idx: int) -> Split:
        """Everything travels but the frozen weights."""
        whole = super().split(round_idx)
        return Split(tuple(name for name in whole.shared if name not in self.frozen), whole.personal, self.frozen)
