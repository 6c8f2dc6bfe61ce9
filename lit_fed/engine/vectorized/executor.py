"""Groups of clients trained as one computation.

A group's tensors are stacked, and the task's own ``training_step`` runs under ``torch.vmap`` with each client's weights
on its batch; torch's element-wise optimizers step the stacks. Results differ from sequential training by rounding only.
`lit_fed.engine.vectorized.probe` refuses everything else by name before the run.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from typing_extensions import override

from lit_fed.engine.clients.executor import Executor, Question, SequentialExecutor, failure
from lit_fed.engine.clients.session import Answers, Session
from lit_fed.engine.method.client import Client
from lit_fed.engine.vectorized.alone import Outside, Result, aside, differs_alone, tensors_of, train_alone
from lit_fed.engine.vectorized.evaluation import GroupEvaluation, SharedEvaluation
from lit_fed.engine.vectorized.objective import NotVectorizable
from lit_fed.engine.vectorized.probe import probe, refuse
from lit_fed.engine.vectorized.training import GroupFinish, GroupLoop, Trained, answer_at, holdings
from lit_fed.engine.wire.payload import Addressed, Broadcast, ClientUpdate
from lit_fed.engine.wire.updates import Updates
from lit_fed.errors import ClientFailure, ConfigError, reason
from lit_fed.seeding import derive_seed

_MOST = 512
_MANY = 128  # with batches of any size
_BATCH_VALUES = 2**19  # in all clients' inputs of a step
_HELD = 3  # a client's weights, gradients and momentum
_CPU_ROOM = 3 * 2**25  # bytes: stacks of up to 32 MiB, which any glibc reuses; smaller groups pay more for each client
_GPU_SHARE = 8  # the divisor of free memory: activations take the rest
_MOST_VALUES = 200_000  # in a model that `auto` trains in groups on a CPU: larger ones were measured slower there,
_MOST_CONVOLVED = 44_000  # and convolutions earlier, which a group's kernels do client by client


class VectorizedExecutor(Executor):
    """Trains clients in groups.

    Args:
        session: Admits them.
        group_size: Clients in a group; None for the number whose weights fit into 96 MiB, or into a share of the memory
            of the first process's GPU.
    """

    def __init__(self, session: Session, group_size: int | None = None) -> None:
        self.session = session
        self._forced = group_size is not None
        fabric = next(iter(session.loops.values())).fabric
        sizes = {kind: _fitting(session, kind) if group_size is None else group_size for kind in session.loops}
        self.sizes: dict[str, int] = fabric.broadcast(sizes)
        """Clients in a group by kind of network; the same on every machine and after a resume."""
        self.groups = {kind: GroupLoop(loop) for kind, loop in session.loops.items()}
        self.shared = {kind: SharedEvaluation(session, kind) for kind in session.loops}
        self.own = {kind: GroupEvaluation(session, kind, group) for kind, group in self.groups.items()}
        self.finishes = {kind: GroupFinish(session, loop) for kind, loop in session.loops.items()}
        self._drawn: int | None = None

    @override
    def prepare(self, broadcast: Broadcast) -> None:
        with _refusing():
            self.probe(broadcast)

    def probe(self, broadcast: Broadcast) -> None:
        """As `prepare`.

        Raises:
            NotVectorizable: With the plain reason.
        """
        if self.session.guard.seconds is not None:
            raise NotVectorizable("trainer.client_timeout limits the time of one client at a time")
        for kind, group in self.groups.items():
            refuse(group.loop)
            probe(self.session, kind, broadcast, group, self.finishes[kind])

    @override
    def state_dict(self) -> dict[str, int]:
        return dict(self.sizes)

    @override
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if not self._forced:
            self.sizes.update({kind: size for kind, size in state.items() if kind in self.sizes and size})

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        """Train every client, in groups of similar size."""
        with _refusing():
            yield from self.outcomes(client_ids, broadcast)

    def outcomes(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        """As `run`.

        Raises:
            NotVectorizable: With the plain reason, where a client's result in its group is not the one alone.
        """
        session, client_ids = self.session, list(client_ids)
        self._drawn = self._draw(client_ids, broadcast.round_idx)
        ids = _largest_first(client_ids, session.data.census.samples(client_ids))
        for kind in session.kinds.names:
            own = [client_id for client_id in ids if session.kinds[client_id] == kind]
            size = self.sizes[kind]
            for start in range(0, len(own), size):
                yield from self._run_group(kind, own[start : start + size], broadcast)

    @override
    def ask(
        self, question: Question, client_ids: Iterable[int], broadcast: Broadcast
    ) -> Iterator[ClientUpdate | ClientFailure]:
        """Ask every client: clients with a common model by one pass over their common data, others in groups."""
        left = dict.fromkeys(client_ids)

        def waiting(kind: str) -> list[int]:
            return [client_id for client_id in left if self.session.kinds[client_id] == kind]

        for kind, group in self.groups.items():
            if group.loop.is_mixed:  # autocast does not see through vmap
                continue
            for answer in self.shared[kind].answers(question, waiting(kind), broadcast):
                del left[answer.client_id]
                yield answer
            for answer in self.own[kind].answers(question, waiting(kind), broadcast, self.sizes[kind]):
                del left[answer.client_id]
                yield answer
        yield from super().ask(question, left, broadcast)

    def _run_group(self, kind: str, ids: Sequence[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        started = time.perf_counter()
        admitted: dict[Any, list[Client]] = {}
        if isinstance(broadcast.addressed, Addressed):
            broadcast.addressed.most = len(ids)
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
                    yield self._failed_alone(clients[0].id, broadcast, error)
                else:  # find the client: results do not depend on the other clients of a group
                    half = len(clients) // 2
                    for part in (clients[:half], clients[half:]):
                        yield from self._run_group(kind, [client.id for client in part], broadcast)
                continue
            outcomes = self._outcomes(kind, clients, trained, broadcast)
            seconds = (time.perf_counter() - started) / len(ids)
            for outcome in outcomes:
                if isinstance(outcome, Updates):
                    for metrics in outcome.metrics:
                        metrics["time_s"] = seconds
                yield outcome

    def _outcomes(
        self, kind: str, clients: Sequence[Client], trained: Trained, broadcast: Broadcast
    ) -> list[Updates | ClientFailure]:
        """The trained clients' updates, stored and wrapped, and the failures among them."""
        parts = self._answers(kind, clients, trained, broadcast)
        self._check(kind, clients, trained, parts, broadcast)
        outcomes, start = list[Updates | ClientFailure](), 0
        for answers in parts:
            if isinstance(answers, ClientFailure):
                outcomes.append(answers)
                start += 1
                continue
            rows = slice(start, start + len(answers.finite))
            start = rows.stop
            outcomes += self._sent(clients[rows], answers, trained.metrics[rows], broadcast)
        return outcomes

    def _sent(
        self, clients: Sequence[Client], answers: Answers, metrics: Sequence[dict[str, float]], broadcast: Broadcast
    ) -> Iterator[Updates | ClientFailure]:
        """The updates of clients of one kind, checked, wrapped, packed and stored."""
        session, finite = self.session, list[int]()
        for idx, client in enumerate(clients):
            if answers.finite[idx] and all(map(math.isfinite, metrics[idx].values())):
                finite.append(idx)
                continue
            try:
                session.check_finite(client, metrics[idx], answers.of_client(idx))
                finite.append(idx)
            except (Exception, SystemExit) as error:
                yield self._failed_alone(client.id, broadcast, error)
        if len(finite) < len(clients):
            clients, metrics = [clients[idx] for idx in finite], [metrics[idx] for idx in finite]
            answers = answers.only(finite)
        if not clients:
            return
        updates, kept = session.take(clients, answers, metrics), answers.local_states
        if session.is_done(kept):
            yield updates
            return
        wrapped: Sequence[ClientUpdate] | None = None
        with suppress(Exception, SystemExit):  # asked alone, a failing client is named
            wrapped = session.wrappers.on_clients(list(updates), clients)
        sent = list[ClientUpdate]()
        for idx, (client, update) in enumerate(zip(clients, updates, strict=True)):
            try:
                (own,) = session.wrappers.on_clients([update], [client]) if wrapped is None else [wrapped[idx]]
                sent.append(session.send(own, client, kept[idx]))
            except (Exception, SystemExit) as error:
                yield failure(client.id, client.round_idx, error)
        if sent:
            yield Updates.of(sent)

    def _answers(
        self, kind: str, clients: Sequence[Client], trained: Trained, broadcast: Broadcast
    ) -> Sequence[Answers | ClientFailure]:
        """The clients' answers in their order, asked for once: a method's ``finish`` may change the client's state."""
        together = self.finishes[kind].of_all(clients, trained.tensors)
        if together is not None:
            return together
        answers = list[Answers | ClientFailure]()
        for client in clients:
            try:
                answers.append(Answers.of(self.session.answer(client)))
            except (Exception, SystemExit) as error:
                answers.append(self._failed_alone(client.id, broadcast, error))
        return answers

    def _draw(self, client_ids: Sequence[int], round_idx: int) -> int | None:
        """A client of the cohort, in rounds 0, 1, 2, 4, 8, …; the same on every process."""
        if round_idx & (round_idx - 1):
            return None
        workers = next(iter(self.session.loops.values())).workers
        every = sorted(itertools.chain.from_iterable(workers.gather(client_ids)))
        return random.Random(derive_seed(self.session.seed, "check", round_idx)).choice(every) if every else None

    def _check(
        self,
        kind: str,
        clients: Sequence[Client],
        trained: Trained,
        parts: Sequence[Answers | ClientFailure],
        broadcast: Broadcast,
    ) -> None:
        """Compare the drawn client of the round, and one of every new computation, with the same client alone."""
        group, session = self.groups[kind], self.session
        chosen: set[int] = {
            *group.computations.fresh.values(),
            *(idx for idx, client in enumerate(clients) if client.id == self._drawn),
        }
        for idx in sorted(chosen):
            client, answer = clients[idx], answer_at(parts, idx)
            try:
                if isinstance(answer, ClientFailure):
                    raise answer
                session.check_finite(client, trained.metrics[idx], answer)
            except (Exception, SystemExit):  # `_failed_alone` confirms its failure
                chosen.discard(idx)
                continue
            model = client.model.tensors(trained.tensors)
            result = Result(model, tensors_of(answer), trained.metrics[idx])
            try:
                misfit = differs_alone(session, client.id, broadcast, result)
            except (Exception, SystemExit) as error:
                misfit = f"it fails alone, and not in a group: {reason(error)}"
            if misfit:
                raise NotVectorizable(f"client {client.id} in round {broadcast.round_idx}: {misfit}")
        group.computations.trust(chosen)

    def _failed_alone(self, client_id: int, broadcast: Broadcast, error: BaseException) -> ClientFailure:
        """The failure of a client alone.

        Raises:
            NotVectorizable: If it does not fail alone.
        """
        try:
            with aside(self.session.loops[self.session.kinds[client_id]]):
                train_alone(self.session, self.session.admit(client_id, broadcast, "train"))
        except (Exception, SystemExit) as own:
            return failure(client_id, broadcast.round_idx, own)
        cause = " ".join(str(error).split())[:300]
        raise NotVectorizable(f"client {client_id} fails in a group, and not alone: {cause}") from error


def _largest_first(client_ids: Sequence[int], samples: Sequence[int]) -> list[int]:
    """Clients by descending number of samples, and then ascending."""
    return [client_id for _, client_id in sorted((-count, one) for one, count in zip(client_ids, samples, strict=True))]


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise a refusal as an error of the setting."""
    try:
        yield
    except NotVectorizable as error:
        raise ConfigError(f"trainer.executor=vectorized cannot train these clients: {error}; use sequential") from error


class AutoExecutor(Executor):
    """Groups where they are faster, else one client after the other; prints its choice once.

    The choice is a function of the configuration and not of a clock, so that a resumed run chooses the same. A round in
    which a group fails is repeated one client after the other, and so are all rounds after it: the updates of a round
    are held until every process has trained its own.

    Args:
        session: Admits and enters clients.
        group_size: As in `VectorizedExecutor`.
    """

    def __init__(self, session: Session, group_size: int | None = None) -> None:
        self.session = session
        self.group_size = group_size
        self.chosen: Executor = SequentialExecutor(session)
        self.left = False
        """Whether groups have failed in a round of this run."""

    @override
    def prepare(self, broadcast: Broadcast) -> None:
        loop = next(iter(self.session.loops.values()))
        reasons = (_too_large(self.session, kind) for kind in self.session.loops)
        if loop.fabric.device.type == "cpu" and (size_reason := next(filter(None, reasons), None)) is not None:
            why = size_reason
        else:
            vectorized, why = VectorizedExecutor(self.session, self.group_size), ""
            try:
                vectorized.probe(broadcast)
            except (NotVectorizable, ClientFailure) as error:  # the sequential executor names a client in its round
                why = str(error)
            why = next(filter(None, loop.workers.gather(why)), "")  # every process chooses the same
            if not why:
                self.chosen = vectorized
                loop.fabric.print("trainer.executor=auto trains clients in groups")
                return
        loop.fabric.print(f"trainer.executor=auto trains one client after the other: {why}")

    @override
    def state_dict(self) -> dict[str, int]:
        return dict.fromkeys(self.session.loops, 0) if self.left else self.chosen.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state and not any(state.values()):
            self._leave("as since an earlier round")
        self.chosen.load_state_dict(state)

    @override
    def run(self, client_ids: Iterable[int], broadcast: Broadcast) -> Iterator[Updates | ClientFailure]:
        if not isinstance(self.chosen, VectorizedExecutor):
            yield from self.chosen.run(client_ids, broadcast)
            return
        ids, outcomes, why, session = list(client_ids), list[Updates | ClientFailure](), "", self.session
        begun = [Outside(loop.model.task) for loop in session.loops.values()]
        drawn = torch.get_rng_state()
        try:
            outcomes += self.chosen.outcomes(ids, broadcast)
        except NotVectorizable as error:
            why = str(error)
        reasons = next(iter(session.loops.values())).workers.gather(why)
        if not any(reasons):
            yield from outcomes
            return
        for one in begun:
            one.restore()
        torch.set_rng_state(drawn)
        session.store.undo(ids)
        self._leave(f"from round {broadcast.round_idx} on: {next(filter(None, reasons))}")
        yield from self.chosen.run(ids, broadcast)

    def _leave(self, reason: str) -> None:
        """Train one client after the other from now on."""
        self.chosen, self.left = SequentialExecutor(self.session), True
        next(iter(self.session.loops.values())).fabric.print(
            f"trainer.executor=auto trains one client after the other {reason}"
        )

    @override
    def ask(
        self, question: Question, client_ids: Iterable[int], broadcast: Broadcast
    ) -> Iterator[ClientUpdate | ClientFailure]:
        return self.chosen.ask(question, client_ids, broadcast)


def _too_large(session: Session, kind: str) -> str | None:
    """The reason for which a kind's model gains nothing in groups on a CPU; None if it gains."""
    tensors = session.loops[kind].model.parameters.values()
    values, convolves = sum(tensor.numel() for tensor in tensors), any(tensor.ndim > 2 for tensor in tensors)
    most, what = (_MOST_CONVOLVED, "a model with convolutions") if convolves else (_MOST_VALUES, "a model")
    return f"groups pay for {what} of up to {most:,} weights, and this one has {values:,}" if values > most else None


def _fitting(session: Session, kind: str) -> int:
    """Clients whose weights, gradients and momentum fit into the room for them, or fewer where batches are large."""
    loop, data = session.loops[kind], session.data
    device = loop.fabric.device
    room = torch.cuda.mem_get_info(device)[0] // _GPU_SHARE if device.type == "cuda" else _CPU_ROOM
    each = _HELD * sum(tensor.numel() * tensor.element_size() for tensor in loop.model.parameters.values())
    values = data.batch_size * math.prod(data.input_shape)
    most = min(_MOST, max(_BATCH_VALUES // max(values, 1), _MANY))
    return max(2, min(most, room // max(each, 1)))
