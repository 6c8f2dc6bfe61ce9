"""The seam between the round loop and the way clients are run.

The loop hands an executor this process's clients and takes updates back, in any order. `SequentialExecutor` runs them
one after the other on one module instance; an executor that runs groups of clients as one batched computation fits the
same seam.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lit_fed.client import ClientContext, ClientModule, FineTuning, Stage
from lit_fed.errors import ClientFailure, LitFedError, NonFiniteUpdate
from lit_fed.local import LocalLoop
from lit_fed.payload import ClientUpdate, Payload, is_finite
from lit_fed.store import ClientStore
from lit_fed.strategy import Workers

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


class Executor(ABC):
    """Runs clients of one process."""

    @abstractmethod
    def run(
        self, client_ids: Iterable[int], broadcast: Payload, round_idx: int
    ) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client on the broadcast; yield each update, or what kept the client from making one.

        The tensors of a yielded update are valid until the next one is asked for.
        """


class SequentialExecutor(Executor):
    """One client after the other, on one module instance.

    Args:
        loop: Trains the module.
        store: Where clients keep their state between rounds.
        data: The population.
        seed: The seed of the run.
    """

    def __init__(self, loop: LocalLoop, store: ClientStore, data: FederatedDataModule, seed: int) -> None:
        self.loop = loop
        self.module: ClientModule = loop.module
        self.store = store
        self.data = data
        self.seed = seed
        self._replicas = Workers(loop.fabric, everyone=True)

    def run(
        self, client_ids: Iterable[int], broadcast: Payload, round_idx: int
    ) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client in turn."""
        for client_id in client_ids:
            try:
                yield self.run_client(client_id, broadcast, round_idx)
            except Exception as error:  # whatever a client raises becomes a failure with its id and round
                known = isinstance(error, LitFedError)
                cause = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
                yield ClientFailure(client_id, round_idx, cause, "" if known else traceback.format_exc())

    def run_client(self, client_id: int, broadcast: Payload, round_idx: int) -> ClientUpdate:
        """One client's local work: take in state and broadcast, train, answer, put the state away.

        Raises:
            NonFiniteUpdate: If the loss or the update is not finite; the client's stored state stays as it was.
        """
        started = time.perf_counter()
        ctx = self.enter(client_id, broadcast, round_idx, "train")
        meter = self.loop.train(ctx)
        metrics = meter.merged(self._replicas) if self.loop.workers.data_parallel else meter.compute()
        if self.loop.workers.data_parallel:  # each process saw its part of the batches: batch-norm statistics differ
            self.loop.workers.agree(self.module.tensors(self.module.layout.buffers))
        update = self.module.make_update(ctx)
        bad = [name for name, value in metrics.items() if value != value or abs(value) == float("inf")]
        if bad or not is_finite(update.payload):
            raise NonFiniteUpdate(f"{', '.join(bad) or 'the update'} is not finite; try a smaller learning rate")
        if state := self.module.client_state_dict():
            self.store.put(client_id, state)
        update.metrics |= metrics
        update.metrics["time_s"] = time.perf_counter() - started
        return update

    def enter(
        self, client_id: int, broadcast: Payload, round_idx: int, stage: Stage, fine_tuning: FineTuning | None = None
    ) -> ClientContext:
        """Make the module into one client: its own state, or the initial one, then what the server sent."""
        ctx = ClientContext(client_id, round_idx, stage, self.seed, self.data, fine_tuning)
        self.module.enter(ctx, self.store.get(client_id), broadcast)
        return ctx
