"""The seam between the round loop and the training of a cohort.

The loop hands an executor this process's clients and a broadcast and takes updates back, in any order. The loop and its
listeners may look at nothing else: a client may have worked in another process, or on another machine.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from lit_fed.engine.clients.session import Session
from lit_fed.engine.method.client import FineTuning, Stage
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate, Layout
from lit_fed.engine.wire.totals import Totals
from lit_fed.engine.wire.workers import Workers, raise_if_lost
from lit_fed.errors import ClientFailure, LitFedError, ProcessLost, outline, own_traceback, place_of, reason


@dataclass(frozen=True, slots=True)
class Question:
    """A question to clients beside training, such as their metrics on their data.

    Args:
        protocol: Name of the protocol that asks, by which nodes on other machines know it.
        subset: The data in question.
        answer: Answers for a client of this process; None for no answer.
        layout: Tensors of an answer.
        loader: For answers that are nothing but the values logged by the client's evaluation step: the loader of a
            client, or of the data of which every client's are a part (None).
        stage: Stage of the work before that step.
        fine_tuning: Adaptation of the model before it, in the stage ``personal``.
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
        """Check, before the first round, that these clients can be trained so.

        Args:
            broadcast: As clients will receive.

        Raises:
            ConfigError: With the reason, if they cannot.
        """
        return

    @abstractmethod
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client on the broadcast; yield each update or failure.

        The tensors of an update are valid until the next one is asked for. A client's new state is stored before its
        update is yielded, and becomes current with the round.
        """

    def ask(self, question: Question, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Ask every client, in any order; yield the answers.

        Clients' states stay unchanged. The tensors of an answer are valid until the next one is asked for.
        """
        for client_id in client_ids:
            if (answer := question.answer(client_id, broadcast)) is not None:
                yield answer

    def told_together(self) -> list[Totals]:
        """Summed metrics of clients that do not report individually, of the last finished `run` or `ask`.

        Training metrics are weighted by samples, answers by 1 a client.
        """
        return []

    def state_dict(self) -> dict[str, int]:
        """Numbers that checkpoints keep, so that a resumed run works as it began on another machine."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the result of `state_dict`, of this executor or of another."""
        return

    def check_kept(self, session: Session, broadcast: Broadcast) -> None:
        """Refuse, before a run is resumed, client states that it cannot continue from.

        Raises:
            CheckpointError: If there are any.
        """
        session.check_kept(broadcast)


class SequentialExecutor(Executor):
    """Trains one client after the other.

    Args:
        session: Enters and trains them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        for client_id in client_ids:
            outcome: ClientUpdate | ClientFailure
            try:
                with self.session.guard.over(client_id, broadcast.round_idx):
                    outcome = self.run_client(client_id, broadcast)
            except ProcessLost:
                raise
            except (Exception, SystemExit) as error:  # any exception is a failure with the client's id and round
                outcome = failure(client_id, broadcast.round_idx, error)
            yield outcome

    def run_client(self, client_id: int, broadcast: Broadcast) -> ClientUpdate:
        """Train one client: load state and broadcast, work, answer, store the state.

        Raises:
            NonFiniteUpdate: If the loss, the update or the kept state is not finite; the stored state stays unchanged.
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
        update = session.take(client, session.answer(client), metrics)
        (update,) = session.wrappers.on_clients([update], [client])
        update.metrics["time_s"] = time.perf_counter() - started
        return update


def failure(client_id: int, round_idx: int, error: BaseException) -> ClientFailure:
    """The failure of a client, from the error that it raised.

    Raises:
        ProcessLost: If another process ended, with which this one trains the client.
    """
    told = outline(error)
    if isinstance(error, LitFedError):
        return ClientFailure(client_id, round_idx, str(error), outline=told)
    if isinstance(error, SystemExit):  # a client's code may end its own work, not the run
        place = place_of(traceback.extract_tb(error.__traceback__))
        return ClientFailure(
            client_id,
            round_idx,
            f"it called sys.exit({'' if error.code is None else error.code}) in {place}",
            outline=told,
        )
    raise_if_lost(error)
    details = own_traceback(error) or "".join(traceback.format_exception(error))
    return ClientFailure(client_id, round_idx, reason(error), details, told)
