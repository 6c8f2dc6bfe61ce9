"""The server's knowledge of its clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.kinds import Kinds
    from lit_fed.participation import Participation


@dataclass(slots=True)
class Population:
    """The server's view of the clients: counts, never samples.

    Args:
        data: The population's data, read for counts and the public set only.
        participation: Participation of clients.
        kinds: Kind of every client's network.
        seed: The run's seed.
        server_loop: The `lit_fed.engine.clients.server_training.ServerLoop`, of a room above; None where nothing is
            run, as in ``cost``.
        say: Prints a line before training, such as a method's choice for a null setting.
    """

    data: FederatedDataModule
    participation: Participation
    kinds: Kinds
    seed: int
    server_loop: Any = None
    say: Callable[[str], object] = str  # which prints nothing

    @property
    def num_clients(self) -> int:
        """Clients in the population."""
        return self.data.num_clients

    @property
    def num_classes(self) -> int:
        """Classes of the data."""
        num_classes = self.data.num_classes
        if num_classes is None:
            raise ConfigError("this method needs classes, and the data have none; use other data or another method")
        return num_classes

    @property
    def public_size(self) -> int:
        """Samples of the public set."""
        return self.data.public_size

    def probability(self, client_id: int) -> float | None:
        """Probability that a client's update results from a round; None where it is not known."""
        return self.participation.probability(client_id)

    def public_accuracy(self, classes: Tensor) -> float:
        """Share of the public samples that have these classes (P,): for reports, not for learning."""
        return self.data.census.public_accuracy(classes.to(torch.int64).cpu().numpy())
