"""The server's knowledge of its clients, and its own training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.kinds import Kinds
    from lit_fed.participation import Participation, ProbabilityIs


OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


class ServerTraining(ABC):
    """Trains networks on the server, and predicts with them, equally on every process."""

    @abstractmethod
    def train(
        self,
        kind: str,
        begin: Payload,
        loader: Iterable[Any],
        loss: Callable[[Any, Any], Tensor],
        *,
        epochs: int,
        seed: tuple[Any, ...],
        optimizer: OptimizerMaker | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Train a kind's network from given tensors, in training mode.

        Args:
            kind: The network's.
            begin: Tensors to start from, by name; others start as in the task.
            loader: Batches.
            loss: Of the task (its ``forward``, or ``run`` for its own ``training_step``) and a batch. Its logged values
                are dropped.
            epochs: Passes over the loader.
            seed: Of dropout and the like.
            optimizer: Makes one over the parameters that are not frozen; None for the task's own without its schedule.

        Returns:
            Copies of the trained tensors named in `begin`, and the last epoch's mean loss over samples.

        Raises:
            ConfigError: If the task's own optimizer is wanted, and it has several.
        """

    @abstractmethod
    def learn(
        self,
        network: nn.Module,
        begin: Payload,
        loader: Iterable[Any],
        terms: Callable[[Any], Mapping[str, Tensor]],
        *,
        seed: tuple[Any, ...],
        optimizer: OptimizerMaker,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train a network that is not a client's, in training mode, by one pass over a loader.

        Args:
            network: The network, on the device; its tensors are overwritten.
            begin: All its parameters and buffers by name.
            loader: Batches.
            terms: Terms of a batch by name, computed with this network; their sum is minimised.
            seed: Of dropout and the like.
            optimizer: Makes one over the network's parameters.

        Returns:
            Copies of the trained tensors, and each term's mean over samples.
        """

    @abstractmethod
    def forward(self, kind: str, tensors: Payload, x: Any) -> Tensor:
        """Output of a kind's network, in evaluation mode, differentiable in the inputs and in its tensors.

        Args:
            kind: The network's.
            tensors: Its parameters and buffers by name; others are as in the task.
            x: A batch of inputs.
        """

    @abstractmethod
    def predict(self, kind: str, tensors: Payload, loader: Iterable[Any]) -> Tensor:
        """Outputs of a kind's ``forward`` for all inputs of ``(x, …)`` batches, concatenated.

        In evaluation mode, in the precision of the weights.

        Args:
            kind: The network's.
            tensors: Its parameters and buffers by name.
            loader: Batches, at least one.
        """


@dataclass(slots=True)
class Population:
    """The clients as the server knows them: by counts, never by samples.

    Args:
        data: The population's data, read for counts and the public set only.
        participation: Participation of clients.
        kinds: Kind of every client's network.
        seed: The run's.
        server_loop: Trains on the server; None where nothing is run, as in ``cost``.
    """

    data: FederatedDataModule
    participation: Participation
    kinds: Kinds
    seed: int
    server_loop: ServerTraining | None = None

    @property
    def num_clients(self) -> int:
        """Clients in the population."""
        return self.data.num_clients

    @property
    def num_classes(self) -> int:
        """Classes of the data.

        Raises:
            ConfigError: If the data have none.
        """
        found = self.data.num_classes
        if found is None:
            raise ConfigError("this method needs classes, and the data have none; use other data or another method")
        return found

    @property
    def public_size(self) -> int:
        """Samples of the public set."""
        return self.data.public_size

    def probability(self, client_id: int) -> float | None:
        """Probability that a client's update results from a round; None where it is not known."""
        return self.participation.probability(client_id)

    @property
    def probability_is(self) -> ProbabilityIs:
        """Whether `probability` is exact, estimated, or unknown."""
        return self.participation.probability_is

    def public_accuracy(self, classes: Tensor) -> float:
        """Share of the public samples that have these classes (P,): for reports, not for learning."""
        return self.data.public_accuracy(classes.to(torch.int64).cpu().numpy())
