"""The seam between the round loop and the way a cohort is trained.

The loop hands an executor this process's clients and a broadcast and takes updates back, in any order. What crosses is
all that the loop and its listeners may look at: a client may have worked in another process, or on another machine.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from lit_fed.engine.clients.session import Session
from lit_fed.engine.method.client import FineTuning, Stage
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate, Flat, Layout, are_finite
from lit_fed.engine.wire.totals import Totals
from lit_fed.engine.wire.workers import Workers, raise_if_lost
from lit_fed.errors import ClientFailure, LitFedError, ProcessLost, outline, place_of


@dataclass(frozen=True, slots=True)
class Question:
    """What clients are asked beside training, such as how well they do on their data.

    Args:
        protocol: The name of the protocol that asks; whoever works elsewhere knows it by that.
        subset: On which data.
        answer: Answers for a client of this process; None where the client has nothing to say.
        layout: The tensors that an answer holds.
        loader: Where an answer is nothing but what the client's evaluation step logs over a loader: a client's, or that
            of the data of which every client's are a part (None).
        stage: Of what happens before that step.
        fine_tuning: How the client adapts its model before it, in the stage ``personal``.
        of_all: Whether every client of the federation is asked.
    """

    protocol: str
    subset: Literal["val", "test"]
    answer: Callable[[int, Broadcast], ClientUpdate | None]
    layout: Layout
    loader: Callable[[int | None], Iterable[object]] | None = None
    stage: Stage = "test"
    fine_tuning: FineTuning | None = None
    of_all: bool = True


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

    def ask(self, question: Question, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Ask every client, in any order; yield the answers of those who have one.

        What clients keep stays as it is. An answer's tensors are valid until the next one is asked for.
        """
        for client_id in client_ids:
            if (answer := question.answer(client_id, broadcast)) is not None:
                yield answer

    def told_together(self) -> list[Totals]:
        """Of the last `run` or `ask`, once it is done: the metrics of clients that tell nothing of themselves, in sums.

        Training metrics are weighted by samples, answers by 1 a client.
        """
        return []

    def check_kept(self, session: Session, broadcast: Broadcast) -> None:
        """Refuse, before a run is resumed, client states that it cannot go on with.

        Raises:
            CheckpointError: If there are such.
        """
        session.check_kept(broadcast)


class SequentialExecutor(Executor):
    """One client after the other.

    Args:
        session: Enters and trains them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._layout: Mapping[str, torch.Size] = {}

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client in turn."""
        for client_id in client_ids:
            outcome: ClientUpdate | ClientFailure
            try:
                with self.session.guard.over(client_id, broadcast.round_idx):
                    outcome = self.run_client(client_id, broadcast)
            except ProcessLost:
                raise
            except (Exception, SystemExit) as error:  # whatever a client raises is a failure with its id and round
                outcome = failure(client_id, broadcast.round_idx, error)
            yield outcome

    def run_client(self, client_id: int, broadcast: Broadcast) -> ClientUpdate:
        """One client's local work: take in state and broadcast, train, answer, put the state away.

        Raises:
            NonFiniteUpdate: If the loss, the update or what the client keeps is not finite; its stored state stays as
                it was.
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
        flat = Flat.of(made.payload, self._layout)
        kept = session.kept(client, made.state)
        sent = made.payload.values() if flat is None else [flat.values]
        session.put_away(client, metrics, made.payload, kept, are_finite([*sent, *kept.values()]))
        if (rate := loop.optimizers.rate_of(client.round_idx)) is not None:
            metrics["lr"] = rate
        weight = client.num_samples if made.weight is None else made.weight
        if flat is not None:
            self._layout = flat.layout
        metrics["time_s"] = time.perf_counter() - started
        update = ClientUpdate(client_id, made.payload, weight, metrics, session.kinds[client_id], flat=flat)
        return session.wrappers.on_client(update, client.received)


def failure(client_id: int, round_idx: int, error: BaseException) -> ClientFailure:
    """What kept a client from making an update.

    Raises:
        ProcessLost: If it was the end of another process, with which this one trains the client.
    """
    told = outline(error)
    if isinstance(error, LitFedError):
        return ClientFailure(client_id, round_idx, str(error), outline=told)
    if isinstance(error, SystemExit):  # a client's code may end its own work, not everybody's
        place = place_of(traceback.extract_tb(error.__traceback__))
        return ClientFailure(
            client_id,
            round_idx,
            f"it called sys.exit({'' if error.code is None else error.code}) in {place}",
            outline=told,
        )
    raise_if_lost(error)
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return ClientFailure(client_id, round_idx, cause, "".join(traceback.format_exception(error)), told)
