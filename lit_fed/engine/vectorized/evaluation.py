"""Clients with different models, tested as one computation, batch by batch.

Where a test begins with work, such as fine-tuning, the group does that work first. A client's values do not depend on
the other clients of its group, and differ from sequential results by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.metric_names import plain_name
from lit_fed.engine.lightning.sums import StackedSums
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.vectorized.alone import Outside
from lit_fed.engine.vectorized.batches import Gathered, can_gather, cut
from lit_fed.engine.vectorized.objective import (
    GroupClient,
    NotVectorizable,
    StepMeter,
    Stepper,
    batch_dims,
    differing,
    twice,
)
from lit_fed.engine.vectorized.shared_evaluation import is_only_its_step
from lit_fed.engine.vectorized.training import OF_ALL, GroupLoop, holdings
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.tensors import on_device

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
            own = question.loader(client_id)
            if not isinstance(own, TensorLoader) or not own.is_fixed:
                return
            loaders[client_id] = own
        largest = max((min(one.batch_size, one.num_samples) for one in loaders.values()), default=1)
        size = min(size, _BATCH_VALUES // max(1, largest * math.prod(self.session.data.input_shape)))
        if size < _FEWEST:  # a batch is large enough to be efficient alone
            return
        samples = self.session.data.num_samples

        def many(client_id: int) -> int:  # more batches to train on come first; else, equal sizes go together
            return samples(client_id) if question.fine_tuning is not None else loaders[client_id].num_samples

        ordered = sorted(ids, key=lambda client_id: (-many(client_id), client_id))
        for start in range(0, len(ordered), size):
            chosen, outside = ordered[start : start + size], Outside(self.loop.model.task)
            try:
                found = self._answers(question, chosen, [loaders[one] for one in chosen], broadcast)
                if (drawn := outside.drawn()) is not None:
                    raise NotVectorizable(f"a step of evaluation draws from {drawn}{OF_ALL}")
            except Exception:  # of any kind: a client asked alone raises its error
                outside.restore()
                self._impossible.add((question.protocol, question.subset))
                return
            yield from found

    def _answers(
        self, question: Question, ids: Sequence[int], loaders: Sequence[TensorLoader], broadcast: Broadcast
    ) -> list[ClientUpdate]:
        admitted: dict[Any, list[tuple[Client, TensorLoader]]] = {}
        with self.session.store.reading(ids):
            for client_id, loader in zip(ids, loaders, strict=True):
                client = self.session.admit(client_id, broadcast, question.stage, question.fine_tuning)
                admitted.setdefault(holdings(client), []).append((client, loader))
        found = []
        for alike in admitted.values():
            clients = [client for client, _ in alike]
            with self.loop.model.preserved():
                tensors = self.group.train(clients).tensors
                metrics = self._test(clients, tensors, [loader for _, loader in alike], question.subset)
            for client, values in zip(clients, metrics, strict=True):
                found.append(ClientUpdate(client.id, {}, metrics=values, kind=self.kind))
        return found

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
        order = sorted(range(len(clients)), key=lambda idx: -len(loaders[idx]))
        lengths = [len(loaders[idx]) for idx in order]
        if not lengths[0]:
            return [{} for _ in clients]
        batches = Gathered([loaders[idx] for idx in order], lengths)
        stacks = {name: tensor[order] for name, tensor in tensors.items()}
        step = _by_client(Stepper(loop.objective, loop.bound(f"{stage}_step")), recorder)
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
                        rows = on_device(list(alike), loop.fabric.device)
                        part = loop.to_device(cut(batch, rows, size, max(sizes)), loaders[0])
                        with loop.autocast():
                            values = step(
                                {name: tensor[rows] for name, tensor in stacks.items()}, part, batch_idx, rows
                            )
                        for (name, weight), value in zip(recorder.logged, values, strict=True):
                            weight = size if weight is None else weight
                            meter.add(name, value.double(), weight, weight, rows)
        finally:
            loop.state.meter = loop.trainer.meter = None
        found = [one | other for one, other in zip(meter.means(), recorder.computed(), strict=True)]
        loop.directions |= {plain_name(name): direction for name, direction in recorder.directions.items()}
        by_client = sorted(zip(order, found, strict=True), key=lambda one: one[0])
        return [{plain_name(name): value for name, value in metrics.items()} for _, metrics in by_client]


def _by_client(step: Stepper, recorder: StepMeter) -> Callable[[Tensors, Any, int, Tensor], list[Tensor]]:
    """The step for several clients: each client's logged values, given stacked tensors and batches of one size."""

    def several(tensors: Tensors, batch: Any, batch_idx: int, rows: Tensor) -> list[Tensor]:
        def one(own: Tensors, batch: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            recorder.begin()
            functional_call(step, {f"objective.{name}": tensor for name, tensor in own.items()}, (batch, batch_idx))
            return tuple(recorder.values), tuple(recorder.taken)

        dims, count = batch_dims(batch), len(next(iter(tensors.values())))
        if count == 1:  # other kernels multiply a single client than a group
            tensors, batch = tree_map(twice, (tensors, batch))
        with recorder.recording():
            values, taken = torch.vmap(one, in_dims=(0, dims))(tensors, batch)
        return [value[:count] for value in values] + recorder.replay([tensor[:count] for tensor in taken], rows)

    return several
