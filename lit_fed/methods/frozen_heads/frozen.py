"""Methods whose last layer neither trains nor travels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping

from lightning import LightningModule
from torch import nn

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg


class FrozenHead(FedAvg):
    """Keeps a task's last layer at its first weights, and averages the rest.

    The frozen weights are drawn from torch's global generator and belong to the server's model, so all clients and
    processes share them. Optimizers never move them, neither by momentum nor by weight decay.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.
    """

    needs = frozenset({"head"})

    def adapt(self, task: LightningModule) -> None:
        """Change or replace the head, and freeze its parameters."""
        head = fed.head_of(task, self.head)
        if head is None:
            return  # the check of `needs` refuses it next
        self.place_head(task, head)
        frozen = self.frozen(task)
        if not any(parameter.requires_grad for name, parameter in task.named_parameters() if name not in frozen):
            raise ConfigError(
                f"model {fed.task_name(task)} has no parameters below its head, which algorithm {type(self).__name__} "
                "freezes; choose a network with hidden layers"
            )

    def place_head(self, task: LightningModule, head: nn.Module) -> None:
        """Change or replace a task's head; by default keep its first weights."""

    def still(self, head: nn.Module) -> Collection[nn.Parameter]:
        """Names of the head's parameters that never train; by default all."""
        return list(head.parameters())

    def frozen(self, task: LightningModule) -> tuple[str, ...]:
        """Names of the parameters that never train."""
        head = fed.head_of(task, self.head)
        still = {id(parameter) for parameter in self.still(head)} if head is not None else set()
        return tuple(name for name, parameter in task.named_parameters() if id(parameter) in still)

    def split(self, model: fed.Model, round_idx: int) -> fed.Split:
        """All parameters travel but the frozen ones."""
        frozen = self.frozen(model.task)
        return fed.Split(tuple(name for name in model.parameters if name not in frozen), frozen=frozen)


class NewHead(FrozenHead):
    """Replaces a linear classifier by a constructed one, and trains the body with the method's own loss.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.
    """

    needs = frozenset({"loss", "logits", "targets", "head", "unweighted"})

    @property
    @abstractmethod
    def new_head(self) -> type[nn.Module]:
        """The class of the constructed head, called with the numbers of features and of classes."""

    def make_head(self, num_features: int, num_classes: int) -> nn.Module:
        """The constructed head, with its first weights."""
        return self.new_head(num_features, num_classes)

    def place_head(self, task: LightningModule, head: nn.Module) -> None:
        """Replace the head by the constructed classifier, once."""
        if isinstance(head, self.new_head):
            # A new parameter, which counts as frozen by the method and not by the task's author.
            head.weight = nn.Parameter(head.get_parameter("weight").detach(), requires_grad=False)
            return
        linear = linear_head(task, head, f"algorithm {type(self).__name__} replaces the head")
        made = self.make_head(linear.in_features, linear.out_features).to(linear.weight)
        put_head(task, head, made)

    def still(self, head: nn.Module) -> Collection[nn.Parameter]:
        """The classes' directions; other parameters of a head may train."""
        weight = getattr(head, "weight", None)
        return [weight] if isinstance(weight, nn.Parameter) else []

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Refuse a head with fewer outputs than classes."""
        server = super().setup(models, population)
        (name,) = self.frozen(self.model.task)
        outputs = len(self.model.parameters[name])
        if outputs < population.num_classes:
            raise ConfigError(
                f"the head of model {fed.task_name(self.model.task)} has {outputs} outputs; it must have "
                f"{population.num_classes}, one per class of the data"
            )
        return server


def put_head(task: LightningModule, head: nn.Module, new_head: nn.Module) -> None:
    """Put another module in the place of a task's head."""
    names = [name for name, module in task.named_modules(remove_duplicate=False) if module is head]
    for name in names:
        task.set_submodule(name, new_head)
    if not names:
        raise ConfigError(
            f"the head of model {fed.task_name(task)} is not one of its submodules; name one as algorithm.head"
        )


def linear_head(task: LightningModule, head: nn.Module, why: str) -> nn.Linear:
    """A task's head, checked to be a linear layer."""
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{why}, which must be an nn.Linear, and the head of model {fed.task_name(task)} is a "
            f"{type(head).__name__}; name another submodule as algorithm.head, or choose another network"
        )
    return head
