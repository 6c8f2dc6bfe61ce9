"""Regression, as a plain LightningModule."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, R2Score
from typing_extensions import override

from lit_fed.errors import ConfigError
from lit_fed.tasks.on_network import OnNetwork


class Regressor(OnNetwork):
    r"""Squared error on any network: :math:`\ell = \frac1{Bk}\|f(x) - y\|^2`.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss``,
    ``mae`` (mean absolute error) and ``r2`` (explained share of the targets' variance), by torchmetrics.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``mlp``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_outputs: Numbers k to predict for a sample; null to take it from the data.
        in_channels: Channels of an input; null to take it from the data.
        input_shape: Shape of one sample, channels first; null to take it from the data.
        network_args: Further arguments for a network given by name.

    Note:
        R² needs two samples; clients with fewer are left out of its mean.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"loss": "min", "mae": "min", "r2": "max"}
    """Metrics logged in evaluation, the most important first, with the better direction."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {
        "loss": (0.0, math.inf), "mae": (0.0, math.inf), "r2": (-math.inf, 1.0),
    }  # fmt: skip
    """Least and largest value of each metric, beyond which a server rejects a node's answer."""

    def __init__(
        self,
        network: str | nn.Module = "mlp",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        num_outputs: int | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
    ) -> None:
        num_outputs = 1 if num_outputs is None else num_outputs
        super().__init__(network, optimizer, lr_scheduler, num_outputs, in_channels, input_shape, network_args)
        self.num_outputs = num_outputs
        self.mae = MeanAbsoluteError()
        self.r2 = R2Score()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Squared error on a batch, a mean over samples and outputs."""
        x, y = batch
        predicted = self(x)
        loss = F.mse_loss(predicted, _like(predicted, y))
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def on_validation_epoch_start(self) -> None:
        self.r2.reset()  # Lightning resets logged metrics only, and R² of one sample is not logged

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_r2("val")

    @override
    def on_test_epoch_start(self) -> None:
        self.r2.reset()

    @override
    def on_test_epoch_end(self) -> None:
        self._log_r2("test")

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Predictions (B, k)."""
        return {"prediction": self(batch if isinstance(batch, Tensor) else batch[0])}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        predicted = self(x)
        y = _like(predicted, y)
        self.log(f"{stage}/loss", F.mse_loss(predicted, y), prog_bar=True)
        self.mae.update(predicted, y)
        self.log(f"{stage}/mae", self.mae)
        self.r2.update(predicted, y)

    def _log_r2(self, stage: str) -> None:
        if self.r2.total > 1:
            self.log(f"{stage}/r2", self.r2)


def _like(predicted: Tensor, y: Tensor) -> Tensor:
    """Targets (B, …) in the shape of predictions (B, k)."""
    if y.numel() != predicted.numel():
        raise ConfigError(
            f"Regressor predicts {predicted[0].numel()} numbers a sample, and targets have {y[0].numel()}; where whole "
            "numbers are not classes, set data.kind to numbers, else take Classifier"
        )
    return y.view_as(predicted)
