"""Classification, as a plain LightningModule."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from typing_extensions import override

from lit_fed.errors import ConfigError
from lit_fed.tasks.on_network import OnNetwork


class Classifier(OnNetwork):
    r"""Cross-entropy on any network: :math:`\ell = \mathrm{CE}(f(x), y)`.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, ``val/loss``, ``val/acc``, ``test/loss``,
    ``test/acc``.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``small_cnn``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_classes: Number of classes; null to take it from the data.
        in_channels: Channels of an input; null to take it from the data.
        input_shape: Shape of one sample, channels first; null to take it from the data.
        network_args: Further arguments for a network given by name.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"acc": "max", "loss": "min"}
    """Metrics logged in evaluation, the most important first, with the better direction."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"acc": (0.0, 1.0), "loss": (0.0, math.inf)}
    """Least and largest value of each metric, beyond which a server rejects a node's answer."""

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

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        if y.is_floating_point() and y.ndim < logits.ndim:  # not probabilities per class
            raise ConfigError(
                "Classifier needs classes, and the data's targets are floating-point numbers; use Regressor, or data "
                "with whole-number targets (of a Table, set data.kind to classes)"
            )
        loss = F.cross_entropy(logits, y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Predicted class (B,) and class probabilities (B, C)."""
        logits = self(batch if isinstance(batch, Tensor) else batch[0])
        return {"prediction": logits.argmax(dim=1), "probability": logits.softmax(dim=1)}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}/loss", F.cross_entropy(logits, y))
        self.log(f"{stage}/acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)
