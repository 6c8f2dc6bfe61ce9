"""What the server may know about its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from typing import Protocol as Interface

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.kinds import Kinds
    from lit_fed.participation import Participation, ProbabilityIs


class ServerTraining(Interface):
    """What trains on the server: `lit_fed.engine.clients.server_training.ServerLoop`."""

    def train(
        self,
        kind: str,
        begin: Payload,
        loader: Iterable[Any],
        loss: Callable[[Any, Any], Tensor],
        *,
        epochs: int,
        seed: tuple[Any, ...],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    ) -> tuple[dict[str, Tensor], float]:
        """Train a kind's network from given tensors; its copies, and the last epoch's mean loss."""

    def learn(
        self,
        network: nn.Module,
        begin: Payload,
        loader: Iterable[Any],
        terms: Callable[[Any], Mapping[str, Tensor]],
        *,
        seed: tuple[Any, ...],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train a network that is no client's from given tensors; its copies, and each term's mean."""

    def forward(self, kind: str, tensors: Payload, x: Any) -> Tensor:
        """What a kind's network gives for inputs, differentiable in them and in its tensors."""

    def predict(self, kind: str, tensors: Payload, loader: Iterable[Any]) -> Tensor:
        """What a kind's network gives for the inputs of a loader."""


@dataclass(slots=True)
class Population:
    """The clients as the server sees them: counts, never samples.

    Args:
        data: The population's data, of which only counts and the public set are looked at.
        participation: Who takes part.
        kinds: Which client has which network.
        seed: The run's seed.
        server_loop: Trains on the server, where a method does; None where nothing is run, as in ``cost``.
        say: Prints a line before training, such as a method's choice of a setting that is null.
    """

    data: FederatedDataModule
    participation: Participation
    kinds: Kinds
    seed: int
    server_loop: ServerTraining | None = None
    say: Callable[[str], object] = str  # which prints nothing

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
            raise ConfigError("this method needs classes, and the data have none; use another method or data")
        return found

    @property
    def public_size(self) -> int:
        """Samples of the public set."""
        return self.data.public_size

    def probability(self, client_id: int) -> float | None:
        """The probability with which a client's update comes out of a round; None where it is not known."""
        return self.participation.probability(client_id)

    @property
    def probability_is(self) -> ProbabilityIs:
        """Whether `probability` is exact, estimated, or unknown."""
        return self.participation.probability_is

    def public_accuracy(self, classes: Tensor) -> float:
        """How many of the public samples are of these classes (P,): a number to report, for nothing to learn from."""
        return self.data.public_accuracy(classes.to(torch.int64).cpu().numpy())
