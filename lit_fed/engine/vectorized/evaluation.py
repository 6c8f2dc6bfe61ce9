"""Tests of clients in groups: one computation for several models, or a single pass over data that one model shares.

Where clients share a model, the task's ``test_step`` runs under ``torch.vmap``, one sample at a time; a client's means
follow by index from the values logged of its samples, and its torchmetrics take their samples' arguments batch by
batch. The values differ from sequential evaluation by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.meter import StackedSums, in_order
from lit_fed.engine.method.algorithm import Algorithm
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.vectorized.alone import Outside, closeness
from lit_fed.engine.vectorized.batches import Gathered, Rows, can_gather, cut
from lit_fed.engine.vectorized.by_sample import BySample, Unproven
from lit_fed.engine.vectorized.layers import Called
from lit_fed.engine.vectorized.metrics import GroupMeter
from lit_fed.engine.vectorized.objective import (
    GroupClient,
    NotVectorizable,
    StepMeter,
    Stepper,
    batch_dims,
    differing,
    twice,
)
from lit_fed.engine.vectorized.training import OF_ALL, Computations, GroupLoop, holdings
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.private_names import tree_map
from lit_fed.tensors import on_device

Subset = Literal["val", "test"]
Columns = dict[str, NDArray[np.float64]]
_HOOKS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_eval", "model_train")
_PIECE_VALUES = 2**19  # in the inputs of one pass, or a batch
_HELD_VALUES = 2**25  # in the arguments of metrics, of all shared samples


class SharedEvaluation:
    """Answers for the clients of a kind that share its model, where their data are parts of shared data.

    Args:
        session: Admits them.
        kind: Kind of their networks.
    """

    def __init__(self, session: Session, kind: str) -> None:
        self.session, self.kind = session, kind
        self.loop: LocalLoop = session.loops[kind]
        self._meter = GroupMeter(self.loop)

    def answers(self, question: Question, ids: Sequence[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Answers of the clients that can be tested together; the caller asks the others one by one.

        Args:
            question: The question, with `Question.loader`.
            ids: The clients.
            broadcast: Received by them.
        """
        if question.loader is None or not question.of_all or question.stage != "test":
            return
        if not ids or self.loop.model.split.personal or not is_only_its_step(self.loop, question.subset):
            return
        whole = question.loader(None)
        if not isinstance(whole, TensorLoader) or not len(whole) or not whole.is_fixed:
            return
        outside = Outside(self.loop.model.task)
        try:
            loaders = self._loaders(question.loader, ids, whole)
            if not (alike := self._alike(list(loaders), broadcast)):
                return
            updates = self._together(alike, loaders, whole, question.subset)
            if outside.drawn() is None:
                yield from updates
                return
        except Exception:  # of any kind: a client asked alone raises its error
            pass
        outside.restore()

    def _together(
        self, ids: Sequence[int], loaders: Mapping[int, TensorLoader], whole: TensorLoader, subset: Subset
    ) -> list[ClientUpdate]:
        rows = [loaders[client_id].indices.numpy() for client_id in ids]
        places = _places(np.concatenate(rows), whole.indices.numpy())
        if places is None:
            return []
        self._proof = BySample(1, lambda leaf, value: leaf != 1 or bool((whole.targets == value).any()))
        sizes = np.array([len(rows_of_client) for rows_of_client in rows])
        columns, taken = self._samples(whole, subset, places)
        updates = list[ClientUpdate]()
        means = {name: _means(values[places], sizes) for name, values in columns.items()}
        for idx, (client_id, end) in enumerate(zip(ids, sizes.cumsum().tolist(), strict=True)):
            metrics = {name: values[idx] for name, values in means.items()} if sizes[idx] else {}
            if self._meter.used:
                size = loaders[client_id].batch_size
                metrics |= self._of_metrics(taken, places[end - sizes[idx] : end], size)
            metrics = in_order(metrics, self._meter.names)
            updates.append(ClientUpdate(client_id, {}, metrics=metrics, kind=self.kind))
        return updates

    def _loaders(
        self, loader_of: Callable[[int | None], Iterable[object]], ids: Iterable[int], whole: TensorLoader
    ) -> dict[int, TensorLoader]:
        """Loaders of the clients that are tested on rows of the shared tensors."""
        fixed = {}
        for client_id in ids:
            loader = loader_of(client_id)
            if isinstance(loader, TensorLoader) and loader.is_fixed and loader.reads_same(whole):
                fixed[client_id] = loader
        return fixed

    def _alike(self, ids: Sequence[int], broadcast: Broadcast) -> list[int]:
        """Clients that start from the first one's tensors and do no work before a test; the first is entered."""
        alike: list[int] = []
        session, begun, method = self.session, None, type(self.session.algorithm)
        plain = method.start is Algorithm.start and method.phases is Algorithm.phases and broadcast.addressed is None
        for client_id in ids:
            become = session.admit if alike else session.enter
            client = become(client_id, broadcast, "test")
            if plain and not client.own:  # and no client of the kind has
                return list(ids)
            if session.phases(client):
                continue
            begun = client.begun if begun is None else begun
            if client.begun.keys() == begun.keys() and all(client.begun[name] is begun[name] for name in begun):
                alike.append(client_id)
        return alike

    def _samples(self, whole: TensorLoader, subset: Subset, places: NDArray[np.int64]) -> tuple[Columns, list[Tensor]]:
        """Logged values of every shared sample, by name, and arguments of the task's metrics, (samples, 1, …) each.

        They are NaN or 0 in pieces of the data without a sample at these places.
        A piece is one batch of the shared data, or several where samples are small. Pieces do not depend on the
        clients, so that their values are the same bits on any number of processes.
        """
        batch_values = whole.batch_size * math.prod(self.session.data.input_shape)
        size, rows = whole.batch_size * max(1, _PIECE_VALUES // max(1, batch_values)), whole.indices
        wanted = np.flatnonzero(np.bincount(places // size)).tolist()
        logs: dict[str, list[Tensor]] = {}
        pieces: list[list[Tensor]] = []
        for nth in wanted:
            batch = whole.fetch(rows[nth * size : (nth + 1) * size].to(whole.device))
            values, taken = self._values(batch, whole, subset)
            pieces.append(taken)
            if len(rows) * sum(tensor[0].numel() for tensor in taken) > _HELD_VALUES:
                raise Unproven("too many arguments of metrics")
            for name, logged in values.items():
                logs.setdefault(name, []).append(logged.double())
        known = np.concatenate([np.arange(number * size, min((number + 1) * size, len(rows))) for number in wanted])
        columns = {name: np.full(len(rows), math.nan) for name in logs}
        for name, column in logs.items():
            columns[name][known] = torch.cat(column).cpu().numpy()
        stacks = []
        for parts in zip(*pieces, strict=True):
            stack = parts[0].new_zeros(len(rows), *parts[0].shape[1:])
            stack[torch.from_numpy(known).to(stack.device)] = torch.cat(parts)
            stacks.append(stack)
        return columns, stacks

    def _of_metrics(self, taken: Sequence[Tensor], places: NDArray[np.int64], batch_size: int) -> dict[str, float]:
        """Metrics of one client from its samples' arguments, batch by batch."""
        meter, sums = self._meter, StackedSums(1)
        meter.renew(1)
        for start in range(0, len(places), batch_size):
            rows = torch.from_numpy(places[start : start + batch_size])
            columns = [tensor[rows.to(tensor.device)].unsqueeze(0) for tensor in taken]
            values = meter.replay(columns, slice(0, 1), torch.tensor([len(rows)]))
            _check_weights(meter.logged)
            for (name, _), value in zip(meter.logged[len(meter.values) :], values, strict=True):
                sums.add(name, value.double(), len(rows), len(rows), slice(0, 1))
        metrics = sums.means()[0] | meter.computed()[0]
        self.loop.directions |= meter.directions
        return metrics

    @torch.no_grad()
    def _values(self, batch: Any, whole: TensorLoader, subset: Subset) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Values that the task logs of each sample of a batch, (B,), by name, and arguments of its metrics (B, …)."""
        loop, stage, recorder = self.loop, self.loop.evaluation_stage(subset), self._meter
        step, batch_idx = loop.bound(f"{stage}_step"), differing("batch_idx")

        def one(sample: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            recorder.begin()
            step(self._proof.begin(sample), batch_idx)
            self._proof.expect(recorder.values, recorder.taken)
            return tuple(recorder.values), tuple(recorder.taken)

        loop.state.meter, loop.trainer.stage = recorder, "test" if subset == "test" else "validate"
        loop.trainer.meter = differing("self.trainer.callback_metrics")
        loop.begin_metrics(sync=False)
        recorder.names = {}
        try:
            with loop.mode(str(stage)), loop.autocast(), recorder.recording(), self._proof:
                values, taken = torch.vmap(one)(loop.to_device(batch, whole))
        finally:
            loop.state.meter = loop.trainer.meter = None
        _check_weights(recorder.logged)
        logged = zip(recorder.logged, values, strict=True)
        return {name: value for (name, _), value in logged}, list(taken)


def is_only_its_step(loop: LocalLoop, subset: Subset) -> bool:
    """Whether the task has a step of evaluation, and no other hook of it or of a callback sees a batch."""
    stage = loop.evaluation_stage(subset)
    return stage is not None and not any(loop.listeners(f"on_{stage}_{hook}") for hook in _HOOKS)


def _check_weights(logged: Iterable[tuple[str, int | None]]) -> None:
    if any(weight is not None for _, weight in logged):
        raise NotVectorizable("the step sets batch_size in self.log")


def _places(rows: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Positions of rows among others; None where one is missing."""
    place_of = np.full(max(among.max(), rows.max(initial=0)) + 1, -1)
    place_of[among] = np.arange(len(among))
    places: NDArray[np.int64] = place_of[rows]
    return None if (places < 0).any() else places


def _means(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> list[float]:
    """Means of consecutive parts; NaN for an empty one."""
    means, some = np.full(len(sizes), math.nan), sizes > 0
    if some.any():
        means[some] = np.add.reduceat(values, (np.cumsum(sizes) - sizes)[some]) / sizes[some]
    as_list: list[float] = means.tolist()
    return as_list


_BATCH_VALUES = 2**21  # in all clients' inputs of a step
_FEWEST = 8


class GroupEvaluation:
    """Answers for the clients of a kind, several at a time.

    Args:
        session: Admits them.
        kind: Kind of their networks.
        group: Does the work before a test.
    """

    def __init__(self, session: Session, kind: str, group: GroupLoop) -> None:
        self.session, self.kind, self.group, self.loop = session, kind, group, group.loop
        self._impossible: set[tuple[str, str]] = set()  # protocols that failed, and on which data
        self._computations = Computations()

    def answers(
        self, question: Question, ids: Sequence[int], broadcast: Broadcast, size: int
    ) -> Iterator[ClientUpdate]:
        """Answers of the clients that can be tested in groups; the caller asks the others one by one.

        Args:
            question: The question, with `Question.loader`.
            ids: The clients.
            broadcast: Received by them.
            size: Clients at a time.
        """
        if question.loader is None or (question.protocol, question.subset) in self._impossible:
            return
        if not is_only_its_step(self.loop, question.subset):
            return
        loaders = {}
        for client_id in ids:
            try:
                own = question.loader(client_id)
            except Exception:  # of any kind: a client asked alone raises its error
                return
            if not isinstance(own, TensorLoader) or not own.is_fixed:
                return
            loaders[client_id] = own
        largest = max((min(one.batch_size, one.num_samples) for one in loaders.values()), default=1)
        size = min(size, _BATCH_VALUES // max(1, largest * math.prod(self.session.data.input_shape)))
        if size < _FEWEST:  # a batch is large enough to be efficient alone
            return
        samples = self.session.data.census.num_samples

        def many(client_id: int) -> int:  # more batches to train on come first; else, equal sizes go together
            return samples(client_id) if question.fine_tuning is not None else loaders[client_id].num_samples

        ordered = sorted(ids, key=lambda client_id: (-many(client_id), client_id))
        for start in range(0, len(ordered), size):
            chosen, outside = ordered[start : start + size], Outside(self.loop.model.task)
            try:
                found = self._answers(question, chosen, [loaders[one] for one in chosen], broadcast)
                if (drawn := outside.drawn()) is not None:
                    raise NotVectorizable(f"a step of evaluation draws from {drawn}{OF_ALL}")
                self._check(question, {one.client_id: one.metrics for one in found}, broadcast)
            except Exception:  # of any kind: a client asked alone raises its error
                outside.restore()
                self._impossible.add((question.protocol, question.subset))
                return
            yield from found

    def _check(self, question: Question, grouped: Mapping[int, Mapping[str, float]], broadcast: Broadcast) -> None:
        """Compare a client of every new computation with the same client asked alone.

        Raises:
            NotVectorizable: If they differ.
        """
        close = closeness(self.loop)
        for client_id in sorted(set(self._computations.fresh.values())):
            alone = question.answer(client_id, broadcast)
            expected, values = {} if alone is None else alone.metrics, grouped[client_id]
            for name in expected.keys() | values.keys():
                pair = values.get(name, math.inf), expected.get(name, math.inf)
                if not np.isclose(*pair, rtol=close, atol=close, equal_nan=True):
                    raise NotVectorizable(f"{name} of client {client_id} differs in a group and alone")
        self._computations.trust(grouped)

    def _answers(
        self, question: Question, ids: Sequence[int], loaders: Sequence[TensorLoader], broadcast: Broadcast
    ) -> list[ClientUpdate]:
        admitted: dict[Any, list[tuple[Client, TensorLoader]]] = {}
        self._computations.fresh = {}
        with self.session.store.reading(ids):
            for client_id, loader in zip(ids, loaders, strict=True):
                client = self.session.admit(client_id, broadcast, question.stage, question.fine_tuning)
                admitted.setdefault(holdings(client), []).append((client, loader))
        updates = []
        for alike in admitted.values():
            clients = [client for client, _ in alike]
            with self.loop.model.preserved():
                tensors = self.group.train(clients).tensors
                for computation, idx in self.group.computations.fresh.items():
                    self._computations.note(computation, [clients[idx].id])
                metrics = self._test(clients, tensors, [loader for _, loader in alike], question.subset)
            for client, values in zip(clients, metrics, strict=True):
                updates.append(ClientUpdate(client.id, {}, metrics=values, kind=self.kind))
        return updates

    @torch.no_grad()
    def _test(
        self, clients: Sequence[Client], tensors: Tensors, loaders: Sequence[TensorLoader], subset: Any
    ) -> list[dict[str, float]]:
        """Means that each client's evaluation step logs over its loader."""
        if not can_gather(loaders):
            raise NotVectorizable("the clients' test data are not rows of one tensor")
        loop, stage = self.loop, self.loop.evaluation_stage(subset)
        recorder, meter = self.group.meter, StackedSums(len(clients))
        recorder.renew(len(clients))
        recorder.names = {}
        order = sorted(range(len(clients)), key=lambda idx: -len(loaders[idx]))
        lengths = [len(loaders[idx]) for idx in order]
        if not lengths[0]:
            return [{} for _ in clients]
        batches = Gathered(Rows.of_loaders([loaders[idx] for idx in order]), lengths)
        stacks = {name: tensor[order] for name, tensor in tensors.items()}
        step = Stepper(loop.objective, loop.bound(f"{stage}_step"))
        loop.state.client, loop.state.meter = GroupClient(clients[0], loop.state.task_run), recorder
        loop.trainer.stage = "test" if subset == "test" else "validate"
        loop.trainer.meter = differing("self.trainer.callback_metrics")
        loop.begin_metrics(sync=False)
        try:
            with loop.mode(str(stage)):
                for batch_idx in range(lengths[0]):
                    active = sum(length > batch_idx for length in lengths)
                    batch, sizes = batches.take(batch_idx, active, 0)
                    for size, alike in groupby(sorted(range(active), key=sizes.__getitem__), key=sizes.__getitem__):
                        members = list(alike)
                        rows = on_device(members, loop.fabric.device)
                        part = loop.to_device(cut(batch, rows, size, max(sizes)), loaders[0])
                        with loop.autocast():
                            own = {name: tensor[rows] for name, tensor in stacks.items()}
                            values, taken, called = _of_several(step, recorder, own, part, batch_idx)
                            values = values + recorder.replay(taken, rows)
                        ids = [clients[order[member]].id for member in members]
                        self._computations.note((subset, *called), ids)
                        for (name, weight), value in zip(recorder.logged, values, strict=True):
                            weight = size if weight is None else weight
                            meter.add(name, value.double(), weight, weight, rows)
        finally:
            loop.state.meter = loop.trainer.meter = None
        rows_metrics = [sums | other for sums, other in zip(meter.means(), recorder.computed(), strict=True)]
        loop.directions |= recorder.directions
        by_client = sorted(zip(order, rows_metrics, strict=True), key=lambda pair: pair[0])
        return [in_order(metrics, recorder.names) for _, metrics in by_client]


def _of_several(
    step: Stepper, recorder: StepMeter, tensors: Tensors, batch: Any, batch_idx: int
) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """The step for several clients, given stacked tensors and batches of one size.

    Returns:
        Logged values, `StepMeter.taken`, and the operations of torch.
    """

    def one(own: Tensors, batch: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        recorder.begin()
        given = {f"objective.{name}": tensor for name, tensor in own.items()}
        functional_call(step, given, (batch, batch_idx))
        return tuple(recorder.values), tuple(recorder.taken)

    dims, count = batch_dims(batch), len(next(iter(tensors.values())))
    if count == 1:  # other kernels multiply a single client than a group
        tensors, batch = tree_map(twice, (tensors, batch))
    with recorder.recording(), Called() as called:
        values, taken = torch.vmap(one, in_dims=(0, dims))(tensors, batch)
    return [value[:count] for value in values], [tensor[:count] for tensor in taken], called.sequence
