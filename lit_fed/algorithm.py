"""The server's half of a federation: what is sent down, how updates combine, how the server steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightning import Fabric
from torch import Tensor

from lit_fed.client import ClientModule
from lit_fed.payload import Payload
from lit_fed.reducers import Reducer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lit_fed.data import FederatedDataModule

AggregateT = TypeVar("AggregateT")


class Algorithm(ABC, Generic[AggregateT]):
    """A server. Every process holds one, in the same state.

    The type parameter is what the reducer makes of a cohort's updates and `step` takes: a `Payload` for
    `lit_fed.reducers.WeightedMean`.
    """

    @abstractmethod
    def setup(self, module: ClientModule, data: FederatedDataModule, fabric: Fabric) -> None:
        """Start from a module; called once, on every process, with the module on its device."""

    @abstractmethod
    def broadcast(self, round_idx: int) -> Payload:
        """What every client of the cohort receives. Clients must not write into it."""

    def example_broadcast(self, round_idx: int) -> Payload:
        """What a broadcast will hold, by names and shapes, for ``python cli.py cost``, where nothing was ever stepped.

        By default the first broadcast. A server that sends what its steps give answers with empty tensors of their
        size.
        """
        return self.broadcast(round_idx)

    def evaluation_broadcast(self, round_idx: int) -> Payload:
        """What a client is given to be tested with; by default what it would be given to train with."""
        return self.broadcast(round_idx)

    @abstractmethod
    def reducer(self) -> Reducer[AggregateT]:
        """A new reducer for one round."""

    @abstractmethod
    def step(self, aggregate: AggregateT, round_idx: int, num_clients: int) -> dict[str, float]:
        """Move the server's state; skipped in a round in which no update arrived.

        Args:
            aggregate: What the reducer gave.
            round_idx: The round, counted from 0.
            num_clients: How many updates were combined.

        Returns:
            Metrics of the server by name, such as ``server/step_size``.
        """

    def figures(self) -> dict[str, Figure]:
        """Pictures of the server's state by name, for TensorBoard; by default none. Drawn on the first process only."""
        return {}

    @abstractmethod
    def global_state(self) -> dict[str, Tensor]:
        """The global model by parameter and buffer name; empty for methods without one."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives from which `load_state_dict` continues bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
