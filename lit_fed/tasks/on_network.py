"""What our tasks have in common: one network, one optimizer, perhaps a schedule."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.networks import build_network, classifier


class OnNetwork(LightningModule):
    """A network and how it is trained; subclasses say by what loss.

    Args:
        network: Name of a network (a key of `NETWORKS`, or any of timm's), or a module.
        optimizer: Made anew whenever it is asked for: in a federation for every client and round.
        lr_scheduler: Steps once an epoch; in a federation, once a round.
        num_outputs: Numbers that the network puts out for a sample.
        in_channels: Channels of an input; 1 where null.
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
        """The network's last layer: its input are the features, its output what the network puts out."""
        return classifier(self.network)

    def configure_optimizers(self) -> Any:
        """A fresh optimizer over the parameters that train, and the schedule where there is one."""
        optimizer = self.make_optimizer()
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    # It depends on nothing but which parameters train: a federation need not ask it anew for every client.
    configure_optimizers.same_for_all = True  # type: ignore[attr-defined]

    def make_optimizer(self) -> Optimizer:
        """A fresh optimizer over the parameters that train."""
        return self.optimizer(parameter for parameter in self.parameters() if parameter.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """What the network puts out for a batch (B, …)."""
        output: Tensor = self.network(x)
        return output
