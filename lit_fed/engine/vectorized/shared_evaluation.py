"""Clients that are tested with one model: a single pass over the data that they share.

The task's ``test_step`` runs under ``torch.vmap``, one sample at a time; a client's means follow by index from the
values logged of its samples. The means differ from sequential evaluation by rounding only.
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
from lit_fed.engine.lightning.metric_names import plain_name
from lit_fed.engine.vectorized.objective import NotVectorizable, StepMeter, differing_batch_idx
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.engine.wire.payload import ClientUpdate

Subset = Literal["val", "test"]
Columns = dict[str, NDArray[np.float64]]
_HOOKS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_eval", "model_train")
_LOOK = 32  # samples on which both ways are compared
_CLOSE = 1e-4
_PIECE_VALUES = 2**19  # in the inputs of one pass, or a batch


class SharedEvaluation:
    """Answers for the clients of a kind that share its model, where their data are parts of shared data.

    Args:
        session: Admits them.
        kind: Kind of their networks.
    """

    def __init__(self, session: Session, kind: str) -> None:
        self.session, self.kind = session, kind
        self.loop: LocalLoop = session.loops[kind]

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
        """Rows of the shared tensors that each client is tested on, for the clients with such rows."""
        found = {}
        for client_id in ids:
            own = loader_of(client_id)
            if isinstance(own, TensorLoader) and own.is_fixed and own.reads_same(whole):
                found[client_id] = own.indices.numpy()
        return found

    def _alike(self, ids: Sequence[int], broadcast: Broadcast) -> list[int]:
        """Clients that start from the first one's tensors and do no work before a test; the first is entered."""
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
        """Whether the values that the task logs of a batch are the means of its samples', with the current model.

        Checked every time, on samples from all over the shared data: another value may look like a mean while all
        outputs, or all samples' classes, are equal. The result is a function of model and data, equal on all processes.
        """
        places = torch.linspace(0, len(whole.indices) - 1, min(_LOOK, len(whole.indices))).long()
        batch = whole.fetch(whole.indices[places].to(whole.device))
        try:
            found = {name: float(values.mean()) for name, values in self._values(batch, whole, subset).items()}
        except Exception:  # of any kind: the step cannot take a single sample
            return False
        expected = self.loop.evaluate([batch], subset)
        return found.keys() == expected.keys() and all(
            abs(found[name] - value) <= _CLOSE * (1 + abs(value)) for name, value in expected.items()
        )

    def _columns(self, whole: TensorLoader, subset: Subset, places: NDArray[np.int64]) -> Columns:
        """Logged values of every shared sample; NaN in pieces of the data without a sample at these places.

        A piece is one batch of the shared data, or several where samples are small. Pieces do not depend on the
        clients, so that their values are the same bits on any number of processes.
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
        """Values that the task logs of each sample of a batch, (B,), by name."""
        loop, stage, recorder = self.loop, self.loop.evaluation_stage(subset), StepMeter()
        step, batch_idx = loop.bound(f"{stage}_step"), differing_batch_idx()

        def one(sample: Any) -> tuple[Tensor, ...]:
            recorder.begin()
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
            raise NotVectorizable("the step sets batch_size in self.log")
        return {plain_name(name): found for (name, _), found in zip(recorder.logged, values, strict=True)}


def is_only_its_step(loop: LocalLoop, subset: Subset) -> bool:
    """Whether the task has a step of evaluation, and no other hook of it or of a callback sees a batch."""
    stage = loop.evaluation_stage(subset)
    return stage is not None and not any(loop.listeners(f"on_{stage}_{hook}") for hook in _HOOKS)


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
    found: list[float] = means.tolist()
    return found
