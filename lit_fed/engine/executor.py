"""The seam between the round loop and the way a cohort is trained.

The loop hands an executor this process's clients and a broadcast and takes updates back, in any order. What crosses is
all that the loop and its listeners may look at: a client may have worked in another process, or on another machine.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from lit_fed.engine.payload import ClientUpdate, is_finite
from lit_fed.engine.session import Broadcast, Session
from lit_fed.engine.strategy import Workers
from lit_fed.errors import ClientFailure, LitFedError, NonFiniteUpdate


class Executor(ABC):
    """Trains clients of one process."""

    def prepare(self, broadcast: Broadcast) -> None:
        """Look, before the first round, whether these clients can be trained so.

        Args:
            broadcast: Such as clients will receive.

        Raises:
            ConfigError: If they cannot; it says why.
        """
        return

    @abstractmethod
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client on the broadcast; yield each update, or what kept the client from making one.

        The tensors of a yielded update are valid until the next one is asked for. A client's new state is put away
        before its update is yielded; it becomes current with the round.
        """


class SequentialExecutor(Executor):
    """One client after the other.

    Args:
        session: Enters and trains them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client in turn."""
        for client_id in client_ids:
            try:
                yield self.run_client(client_id, broadcast)
            except Exception as error:
                yield failure(client_id, broadcast.round_idx, error)

    def run_client(self, client_id: int, broadcast: Broadcast) -> ClientUpdate:
        """One client's local work: take in state and broadcast, train, answer, put the state away.

        Raises:
            NonFiniteUpdate: If the loss or the update is not finite; the client's stored state stays as it was.
        """
        started = time.perf_counter()
        session = self.session
        client = session.enter(client_id, broadcast, "train")
        loop = session.loop(client)
        meter = session.train(client)
        if not loop.workers.data_parallel:
            metrics = meter.compute()
        else:  # each process saw its part of the batches: batch-norm statistics differ
            metrics = meter.merged(Workers(loop.fabric, everyone=True), loop.metrics)
            loop.workers.agree(client.model.tensors(client.model.buffers))
        made = session.algorithm.finish(client)
        bad = [name for name, value in metrics.items() if value != value or abs(value) == float("inf")]
        if bad or not is_finite(made.payload):
            raise NonFiniteUpdate(f"{', '.join(bad) or 'the update'} is not finite; try a smaller learning rate")
        if state := session.kept(client, made.state):
            session.store.put(client_id, state)
        weight = client.num_samples if made.weight is None else made.weight
        metrics["time_s"] = time.perf_counter() - started
        return ClientUpdate(client_id, made.payload, weight, metrics, session.kinds[client_id])


def failure(client_id: int, round_idx: int, error: Exception) -> ClientFailure:
    """Whatever a client raises, with its id and round."""
    known = isinstance(error, LitFedError)
    cause = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
    details = "" if known else "".join(traceback.format_exception(error))
    return ClientFailure(client_id, round_idx, cause, details)
