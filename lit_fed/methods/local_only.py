"""Every client alone: the baseline that federation has to beat."""

from __future__ import annotations

from typing import Literal

from lit_fed.classifier import Classifier
from lit_fed.client import Split


class LocalOnly(Classifier):
    """A classifier that keeps everything, buffers too, and sends nothing.

    Each client starts from the same initial model. There is no global model; `ClientTest` tests each client's own.
    """

    def split(self, round_idx: int) -> Split:
        """Everything stays."""
        return Split(shared=(), personal=tuple(name for name, _ in self.named_parameters()))

    def shared_names(self, direction: Literal["up", "down"] = "up") -> list[str]:
        """None, whatever ``trainer.buffers`` says."""
        return []

    def personal_names(self) -> list[str]:
        """All of them."""
        return self.state_names()
