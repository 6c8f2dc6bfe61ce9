"""torchmetrics objects of a group of clients: every client has its own copy.

While a step runs under ``torch.vmap``, the calls of the task's metrics are recorded, and their tensors leave it as
outputs. Afterwards every client's copies take the same calls in the same order, with the client's rows of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.method.model import Differs
from lit_fed.engine.vectorized.by_sample import Count
from lit_fed.engine.vectorized.objective import NotVectorizable, Rows, StepMeter
from lit_fed.private_names import SHARE_STATES, UPDATES, lacks, share, tree_flatten, tree_unflatten

_RECORDED = ("forward", "update", "compute", "reset")


class _Call(NamedTuple):
    """A call of a metric.

    Args:
        place: The metric's among the task's.
        method: The method's name.
        spec: Structure of its arguments.
        leaves: Their leaves; `_TENSOR` for a tensor.
    """

    place: int
    method: str
    spec: Any
    leaves: list[Any]


_TENSOR = object()


class Returned(Differs):
    """Placeholder of the value of a recorded call; ``self.log`` takes it, and every other use is refused.

    Args:
        metric: The metric's name, for errors.
        call: The call's number in the step.
        key: The value's name where the call returns several.
    """

    def __init__(self, metric: str, call: int, key: str | None = None) -> None:
        super().__init__(
            lambda: NotVectorizable(
                f"a step uses a value of the metric {metric!r} for more than self.log, and a group has it only "
                "after the step"
            )
        )
        self.call, self.key = call, key


class _Unread(Differs):
    """Placeholder of a metric's state during a step.

    Torch finds a module among others by its hash, and a metric's is that of its states, or of their items.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # the other class refuses it
    __iter__ = property()  # not iterable

    @override
    def __getattr__(self, name: str) -> NoReturn:
        if name == "__iter__":
            raise AttributeError(name)
        self._refuse()


class GroupMeter(StepMeter):
    """Collects values and metrics logged in one step; keeps every client's metrics.

    Args:
        loop: Runs the task.
    """

    def __init__(self, loop: LocalLoop) -> None:
        super().__init__()
        self._task_run = loop.state.task_run
        kinds = Metric | MetricCollection
        modules = [(name, module) for name, module in loop.model.task.named_modules() if isinstance(module, kinds)]
        self._names, self._originals = [name for name, _ in modules], [module for _, module in modules]
        self._places = {id(metric): place for place, metric in enumerate(self._originals)}
        self._copies: list[list[Metric | MetricCollection]] = []
        self._logs: list[dict[str, int]] = []
        self._calls: list[_Call] = []
        self._objects: list[tuple[str, int]] = []
        self._later: list[tuple[str, int | None, Returned]] = []

    # ------------------------------------------------------------------ of a group

    def renew(self, num_clients: int) -> None:
        """Begin the work of a group, without values of another."""
        self._logs = [{} for _ in range(num_clients)]
        for copies in self._copies:
            _reset(copies)

    def computed(self) -> list[dict[str, float]]:
        """Value of every metric that a client logged, by name."""
        metrics = list[dict[str, float]]()
        for idx, logged in enumerate(self._logs):
            metrics.append({})
            if logged:
                meter = Meter()
                for name, place in logged.items():
                    meter.add(name, self._copies_of(idx)[place])
                metrics[idx] = meter.compute()
                self.directions |= meter.directions
        return metrics

    def _copies_of(self, idx: int) -> list[Metric | MetricCollection]:
        """A client's copies of all metrics; metrics that share a metric share its copy."""
        while len(self._copies) <= idx:
            copies = deepcopy(self._originals)
            _reset(copies)
            self._copies.append(copies)
        return self._copies[idx]

    @property
    def used(self) -> bool:
        """Whether the last step used a metric."""
        return bool(self._calls or self._objects)

    # ------------------------------------------------------------------ within a step

    @override
    def begin(self) -> None:
        super().begin()
        self._calls, self._objects, self._later = [], [], []

    @override
    def add(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:
        if isinstance(value, Metric):
            if (place := self._places.get(id(value))) is None:
                raise NotVectorizable(
                    f"a step logs {name!r}, a torchmetrics object that is not a submodule of the model"
                )
            self._objects.append((name, place))
        elif isinstance(value, Returned):
            self.check_mean(name, reduce_fx)
            self._later.append((name, batch_size, value))
        else:
            super().add(name, value, batch_size, reduce_fx)

    @override
    @contextmanager
    def recording(self) -> Iterator[None]:
        before = [dict(metric.__dict__) for metric in self._originals]
        try:
            for place, metric in enumerate(self._originals):
                own = UPDATES if isinstance(metric, Metric) else SHARE_STATES
                if not hasattr(metric, own):
                    raise NotVectorizable(f"a step's use of metrics is not seen: {lacks('torchmetrics', own)}")
                metric.__dict__.update({method: partial(self._record, place, method) for method in (*_RECORDED, own)})
                if isinstance(metric, Metric):
                    refusal = partial(_state_is_read, self._names[place])
                    metric.__dict__.update(dict.fromkeys([*metric.metric_state, own], _Unread(refusal)))
            yield
        finally:
            for metric, attributes in zip(self._originals, before, strict=True):
                metric.__dict__.update(attributes)
                for name in metric.__dict__.keys() - attributes.keys():
                    del metric.__dict__[name]

    def _record(self, place: int, method: str, *args: Any, **kwargs: Any) -> Any:
        metric, name = self._originals[place], self._names[place]
        if any(True for _ in metric.parameters()):
            raise NotVectorizable(f"the metric {name!r} holds weights, and a group's clients share them")
        if self._task_run.is_muted:
            return Returned(name, len(self._calls))
        leaves, spec = tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Differs | Count):
                leaf._refuse()
        self.taken += [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        number = len(self._calls)
        self._calls.append(_Call(place, method, spec, [_TENSOR if isinstance(v, Tensor) else v for v in leaves]))
        if method not in ("forward", "compute"):
            return None
        if isinstance(metric, MetricCollection):
            names = metric.keys()  # with the collection's prefix
            return {key: Returned(name, number, str(key)) for key in names}
        return Returned(name, number)

    # ------------------------------------------------------------------ after a step

    @override
    @torch.no_grad()
    def replay(self, taken: Sequence[Tensor], rows: Rows, counts: Tensor | None = None) -> list[Tensor]:
        if not self.used:  # and the host need not wait for its device
            return []
        sizes = None if counts is None else counts.tolist()
        columns = [list(tensor.unbind(0)) if sizes is None else _joined(tensor, sizes) for tensor in taken]
        held = list(range(len(self._logs))[rows]) if isinstance(rows, slice) else rows.tolist()
        drawn = torch.get_rng_state()
        values: list[list[Tensor]] = [[] for _ in self._later]
        for row, idx in enumerate(held):
            copies, tensors = self._copies_of(idx), iter([column[row] for column in columns])
            returned = []
            for place, method, spec, leaves in self._calls:
                args, kwargs = tree_unflatten([next(tensors) if v is _TENSOR else v for v in leaves], spec)
                returned.append(getattr(copies[place], method)(*args, **kwargs))
            for column, (name, _, later) in zip(values, self._later, strict=True):
                column.append(_number(name, returned[later.call], later.key))
            self._logs[idx].update(self._objects)
        if not drawn.equal(torch.get_rng_state()):
            raise NotVectorizable("a metric draws random numbers, which come from each client's own stream")
        self.logged = [*self.logged[: len(self.values)], *((name, size) for name, size, _ in self._later)]
        return [torch.stack(column) for column in values]


def _reset(metrics: Sequence[Metric | MetricCollection]) -> None:
    """Reset metrics as before a client that works alone."""
    for metric in metrics:
        if isinstance(metric, Metric):
            share(metric, False)
            if metric.update_called:
                metric.reset()


def _joined(samples: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Every client's argument, from the arguments (n, B, …) of a step that took samples one by one.

    Args:
        samples: Padded to B samples.
        counts: Of each client, without padding.

    Returns:
        The rows of all samples, or the mean of a number.
    """
    parts = [part[:count] for part, count in zip(samples, counts, strict=True)]
    return [part.flatten(0, 1) if part.ndim > 1 else part.double().mean().to(_floating(part)) for part in parts]


def _floating(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def _number(name: str, value: Any, key: str | None) -> Tensor:
    """The value of a call that the step logs."""
    if key is not None and key not in value:
        raise NotVectorizable(f"a step logs {name!r}, and its metric gives other names: {', '.join(map(str, value))}")
    value_of_key = value if key is None else value[key]
    if isinstance(value_of_key, Mapping) or (number := torch.as_tensor(value_of_key)).numel() != 1:
        raise NotVectorizable(f"a step logs {name!r}, and its metric gives several values")
    return number.detach().reshape(()).float()


def _state_is_read(name: str) -> NotVectorizable:
    return NotVectorizable(f"a step reads the state of the metric {name!r}, which a group has only after the step")
