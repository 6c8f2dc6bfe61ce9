"""A client trained alone beside its group, without a trace: the measure of the group's result."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Answer, Session
from lit_fed.engine.method.client import Client, Tensors
from lit_fed.engine.wire.payload import Broadcast

_CLOSE, _ROUNDING = 1e-3, 1e-5
_GROWTH = 32  # a group rounds in every step, a twin in the first only
_COARSE = 0.1  # of half precision, which rounds differently in other kernels
_PLAIN = (bool, int, float, str, type(None))
_CAUSES = (
    "something mixes clients or samples; or rounding grows in a deep network, which trainer.precision=64-true would "
    "show; or the optimizer amplifies rounding, as Adam does for a bias of attention's keys (none with timm's "
    "qkv_bias: false)"
)


class Result(NamedTuple):
    """Result of a client's training.

    Args:
        model: All tensors of its model.
        answer: Tensors that it sends and keeps.
        metrics: Logged means.
    """

    model: Mapping[str, Tensor]
    answer: Mapping[str, Tensor]
    metrics: Mapping[str, float]


class Outside:
    """State that training may change beside tensors: Python's and NumPy's generators, and plain values of the task.

    Args:
        task: Its modules may hold generators and values as attributes.
    """

    def __init__(self, task: nn.Module) -> None:
        modules = [module for module in task.modules() if not isinstance(module, Metric)]
        self._generators = {name: (read, write, pickle.dumps(read())) for name, read, write in _generators(modules)}
        self._values = [(m, {key: v for key, v in vars(m).items() if type(v) in _PLAIN}) for m in modules]

    def drawn(self) -> str | None:
        """Name of a generator that has been drawn from since; None for none."""
        return next(
            (name for name, (read, _, state) in self._generators.items() if pickle.dumps(read()) != state), None
        )

    def restore(self) -> None:
        """Restore generators and values."""
        for _, write, state in self._generators.values():
            write(pickle.loads(state))  # noqa: S301  # of this process
        for module, values in self._values:
            vars(module).update(values)


def _generators(modules: list[nn.Module]) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Name, reader and writer of the state of every generator in reach."""
    yield "Python's generator (random)", random.getstate, random.setstate
    yield "NumPy's generator (numpy.random)", np.random.get_state, np.random.set_state
    for module in modules:
        for key, value in vars(module).items():
            if isinstance(value, random.Random):
                yield f"self.{key}", value.getstate, value.setstate
            elif isinstance(value, np.random.RandomState):
                yield f"self.{key}", value.get_state, value.set_state
            elif isinstance(value, np.random.Generator):
                bit_generator = value.bit_generator
                yield f"self.{key}", partial(getattr, bit_generator, "state"), partial(setattr, bit_generator, "state")


@contextmanager
def aside(loop: LocalLoop) -> Iterator[Outside]:
    """Restore tensors, modes, generators and plain values of the task on leaving."""
    outside, device = Outside(loop.model.task), loop.fabric.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), loop.model.lent():
        try:
            yield outside
        finally:
            outside.restore()


def train_alone(session: Session, client: Client) -> Result:
    """Train an admitted client as one that works alone; for use within `aside`.

    Raises:
        NonFiniteUpdate: If its result is not finite.
    """
    session.become(client)
    metrics = session.train(client).compute()
    answer = session.answer(client)
    session.check_finite(client, metrics, answer)
    sent = {name: tensor.clone() for name, tensor in tensors_of(answer).items()}
    return Result(client.model.copy(), sent, metrics)


def differs_alone(session: Session, client_id: int, broadcast: Broadcast, grouped: Result) -> str:
    """The first difference between a client's result in a group and alone; empty for one that is rounding.

    Where rounding grows in the client's training, so does a difference of its first weights by rounding: a difference
    of that size is rounding.
    """
    loop = session.loops[session.kinds[client_id]]
    with aside(loop):
        client = session.admit(client_id, broadcast, "train")
        begun, expected = client.begun, train_alone(session, client)
        misfit = difference(loop, begun, grouped, expected)
        if misfit:
            twin = session.admit(client_id, broadcast, "train")
            twin.begun = {name: _rounded(tensor) for name, tensor in begun.items()}
            other = train_alone(session, twin)
            if not difference(loop, begun, grouped, expected, other):
                return ""
    return misfit


def _rounded(tensor: Tensor) -> Tensor:
    """A tensor whose values are off by their last bit or two."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint_like(tensor, 0, 2).mul_(2).sub_(1)
    return tensor + tensor * signs * torch.finfo(tensor.dtype).eps


def tensors_of(answer: Answer) -> Tensors:
    """Tensors that a client sends and keeps."""
    return {**answer.local_state, **answer.payload}


def difference(
    loop: LocalLoop, begun: Mapping[str, Tensor], grouped: Result, expected: Result, twin: Result | None = None
) -> str:
    """The first difference between a client's result in a group and alone that is not rounding; empty without one.

    Args:
        loop: The client's.
        begun: Tensors from which it began.
        grouped: Its result in a group.
        expected: Its result alone.
        twin: The result alone from tensors that are rounded differently, whose distance is rounding too.
    """
    close, names = closeness(loop), list(loop.model.parameters)
    kin = _kin_movements(expected.model, begun, names)
    for name, tensor in grouped.model.items():
        if not _is_close(tensor, expected.model[name], begun.get(name), close, kin[name], twin and twin.model[name]):
            return f"{name!r} differs after training in a group and alone: {_CAUSES}"
    for name, value in expected.metrics.items():
        off = 0.0 if twin is None else _GROWTH * abs(value - twin.metrics[name])
        if not abs(value - grouped.metrics.get(name, math.nan)) <= close * (1 + abs(value)) + off:
            return f"the logged {name!r} differs between a client in a group and alone"
    kin = _kin_movements(expected.answer, begun, names)
    for name, tensor in grouped.answer.items():
        other, first = twin and twin.answer[name], begun.get(name)
        if name not in kin or not _is_close(tensor, expected.answer[name], first, close, kin[name], other):
            return (
                f"algorithm.finish gives a different {name!r} for a client in a group than alone, though its model "
                "is the same after training; it must depend on the client only"
            )
    return ""


def _kin_movements(tensors: Mapping[str, Tensor], begun: Mapping[str, Tensor], names: list[str]) -> dict[str, float]:
    """The movement of every tensor's kin, the tensors of all parameters under one prefix.

    A gradient that is 0 but for rounding, as of a bias before batch norm, is rounded as coarsely as the others are.
    """
    prefix, squares = dict[str, str](), dict[str, float]()
    for name, tensor in tensors.items():
        own = max((one for one in names if name.endswith(one)), key=len, default=name)
        prefix[name] = name.removesuffix(own) if own in names else name
        moved = tensor.double() - begun[name].double() if name in begun else tensor.double()
        size = float(moved[moved.isfinite()].square().sum())
        squares[prefix[name]] = squares.get(prefix[name], 0.0) + size
    return {name: math.sqrt(squares[of]) for name, of in prefix.items()}


def _is_close(
    grouped: Tensor, expected: Tensor, begun: Tensor | None, close: float, kin: float, twin: Tensor | None = None
) -> bool:
    """Whether two results differ by rounding only, relative to the client's movement, or to its twin's distance."""
    if grouped.shape != expected.shape:
        return False
    infinite = expected.isinf() & (grouped == expected)  # a method's state may start so
    grouped, expected = grouped.double().masked_fill(infinite, 0), expected.double().masked_fill(infinite, 0)
    moved = expected if begun is None else expected - begun.double().masked_fill(infinite, 0)
    off = 0 if twin is None else _GROWTH * (twin.double().masked_fill(infinite, 0) - expected).norm()
    return bool((grouped - expected).norm() <= close * moved.norm() + _ROUNDING * (expected.norm() + kin) + off)


def closeness(loop: LocalLoop) -> float:
    """The largest relative difference that is rounding; on a GPU, TF32 rounds as coarsely as half precision."""
    is_fine = str(loop.fabric.strategy.precision.precision) in ("32-true", "64-true")
    if loop.fabric.device.type == "cuda":
        backends: Any = torch.backends  # whose settings have no types
        is_fine &= all(backend.fp32_precision == "ieee" for backend in (backends.cudnn.conv, backends.cuda.matmul))
    return _CLOSE if is_fine else _COARSE
