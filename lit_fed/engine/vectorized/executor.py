"""Groups of clients trained as one computation.

A group's tensors are stacked, and the task's own ``training_step`` runs under ``torch.vmap`` with each client's weights
on its batch; torch's element-wise optimizers step the stacks. The differences to one client after the other are those
of rounding. What cannot be run so is refused before the run, by name: see `lit_fed.engine.vectorized.probe`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lit_fed.engine.clients.executor import Executor, Question, SequentialExecutor, failure
from lit_fed.engine.clients.session import Session
from lit_fed.engine.method.client import Client
from lit_fed.engine.vectorized.evaluation import GroupEvaluation
from lit_fed.engine.vectorized.finish import Answer, GroupFinish
from lit_fed.engine.vectorized.objective import NotVectorizable
from lit_fed.engine.vectorized.probe import probe, refuse
from lit_fed.engine.vectorized.shared_evaluation import SharedEvaluation
from lit_fed.engine.vectorized.training import GroupLoop, holdings
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.errors import ClientFailure, ConfigError

_CACHE_BYTES = 4 * 2**20
_MOST = 512
_MANY = 128  # whatever a batch holds
_BATCH_VALUES = 2**19  # of all clients' inputs in a step
_FEWEST = 8  # below it, groups were measured slower on a CPU than one client after the other


class VectorizedExecutor(Executor):
    """Trains clients in groups.

    Args:
        session: Admits them.
        group_size: Clients in a group; None for as many as fit a processor's cache.
    """

    def __init__(self, session: Session, group_size: int | None = None) -> None:
        self.session = session
        self.group_size = group_size
        self.groups = {kind: GroupLoop(loop) for kind, loop in session.loops.items()}
        self.shared = {kind: SharedEvaluation(session, kind) for kind in session.loops}
        self.own = {kind: GroupEvaluation(session, kind, group) for kind, group in self.groups.items()}
        self.finishes = {kind: GroupFinish(session, loop) for kind, loop in session.loops.items()}

    def prepare(self, broadcast: Broadcast) -> None:
        """See `lit_fed.engine.vectorized.probe`."""
        try:
            if self.session.guard.seconds is not None:
                raise NotVectorizable("trainer.client_timeout watches one client at a time")
            for kind, group in self.groups.items():
                refuse(group.loop)
                probe(self.session, kind, broadcast, group, self.finishes[kind])
        except NotVectorizable as error:
            raise ConfigError(
                f"trainer.executor=vectorized cannot train these clients: {error}; use sequential"
            ) from error

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """Train every client, in groups of those that are most alike in size."""
        session = self.session
        ids = sorted(sorted(client_ids), key=session.data.num_samples, reverse=True)
        for kind in session.kinds.names:
            own = [client_id for client_id in ids if session.kinds[client_id] == kind]
            size = self.group_size or self._size(kind)
            for start in range(0, len(own), size):
                yield from self._run_group(kind, own[start : start + size], broadcast)

    def ask(self, question: Question, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Ask every client: those who share a model by one pass over the data they share, others in groups."""
        left = dict.fromkeys(client_ids)

        def of(kind: str) -> list[int]:
            return [client_id for client_id in left if self.session.kinds[client_id] == kind]

        for kind in self.groups:
            for answer in self.shared[kind].answers(question, of(kind), broadcast):
                del left[answer.client_id]
                yield answer
            size = self.group_size or self._size(kind)
            for answer in self.own[kind].answers(question, of(kind), broadcast, size):
                del left[answer.client_id]
                yield answer
        yield from super().ask(question, left, broadcast)

    def _run_group(self, kind: str, ids: Sequence[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        started = time.perf_counter()
        admitted: dict[Any, list[Client]] = {}
        with self.session.store.reading(ids):
            for client_id in ids:
                try:
                    client = self.session.admit(client_id, broadcast, "train")
                except (Exception, SystemExit) as error:
                    yield failure(client_id, broadcast.round_idx, error)
                    continue
                admitted.setdefault(holdings(client), []).append(client)
        for clients in admitted.values():
            try:
                trained = self.groups[kind].train(clients)
            except NotVectorizable:
                raise
            except (Exception, SystemExit) as error:
                if len(clients) == 1:
                    yield failure(clients[0].id, broadcast.round_idx, error)
                else:  # who was it? what each gives does not depend on who else is in the group
                    half = len(clients) // 2
                    for part in (clients[:half], clients[half:]):
                        yield from self._run_group(kind, [client.id for client in part], broadcast)
                continue
            finish = self.finishes[kind]
            answers = finish.of_all(clients, trained.tensors)
            seconds = (time.perf_counter() - started) / len(ids)
            for idx, client in enumerate(clients):
                try:
                    answer = finish.of(client) if answers is None else answers[idx]
                    update = self._update(client, answer, trained.metrics[idx], kind)
                except (Exception, SystemExit) as error:
                    yield failure(client.id, broadcast.round_idx, error)
                    continue
                update.metrics["time_s"] = seconds
                yield update

    def _update(self, client: Client, answer: Answer, metrics: dict[str, float], kind: str) -> ClientUpdate:
        session = self.session
        session.put_away(client, metrics, answer.payload, answer.kept, answer.finite)
        if (rate := session.loops[kind].optimizers.rate_of(client.round_idx)) is not None:
            metrics["lr"] = rate
        weight = client.num_samples if answer.weight is None else answer.weight
        update = ClientUpdate(client.id, answer.payload, weight, metrics, kind, flat=answer.flat)
        return session.wrappers.on_client(update, client.received)

    def _size(self, kind: str) -> int:
        """As many as fit the cache with their weights, and the more the smaller a step's batches are."""
        data = self.session.data
        values = data.batch_size * math.prod(data.input_shape)
        return max(2, min(_MOST, max(_BATCH_VALUES // values, _MANY), fitting(self.session, kind)))


class AutoExecutor(Executor):
    """Groups where they are faster, one client after the other elsewhere; says once which.

    The choice is a function of the configuration and not of a clock, so that a resumed run makes the same.

    Args:
        session: Admits and enters clients.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.chosen: Executor = SequentialExecutor(session)

    def prepare(self, broadcast: Broadcast) -> None:
        """Choose."""
        fabric = next(iter(self.session.loops.values())).fabric
        fitting_clients = min(fitting(self.session, kind) for kind in self.session.loops)
        if fabric.device.type == "cpu" and fitting_clients < _FEWEST:
            why = f"only {fitting_clients} clients' weights fit the cache"
        else:
            vectorized = VectorizedExecutor(self.session)
            try:
                vectorized.prepare(broadcast)
            except ConfigError as error:
                why = str(error.__cause__ or error)
            except ClientFailure as error:  # whom one after the other names in its round, if it comes to that
                why = str(error)
            else:
                self.chosen = vectorized
                fabric.print("trainer.executor=auto trains clients in groups")
                return
        fabric.print(f"trainer.executor=auto trains one client after the other: {why}")

    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate | ClientFailure]:
        """As was chosen."""
        return self.chosen.run(client_ids, broadcast)

    def ask(self, question: Question, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """As was chosen."""
        return self.chosen.ask(question, client_ids, broadcast)


def fitting(session: Session, kind: str) -> int:
    """How many clients' weights, gradients and momentum fit a processor's cache together."""
    model = session.loops[kind].model
    each = 3 * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters.values())
    return _CACHE_BYTES // max(each, 1)
