"""Classification, as a plain LightningModule."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.tasks.on_network import OnNetwork


class Classifier(OnNetwork):
    r"""Cross-entropy on any network: :math:`\ell = \mathrm{CE}(f(x), y)`.

    Nothing in it is federated: it trains under a plain ``lightning.Trainer`` as it does in a federation. Logs
    ``train/loss``, ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc``.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``small_cnn``, or any of timm's), or a module.
        optimizer: Made anew whenever it is asked for: in a federation for every client and round.
        lr_scheduler: Steps once an epoch; in a federation, once a round.
        num_classes: Taken from the data where null.
        in_channels: Taken from the data where null.
        input_shape: Shape of one sample, channels first; taken from the data where null.
        network_args: Further arguments for a network given by name.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"acc": "max", "loss": "min"}
    """What it logs when it is evaluated, the most important first, and which way is better."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"acc": (0.0, 1.0), "loss": (0.0, math.inf)}
    """The least and the largest value of each, beyond which a node of a federation is not believed."""

    def __init__(
        self,
        network: str | nn.Module = "small_cnn",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        num_classes: int | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
    ) -> None:
        num_classes = 10 if num_classes is None else num_classes
        super().__init__(network, optimizer, lr_scheduler, num_classes, in_channels, input_shape, network_args)
        self.num_classes = num_classes

    def targets(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Labels (B,) of a batch."""
        return batch[1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy on a batch."""
        x, y = batch
        logits = self(x)
        if y.is_floating_point() and y.ndim < logits.ndim:  # else they are probabilities
            raise ConfigError(
                "Classifier learns classes, and the data's targets are real numbers: use Regressor, or data whose "
                "targets are whole numbers (of a Table, set data.kind to classes)"
            )
        loss = F.cross_entropy(logits, y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it leaves nothing behind

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy on validation data."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy on test data."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Predicted class (B,) and class probabilities (B, C)."""
        logits = self(batch if isinstance(batch, Tensor) else batch[0])
        return {"prediction": logits.argmax(dim=1), "probability": logits.softmax(dim=1)}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}/loss", F.cross_entropy(logits, y))
        self.log(f"{stage}/acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)
