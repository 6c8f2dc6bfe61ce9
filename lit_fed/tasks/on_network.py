"""Classification and regression on a network with an optimizer and an optional schedule, as plain LightningModules."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanAbsoluteError, R2Score
from typing_extensions import override

from lit_fed.arguments import Checked
from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter, adapt_network, build_network, classifier, load_weights


class OnNetwork(Checked, LightningModule):
    """A network with its optimizer and schedule; subclasses add the loss.

    Args:
        network: Name of a network (a key of `NETWORKS`, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_outputs: Outputs of the network per sample.
        in_channels: Channels of an input; null to take it from the data, else 1.
        input_shape: Shape of one sample, channels first; null to take it from the data.
        network_args: Further arguments for a network given by name.
        adapter: Low-rank adapters, and the parts of the network that train beside them; null to train all of it.
        weights: A file or folder of pretrained weights, see `lit_fed.networks.load_weights`; null for random weights.
        weights_of: The part that the file must hold: ``all``, or the ``backbone``; the head is then random.
    """

    def __init__(
        self,
        network: str | nn.Module,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        num_outputs: int,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
        adapter: Adapter | None = None,
        weights: str | None = None,
        weights_of: Literal["all", "backbone"] = "all",
    ) -> None:
        super().__init__()
        if weights is not None and network_args and network_args.get("pretrained"):
            raise ConfigError("model.weights and model.network_args.pretrained both name weights; remove one")
        if isinstance(network, str):
            channels = 1 if in_channels is None else in_channels
            network = build_network(network, num_outputs, channels, input_shape, **(network_args or {}))
        if weights is not None:
            load_weights(network, weights, _head_of(network), weights_of)
        if adapter is not None:
            adapt_network(network, classifier(network), adapter)
        self.network = network
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    @property
    def head(self) -> nn.Module:
        """The network's last layer, from features to outputs."""
        return classifier(self.network)

    @override
    def configure_optimizers(self) -> Any:
        """A new optimizer over the trainable parameters, with its schedule if there is one."""
        optimizer = self.make_optimizer()
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    # It depends only on which parameters train, so a federation asks once for all clients.
    configure_optimizers.same_for_all = True  # type: ignore[attr-defined]

    def make_optimizer(self) -> Optimizer:
        """A new optimizer over the trainable parameters."""
        return self.optimizer(parameter for parameter in self.parameters() if parameter.requires_grad)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs for a batch (B, …)."""
        output: Tensor = self.network(x)
        return output

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, stage: str) -> None:
        """Log a batch's metrics as ``<stage>/<name>``."""
        raise NotImplementedError


def _head_of(network: nn.Module) -> nn.Module | None:
    try:
        return classifier(network)
    except ConfigError:
        return None


class Classifier(OnNetwork):
    r"""Cross-entropy on any network: :math:`\ell = \mathrm{CE}(f(x), y)`.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, ``val/loss``, ``val/acc``, ``test/loss``,
    ``test/acc``.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``small_cnn``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_classes: Number of classes; null to take it from the data.
        kwargs: The network's settings, see `OnNetwork`.
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
        **kwargs: Any,
    ) -> None:
        num_classes = 10 if num_classes is None else num_classes
        super().__init__(network, optimizer, lr_scheduler, num_classes, **kwargs)
        self.num_classes = num_classes

    def targets(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Labels (B,) of a batch."""
        return batch[1]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = _cross_entropy(logits, y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Predicted class (B,) and class probabilities (B, C)."""
        logits = self(batch if isinstance(batch, Tensor) else batch[0])
        return {"prediction": logits.argmax(dim=1), "probability": logits.softmax(dim=1)}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}/loss", _cross_entropy(logits, y))
        classes = y.argmax(dim=1) if y.is_floating_point() else y
        self.log(f"{stage}/acc", (logits.argmax(dim=1) == classes).float().mean(), prog_bar=True)


class Regressor(OnNetwork):
    r"""Squared error on any network: :math:`\ell = \frac1{Bk}\|f(x) - y\|^2`.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss``,
    ``mae`` (mean absolute error) and ``r2`` (explained share of the targets' variance), by torchmetrics.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``mlp``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_outputs: Numbers k to predict for a sample; null to take it from the data.
        kwargs: The network's settings, see `OnNetwork`.

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
        **kwargs: Any,
    ) -> None:
        num_outputs = 1 if num_outputs is None else num_outputs
        super().__init__(network, optimizer, lr_scheduler, num_outputs, **kwargs)
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


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over predictions; refuses targets that are neither classes (B, …) nor probabilities (B, C, …)."""
    if y.is_floating_point() and y.shape != logits.shape:
        raise ConfigError(
            "Classifier needs classes, and the data's targets are floating-point numbers; use Regressor, or data with "
            "whole-number targets (of a Table, set data.kind to classes)"
        )
    if not y.is_floating_point() and y.shape != logits.shape[:1] + logits.shape[2:]:
        raise ConfigError(
            f"Classifier needs one class a prediction, and a sample's targets have shape {tuple(y.shape[1:])}; use "
            "data with one label, or a model of your own whose loss takes several"
        )
    return F.cross_entropy(logits, y)


def _like(predicted: Tensor, y: Tensor) -> Tensor:
    """Targets (B, …) in the shape of predictions (B, k)."""
    if y.numel() != predicted.numel():
        raise ConfigError(
            f"Regressor predicts {predicted[0].numel()} numbers a sample, and targets have {y[0].numel()}; where whole "
            "numbers are not classes, set data.kind to numbers, else take Classifier"
        )
    return y.view_as(predicted)
