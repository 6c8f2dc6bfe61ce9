"""The common part of our tasks: a network, an optimizer and an optional schedule."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_fed.networks import build_network, classifier


class OnNetwork(LightningModule):
    """A network with its optimizer and schedule; subclasses add the loss.

    Args:
        network: Name of a network (a key of `NETWORKS`, or any of timm's), or a module.
        optimizer: Makes an optimizer; in a federation for every client and round.
        lr_scheduler: Makes a schedule that steps once per epoch; in a federation, once per round.
        num_outputs: Outputs of the network per sample.
        in_channels: Channels of an input; null for 1.
        input_shape: Shape of one sample, channels first.
        network_args: Further arguments for a network given by name.
    """

    def __init__(
        self,
        network: str | nn.Module,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        num_outputs: int,
        in_channels: int | None,
        input_shape: tuple[int, ...] | None,
        network_args: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        if isinstance(network, str):
            channels = 1 if in_channels is None else in_channels
            network = build_network(network, num_outputs, channels, input_shape, **(network_args or {}))
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
