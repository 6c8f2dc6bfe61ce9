"""A classifier as a federation's client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lit_fed.client import ClientModule
from lit_fed.networks import Outputs, build_network, classifier, run, run_with
from lit_fed.regularizers import REGULARIZERS, Regularizer


class Classifier(ClientModule):
    r"""Cross-entropy on any network: :math:`\ell = \mathrm{CE}(f(x), y)`.

    Logs ``train/loss`` (and each term by name where a subclass adds some), ``val/loss``, ``val/acc``, ``test/loss``,
    ``test/acc``.

    Args:
        network: Name of a network (a key of `NETWORKS`, such as ``small_cnn``, or any of timm's), or a module.
        optimizer: Made afresh for every client and phase.
        lr_scheduler: Steps once a round; under a plain ``lightning.Trainer``, once an epoch.
        num_classes: Taken from the data where null.
        in_channels: Taken from the data where null.
        input_shape: Shape of one sample, channels first; taken from the data where null.
        network_args: Further arguments for a network given by name.
        local_epochs: Passes over the client's data per round.
        local_steps: Batches per round instead of epochs.
        regularizer: A term that keeps the client near the global model, by name (``prox``, ``kd``, ``ntd``, ``ld``,
            ``fd``; their weights are then 1) or by class with its settings (`lit_fed.regularizers`).
    """

    uses_features = False
    """Whether the objective looks at the network's features; subclasses that do say so."""

    def __init__(
        self,
        network: str | nn.Module = "small_cnn",
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        num_classes: int | None = None,
        in_channels: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        network_args: dict[str, Any] | None = None,
        local_epochs: int | None = 1,
        local_steps: int | None = None,
        regularizer: Regularizer | Literal["prox", "kd", "ntd", "ld", "fd"] | None = None,
    ) -> None:
        super().__init__(local_epochs, local_steps)
        self.num_classes = num_classes or 10
        if isinstance(network, str):
            network = build_network(network, self.num_classes, in_channels or 1, input_shape, **(network_args or {}))
        self.network = network
        named = REGULARIZERS[regularizer]() if isinstance(regularizer, str) else regularizer
        self.regularizers: list[Regularizer] = [] if named is None else [named]
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def configure_optimizers(self) -> Any:
        """A fresh optimizer over the parameters that train now, and the schedule where there is one."""
        optimizer = self.optimizer(parameter for parameter in self.own_parameters() if parameter.requires_grad)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def own_parameters(self) -> Iterable[nn.Parameter]:
        """What the current client's optimizer may train; by default every parameter."""
        return self.parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of a batch (B, …)."""
        logits: Tensor = self.network(x)
        return logits

    def outputs(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """Logits, and features where the objective uses them, for a batch (B, …).

        Args:
            x: The batch.
            tensors: Use these parameters and buffers, by name, in place of the module's.
        """
        with_features = self.uses_features or any(regularizer.uses_features for regularizer in self.regularizers)
        if tensors is None:
            return run(self.network, x, True) if with_features else Outputs(self(x))
        return run_with(tensors, self.network, x, with_features)

    @torch.no_grad()
    def teach(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """What a teacher gives for a batch: eval mode, no gradient.

        Args:
            x: The batch (B, …).
            tensors: The teacher's parameters and buffers by name; by default the model as it was downloaded.
        """
        training = self.network.training
        self.network.eval()
        try:
            return self.outputs(x, self.downloaded if tensors is None else tensors)
        finally:
            self.network.train(training)

    def head_names(self) -> tuple[str, ...]:
        """Names of the parameters of the network's last layer."""
        head = {id(parameter) for parameter in classifier(self.network).parameters()}
        return tuple(name for name, parameter in self.named_parameters() if id(parameter) in head)

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """What is minimised over the client's data, as terms by name; methods replace it."""
        return {"ce": F.cross_entropy(outputs.logits, y)}

    def loss_terms(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The terms whose sum is the local objective, by name; methods add theirs."""
        x, y = batch
        return self.regularized(x, self.outputs(x), y)

    def regularized(self, x: Tensor, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """The objective and, in a federation, the regularizers' terms, from one forward pass's outputs."""
        terms = self.objective(outputs, y)
        for regularizer in self.regularizers if self.received else ():
            if regularizer.objective_weight != 1.0:
                terms = {name: regularizer.objective_weight * term for name, term in terms.items()}
            if regularizer.weight:
                terms[regularizer.name] = regularizer.weight * regularizer.term(self, x, outputs, y)
        return terms

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The local objective on a batch."""
        terms = list(self.loss_terms(batch).items())
        loss = terms[0][1]
        for _, term in terms[1:]:
            loss = loss + term
        if len(terms) > 1:
            for name, term in terms:
                self.log(f"train/{name}", term)
        self.log("train/loss", loss, prog_bar=True)
        return loss

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
