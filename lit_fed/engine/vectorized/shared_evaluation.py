"""Clients that are tested with one and the same model: it goes over the data that they share once.

What a client's part gives follows by index, from what the task logs of every sample: its ``test_step`` runs under
``torch.vmap``, one sample at a time. The differences to one client after the other are those of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.engine.clients.executor import Question
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.surface import plain_name
from lit_fed.engine.vectorized.objective import Differs, NotVectorizable, StepMeter
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate

Subset = Literal["val", "test"]
Columns = dict[str, NDArray[np.float64]]
_HOOKS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_eval", "model_train")
_LOOK = 32  # samples on which both ways are compared
_CLOSE = 1e-4
_PIECE_VALUES = 2**19  # of inputs that the model goes over at once, or a batch


class SharedEvaluation:
    """Answers for the clients of a kind that share its model, where their data are parts of shared ones.

    Args:
        session: Admits them.
        kind: Theirs.
    """

    def __init__(self, session: Session, kind: str) -> None:
        self.session, self.kind = session, kind
        self.loop: LocalLoop = session.loops[kind]

    def answers(self, question: Question, ids: Sequence[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """The answers of those clients for which this gives them; the others are to be asked one by one.

        Args:
            question: What is asked, with `Question.loader`.
            ids: Whom.
            broadcast: What they receive.
        """
        if question.loader is None or not question.of_all or question.stage != "test":
            return
        if not ids or self.loop.model.split.personal or not is_only_its_step(self.loop, question.subset):
            return
        whole = question.loader(None)
        if not isinstance(whole, TensorLoader) or not len(whole) or not whole.is_fixed:
            return
        rows = self._rows(question.loader, ids, whole)
        alike = self._alike(list(rows), broadcast)
        if not alike or not self._fits(whole, question.subset):
            return
        places = _places(np.concatenate([rows[client_id] for client_id in alike]), whole.indices.numpy())
        if places is None:
            return
        sizes = np.array([len(rows[client_id]) for client_id in alike])
        columns = self._columns(whole, question.subset, places)
        means = {name: _means(values[places], sizes) for name, values in columns.items()}
        for idx, client_id in enumerate(alike):
            metrics = {name: values[idx] for name, values in means.items()} if sizes[idx] else {}
            yield ClientUpdate(client_id, {}, metrics=metrics, kind=self.kind)

    def _rows(
        self, loader_of: Callable[[int | None], Iterable[object]], ids: Iterable[int], whole: TensorLoader
    ) -> dict[int, NDArray[np.int64]]:
        """The rows that each client is tested on, of those clients whose rows are of the shared tensors."""
        found = {}
        for client_id in ids:
            own = loader_of(client_id)
            if isinstance(own, TensorLoader) and own.is_fixed and own.reads_same(whole):
                found[client_id] = own.indices.numpy()
        return found

    def _alike(self, ids: Sequence[int], broadcast: Broadcast) -> list[int]:
        """Those who begin with the very tensors of the first, which is entered, and go on to no work before a test."""
        found: list[int] = []
        session, begun = self.session, None
        for client_id in ids:
            become = session.admit if found else session.enter
            client = become(client_id, broadcast, "test")
            if session.phases(client):
                continue
            begun = client.begun if begun is None else begun
            if client.begun.keys() == begun.keys() and all(client.begun[name] is begun[name] for name in begun):
                found.append(client_id)
        return found

    def _fits(self, whole: TensorLoader, subset: Subset) -> bool:
        """Whether what the task logs of a batch is the mean of what it logs of its samples, with the model as it is.

        It is looked at every time, on samples from all over the shared data: what is no mean may look like one while
        all outputs are alike, or all samples of a class. So it is a function of model and data, on every process alike.
        """
        places = torch.linspace(0, len(whole.indices) - 1, min(_LOOK, len(whole.indices))).long()
        batch = whole.fetch(whole.indices[places].to(whole.device))
        try:
            found = {name: float(values.mean()) for name, values in self._values(batch, whole, subset).items()}
        except Exception:  # whatever a step that takes a batch cannot do with one sample
            return False
        expected = self.loop.evaluate([batch], subset)
        return found.keys() == expected.keys() and all(
            abs(found[name] - value) <= _CLOSE * (1 + abs(value)) for name, value in expected.items()
        )

    def _columns(self, whole: TensorLoader, subset: Subset, places: NDArray[np.int64]) -> Columns:
        """What is logged of every shared sample; of pieces of the data without a sample at these places, nothing.

        Pieces are those of the shared data whoever asks for them, so that their values are the same bits on any number
        of processes: batches, or several where samples are so small that a batch is done at once.
        """
        batch_values = whole.batch_size * math.prod(self.session.data.input_shape)
        size, rows = whole.batch_size * max(1, _PIECE_VALUES // max(1, batch_values)), whole.indices
        wanted = np.flatnonzero(np.bincount(places // size)).tolist()
        found: dict[str, list[Tensor]] = {}
        for one in wanted:
            batch = whole.fetch(rows[one * size : (one + 1) * size].to(whole.device))
            for name, values in self._values(batch, whole, subset).items():
                found.setdefault(name, []).append(values.double())
        known = np.concatenate([np.arange(one * size, min((one + 1) * size, len(rows))) for one in wanted])
        columns = {name: np.full(len(rows), math.nan) for name in found}
        for name, parts in found.items():
            columns[name][known] = torch.cat(parts).cpu().numpy()
        return columns

    @torch.no_grad()
    def _values(self, batch: Any, whole: TensorLoader, subset: Subset) -> dict[str, Tensor]:
        """What the task logs of each sample of a batch, (B,), by name."""
        loop, stage, recorder = self.loop, self.loop.evaluation_stage(subset), StepMeter()
        step, batch_idx = loop.bound(f"{stage}_step"), Differs("batch_idx")

        def one(sample: Any) -> tuple[Tensor, ...]:
            recorder.logged, recorder.values = [], []
            step(tree_map(lambda leaf: leaf.unsqueeze(0), sample), batch_idx)
            return tuple(recorder.values)

        loop.state.meter, loop.trainer.stage = recorder, "test" if subset == "test" else "validate"
        loop.begin_metrics(sync=False)
        try:
            with loop.mode(str(stage)), loop.autocast():
                values = torch.vmap(one)(loop.to_device(batch, whole))
        finally:
            loop.state.meter = None
        if any(weight not in (None, 1) for _, weight in recorder.logged):
            raise NotVectorizable("the step says itself what its values weigh")
        return {plain_name(name): found for (name, _), found in zip(recorder.logged, values, strict=True)}


def is_only_its_step(loop: LocalLoop, subset: Subset) -> bool:
    """Whether the task has a step that evaluates, and nothing else of it or of a callback looks at a batch."""
    stage = loop.evaluation_stage(subset)
    return stage is not None and not any(loop.listeners(f"on_{stage}_{hook}") for hook in _HOOKS)


def _places(rows: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Where rows stand among others; None where one does not."""
    place_of = np.full(max(among.max(), rows.max(initial=0)) + 1, -1)
    place_of[among] = np.arange(len(among))
    places: NDArray[np.int64] = place_of[rows]
    return None if (places < 0).any() else places


def _means(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> list[float]:
    """Means of consecutive parts; of an empty one, NaN."""
    means, some = np.full(len(sizes), math.nan), sizes > 0
    if some.any():
        means[some] = np.add.reduceat(values, (np.cumsum(sizes) - sizes)[some]) / sizes[some]
    found: list[float] = means.tolist()
    return found
