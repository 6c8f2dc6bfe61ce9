"""Classification and regression on a network with an optimizer and an optional schedule, as plain LightningModules."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter, adapt_network, build_network, classifier, load_weights
from lit_fed.tasks.scores import ScoreName, Scores, columns_of


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
    r"""Cross-entropy on any network: :math:`\ell = \mathrm{CE}(f(x), y)`, or of several labels a sample, each 0 or 1.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss``,
    without class weights, ``acc`` and the scores in `metrics`; of labels also the accuracy and the scores of each, as
    ``acc_<label>``. Labels have the loss :math:`\frac1L \sum_l \mathrm{BCE}(\sigma(f_l(x)), y_l)`.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``small_cnn``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_classes: Number of classes; null to take it from the data.
        class_weights: Weight of each class, as in ``torch.nn.CrossEntropyLoss``, or of each label where it is 1, as
            ``pos_weight`` of ``torch.nn.BCEWithLogitsLoss``; ``balanced`` weighs classes by
            `lit_fed.data.FederatedDataModule.balanced_weights`. Null weighs all alike.
        metrics: Scores beside the accuracy, see `lit_fed.tasks.scores.Scores`; of classes the first chooses the best
            round.
        labels: Names of the labels, if a sample may have several or none; targets are then (B, L) numbers. Null for
            classes.
        kwargs: The network's settings, see `OnNetwork`.
    """

    metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"acc": "max", "loss": "min"}
    """Metrics logged in evaluation, the most important first, with the better direction."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"acc": (0.0, 1.0), "loss": (0.0, math.inf)}
    """Least and largest value of each metric, beyond which a server rejects a node's answer."""
    weights_in_loss: Tensor | None

    def __init__(
        self,
        network: str | nn.Module = "small_cnn",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        num_classes: int | None = None,
        class_weights: list[float] | Literal["balanced"] | None = None,
        metrics: list[ScoreName] | None = None,
        labels: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if labels is not None:
            _check_labels(labels, num_classes, class_weights)
        num_classes = len(labels) if labels else 10 if num_classes is None else num_classes
        super().__init__(network, optimizer, lr_scheduler, num_classes, **kwargs)
        self.num_classes, self.labels, self.class_weights = num_classes, labels, class_weights
        given = [1.0] * num_classes if class_weights == "balanced" else class_weights
        if given is not None and len(given) != num_classes:
            raise ConfigError(f"model.class_weights has {len(given)} weights for {num_classes} outputs; give one each")
        for place, weight in enumerate(given or ()):
            check_range(f"model.class_weights[{place}]", weight, above=0)
        self.register_buffer("weights_in_loss", None if given is None else torch.tensor(given), persistent=False)
        self.scores = Scores(metrics or (), num_classes, labels)
        if columns := self.scores.columns:
            self.metrics = self.metrics_with(metrics, labels)  # type: ignore[misc]  # its own
            self.ranges = Classifier.ranges | dict.fromkeys(columns, (0.0, 1.0))  # type: ignore[misc]  # its own

    @classmethod
    def metrics_with(
        cls, metrics: Sequence[str] | None = None, labels: Sequence[str] | None = None, **_others: Any
    ) -> dict[str, Literal["max", "min"]]:
        """As `metrics`, of a task with these settings, the others left out."""
        scores: dict[str, Literal["max", "min"]] = dict.fromkeys(columns_of(metrics or (), labels), "max")
        return ({} if labels else scores) | cls.metrics | scores

    @override
    def setup(self, stage: str) -> None:
        """Weigh the classes by all clients' counts if ``class_weights`` is ``balanced``."""
        if self.class_weights == "balanced":
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning
            if not hasattr(data, "balanced_weights"):
                raise ConfigError("model.class_weights is 'balanced', and the data do not count classes; give a list")
            self.weights_in_loss = torch.tensor(data.balanced_weights(), device=self.device)

    def targets(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Labels (B,) of a batch."""
        return batch[1]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = self._loss(self(x), y, self.weights_in_loss)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Predicted class (B,) and class probabilities (B, C); of labels, whether each is on (B, L), and (B, L)."""
        logits = self(batch if isinstance(batch, Tensor) else batch[0])
        return {"prediction": self._decided(logits), "probability": self._probability(logits)}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}/loss", self._loss(logits, y))
        if self.labels is not None:
            y = y.round().long()
        elif y.is_floating_point():
            y = y.argmax(dim=1)
        self.log(f"{stage}/acc", (self._decided(logits) == y).float().mean(), prog_bar=True)
        for name, metric in self.scores.update(self._probability(logits), y) if len(self.scores) else ():
            self.log(f"{stage}/{name}", metric)

    def _loss(self, logits: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean over predictions, or over samples and labels; refuses targets of another form."""
        if self.labels is None:
            return _cross_entropy(logits, y, weights)
        if not y.is_floating_point() or y.shape != logits.shape:
            raise ConfigError(
                f"model.labels has {logits.shape[1]} labels, and a sample's targets are {y.dtype} of shape "
                f"{tuple(y.shape[1:])}; give a floating-point 0 or 1 for each (of a Table, name all in data.target)"
            )
        return F.binary_cross_entropy_with_logits(logits, y, pos_weight=weights)

    def _probability(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1) if self.labels is None else logits.sigmoid()

    def _decided(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=1) if self.labels is None else (logits > 0).long()


class Regressor(OnNetwork):
    r"""Squared error on any network: :math:`\ell = \frac1{Bk}\|f(x) - y\|^2`.

    Also trains under a plain ``lightning.Trainer``. Logs ``train/loss``, and on validation and test data ``loss``,
    ``mae`` (mean absolute error) and ``r2`` (explained share of the targets' variance), by torchmetrics. With a
    `target_scale` the network learns :math:`(y - m) / s`, and ``loss`` is the error of that; predictions and ``mae``
    are in the targets' own units.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``mlp``, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_outputs: Numbers k to predict for a sample; null to take it from the data.
        target_scale: Mean m and standard deviation s of each target; null to take them from the data, see
            `lit_fed.data.FederatedDataModule.target_scale`, or else to learn targets as they are.
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
        target_scale: list[tuple[float, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        num_outputs = 1 if num_outputs is None else num_outputs
        super().__init__(network, optimizer, lr_scheduler, num_outputs, **kwargs)
        self.num_outputs = num_outputs
        self.units = None if target_scale is None else TargetUnits(target_scale, num_outputs)
        self.mae = MeanAbsoluteError()
        self.r2 = R2Score()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Squared error on a batch, a mean over samples and outputs."""
        x, y = batch
        predicted = self(x)
        loss = F.mse_loss(self._learnt(predicted), self._learnt(_like(predicted, y)))
        self.log("train/loss", loss, prog_bar=True)
        return loss

    training_step.same_for_all = True  # type: ignore[attr-defined]  # it keeps no state

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Predictions (B, k) for a batch (B, …), in the targets' own units."""
        outputs: Tensor = self.network(x)
        return outputs if self.units is None else self.units.of(outputs)

    def deployed_outputs(self) -> nn.Module | None:
        """Makes predictions in the targets' own units of the network and its inputs; None for the network's outputs."""
        return self.units

    def _learnt(self, y: Tensor) -> Tensor:
        """Predictions or targets (B, k) as the network learns them."""
        return y if self.units is None else self.units.without(y)

    @override
    def on_validation_epoch_start(self) -> None:
        self.r2.reset()  # Lightning resets logged metrics only, and R² of one sample is not logged

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_r2("val")

    on_test_epoch_start = on_validation_epoch_start

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
        self.mae.update(predicted, y)
        predicted, y = self._learnt(predicted), self._learnt(y)
        self.log(f"{stage}/loss", F.mse_loss(predicted, y), prog_bar=True)
        self.log(f"{stage}/mae", self.mae)
        self.r2.update(predicted, y)  # the same in any unit

    def _log_r2(self, stage: str) -> None:
        if self.r2.total > 1:
            self.log(f"{stage}/r2", self.r2)


class TargetUnits(nn.Module):
    """The step from outputs of a network to targets in their own units, :math:`m + s f(x)`, and back.

    Args:
        scale: Mean m and standard deviation s of each target.
        num_outputs: Number of targets.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, scale: Sequence[tuple[float, float]], num_outputs: int) -> None:
        super().__init__()
        if len(scale) != num_outputs:
            raise ConfigError(f"model.target_scale has {len(scale)} entries for {num_outputs} targets; give one each")
        for at, (mean, std) in enumerate(scale):
            check_range(f"model.target_scale[{at}][0]", mean)
            check_range(f"model.target_scale[{at}][1]", std, above=0)
        self.facts = {"target_scale": scale}
        for name, values in zip(("mean", "std"), torch.tensor(scale).T, strict=True):
            self.register_buffer(name, values, persistent=False)

    def of(self, outputs: Tensor) -> Tensor:
        """Targets (B, k) in their own units."""
        return outputs * self.std + self.mean

    def without(self, y: Tensor) -> Tensor:
        """Targets (B, k) as a network learns them."""
        return (y - self.mean) / self.std

    @override
    def forward(self, network: nn.Module, inputs: Tensor) -> Tensor:
        return self.of(network(inputs))


def _check_labels(labels: Sequence[str], num_classes: int | None, class_weights: object) -> None:
    """Refuse names of labels that cannot name columns, and settings of classes beside labels."""
    if len(set(labels)) < max(1, len(labels)) or any(not label or "/" in label for label in labels):
        raise ConfigError(f"model.labels is {list(labels)!r}; it must be different names without '/'")
    if num_classes is not None or class_weights == "balanced":
        raise ConfigError("model.num_classes and 'balanced' class_weights are not for model.labels; leave them out")


def _cross_entropy(logits: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over predictions; refuses targets that are neither classes (B, …) nor probabilities (B, C, …)."""
    if y.is_floating_point() and y.shape != logits.shape:
        raise ConfigError(
            "Classifier needs classes, and the data's targets are floating-point numbers; use Regressor, or data with "
            "whole-number targets (of a Table, set data.kind to classes); several labels a sample need model.labels"
        )
    if not y.is_floating_point() and y.shape != logits.shape[:1] + logits.shape[2:]:
        raise ConfigError(
            f"Classifier needs one class a prediction, and a sample's targets have shape {tuple(y.shape[1:])}; use "
            "data with one label, or floating-point targets and model.labels for several"
        )
    return F.cross_entropy(logits, y, weights)


def _like(predicted: Tensor, y: Tensor) -> Tensor:
    """Targets (B, …) in the shape of predictions (B, k)."""
    if y.numel() != predicted.numel():
        raise ConfigError(
            f"Regressor predicts {predicted[0].numel()} numbers a sample, and targets have {y[0].numel()}; where whole "
            "numbers are not classes, set data.kind to numbers, else take Classifier"
        )
    return y.view_as(predicted)
