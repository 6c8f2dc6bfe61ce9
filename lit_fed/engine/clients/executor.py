"""Executors of clients, their tolerated failures, and the layout of an answer without training."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from typing_extensions import override

from lit_fed.engine.clients.session import Answers, Session
from lit_fed.engine.method.algorithm import Algorithm, zeros_like
from lit_fed.engine.method.client import Client, FineTuning, Pass, Stage
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout, Payload, layout_of
from lit_fed.engine.wire.totals import Totals
from lit_fed.engine.wire.updates import Updates
from lit_fed.engine.wire.workers import Workers, raise_if_lost
from lit_fed.errors import ClientFailure, LitFedError, NobodyLeft, ProcessLost, outline, own_traceback, place_of, reason

_IN_A_ROW = 10  # this many failures in a row, or every client's, have a common cause
_SHOWN = 5
_JOINED_VALUES = 2**16  # in updates of clients one after the other that go on as one table


class Failures:
    """Failures that ``on_client_failure: skip`` tolerated, in this process's rounds."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.clients: set[int] = set()
        self._in_a_row: set[int] = set()

    @property
    def count(self) -> int:
        """Number of lost updates."""
        return self.causes.total()

    def take(
        self,
        failures: Sequence[ClientFailure],
        working: Sequence[int],
        population: int,
        say: Callable[[str], object],
    ) -> None:
        """Add a round's failures, and report new causes.

        Args:
            failures: Ascending by client.
            working: All clients that worked in the round.
            population: Number of clients that may work.
            say: Prints a line.

        Raises:
            NobodyLeft: If the last ten clients, or all, failed without a success in between.
        """
        failed = {failure.client_id for failure in failures}
        for failure in failures:
            if failure.cause not in self.causes:
                say(f"{failure}; the run continues without it; further failures of this cause are not printed")
            self.causes[failure.cause] += 1
        self.clients |= failed
        self._in_a_row = self._in_a_row | failed if failed.issuperset(working) else set()
        if len(self._in_a_row) >= min(population, _IN_A_ROW):
            last = failures[-1]
            raise NobodyLeft(
                f"no client is left: {len(self._in_a_row)} clients failed in a row, the last one client "
                f"{last.client_id} in round {last.round_idx}: {last.cause}"
            )

    def summary(self) -> str:
        """All failures in one line."""
        clients = f"{len(self.clients)} client{'' if len(self.clients) == 1 else 's'}"
        causes = [f"{count} × {cause}" for cause, count in self.causes.most_common(_SHOWN)]
        more = ["…"] if len(self.causes) > _SHOWN else []
        return f"continued without {self.count} updates of {clients}: {'; '.join([*causes, *more])}"


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
        """
        return

    @abstractmethod
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        """Train every client on the broadcast; yield updates, of one client or of several, and each failure.

        The tensors of updates are valid until the next are asked for. A client's new state is stored before its
        update is yielded, and becomes current with the round.
        """

    def ask(
        self, question: Question, client_ids: Iterable[int], broadcast: Broadcast
    ) -> Iterator[ClientUpdate | ClientFailure]:
        """Ask every client, in any order; yield each answer or failure.

        Clients' states stay unchanged. The tensors of an answer are valid until the next one is asked for.
        """
        for client_id in client_ids:
            outcome: ClientUpdate | ClientFailure | None
            try:
                outcome = question.answer(client_id, broadcast)
            except (Exception, SystemExit) as error:  # any exception is a failure with the client's id and round
                outcome = failure(client_id, broadcast.round_idx, error)
            if outcome is not None:
                yield outcome

    def summed_metrics(self, logged: Mapping[int, dict[str, float]] | None = None, round_idx: int = 0) -> list[Totals]:
        """Summed metrics of clients that do not report individually, of a round's training, or of the last `ask`.

        Training metrics are weighted by samples, answers by 1 a client.

        Args:
            logged: After training, the metrics of the others by client; NaN replaces what means must leave out.
            round_idx: The round.
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
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        waiting = list[Updates]()  # small ones, which go on together
        for client_id in client_ids:
            try:
                with self.session.guard.over(client_id, broadcast.round_idx):
                    updates = self.run_client(client_id, broadcast)
            except (Exception, SystemExit) as error:  # any exception is a failure with the client's id and round
                yield failure(client_id, broadcast.round_idx, error)
                continue
            if waiting and (updates.layout is not waiting[0].layout or updates.kind != waiting[0].kind):
                yield from self._joined(waiting)
            waiting.append(updates)
            size = updates.vectors.values.numel() if updates.layout and updates.vectors else _JOINED_VALUES
            if len(waiting) * size >= _JOINED_VALUES:
                yield from self._joined(waiting)
        yield from self._joined(waiting)

    @staticmethod
    def _joined(waiting: list[Updates]) -> Iterator[Updates]:
        """The tables as one, and none of them from then on."""
        if waiting:
            made = Updates.joined(waiting)
            waiting.clear()
            yield made

    def run_client(self, client_id: int, broadcast: Broadcast) -> Updates:
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
        answer = session.answer(client)
        session.check_finite(client, metrics, answer)
        metrics["time_s"] = time.perf_counter() - started
        updates = session.take([client], Answers.of(answer), [metrics])
        if session.is_done([answer.local_state]):
            return updates
        (update,) = session.wrappers.on_clients(list(updates), [client])
        return Updates.of([session.send(update, client, answer.local_state)])


def failure(client_id: int, round_idx: int, error: BaseException) -> ClientFailure:
    """The failure of a client, from the error that it raised.

    Raises:
        ProcessLost: If another process ended, with which this one trains the client.
    """
    if isinstance(error, ProcessLost):
        raise error
    trace = outline(error)
    if isinstance(error, LitFedError):
        return ClientFailure(client_id, round_idx, str(error), outline=trace)
    if isinstance(error, SystemExit):  # a client's code may end its own work, not the run
        place = place_of(traceback.extract_tb(error.__traceback__))
        return ClientFailure(
            client_id,
            round_idx,
            f"it called sys.exit({'' if error.code is None else error.code}) in {place}",
            outline=trace,
        )
    raise_if_lost(error)
    details = own_traceback(error) or "".join(traceback.format_exception(error))
    return ClientFailure(client_id, round_idx, reason(error), details, trace)


def untrained_answer(client: Client, algorithm: Algorithm[Any]) -> Payload:
    """Payload of a client that has not trained, with the names, dtypes and shapes of the trained one's.

    Args:
        client: With the tensors it received; the others are filled in.
        algorithm: The method.
    """
    client.own = client.model.copy(client.model.personal_names)
    client.state = algorithm.initial_state(client)
    client.begun = algorithm.start(client)
    for phase in algorithm.phases(client):
        if isinstance(phase, Pass):
            client.results[phase.name] = dict(phase.example)
            continue
        if phase.begin is not None:
            client.left = client.model.copy()
        if not phase.moves:
            client.results[phase.name] = zeros_like(client.model.parameters)
    return algorithm.finish(client).payload


def layouts_of(session: Session, client_ids: Iterable[int], broadcast: Broadcast) -> dict[str, Layout]:
    """Layout of an update by kind of network, read from an untrained client's."""
    layouts: dict[str, Layout] = {}
    for client_id in client_ids:
        kind = session.kinds[client_id]
        if kind not in layouts:
            data = cast("Any", _RemoteClientsData(session.data))
            client = Client(
                client_id, broadcast.round_idx, "train", session.seed, session.loops[kind].model, data, session.work,
                received=broadcast.received(client_id, kind),
            )  # fmt: skip
            if broadcast.addressed is not None:
                client.addressed = broadcast.addressed[client_id].payload
            layouts[kind] = layout_of(untrained_answer(client, session.algorithm))
    return layouts


class _RemoteClientsData:
    """The data of remote clients: metadata, and loaders without batches."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_loader(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return []

    val_loader = calibration_loader = train_loader
