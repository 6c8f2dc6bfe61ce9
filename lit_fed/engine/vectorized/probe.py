"""Whether clients of a federation can be trained in groups.

Known obstacles are refused by name. Training two clients both ways before the run finds silent ones (an optimizer that
mixes clients, a loss that is not a mean).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fed.engine.clients.executor import failure
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Answer, Session
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.method.client import Client, LocalWork
from lit_fed.engine.vectorized.finish import GroupFinish
from lit_fed.engine.vectorized.objective import NotVectorizable
from lit_fed.engine.vectorized.training import GroupLoop
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.errors import NonFiniteUpdate

_HOOKS = (
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
"""Hooks that need a single client."""

_PROBE_STEPS = 6
_CLOSE, _ROUNDING = 1e-3, 1e-5
_COARSE = 0.1  # of half precision, which rounds differently in other kernels
_CAUSES = (
    "something mixes clients or samples; or rounding grows in a deep network, which trainer.precision=64-true would "
    "show; or the optimizer amplifies rounding, as Adam does for a bias of attention's keys (none with timm's "
    "qkv_bias: false)"
)


class _Alone(NamedTuple):
    """A client trained alone.

    Args:
        model: All tensors of its model.
        answer: Tensors that it sends and keeps.
        metrics: Logged means.
    """

    model: dict[str, Tensor]
    answer: dict[str, Tensor]
    metrics: dict[str, float]


def refuse(loop: LocalLoop) -> None:
    """Refuse a task with a known obstacle to groups.

    Raises:
        NotVectorizable: Naming the obstacle.
    """
    name = task_name(loop.objective)
    if not loop.objective.automatic_optimization:
        raise NotVectorizable(f"model {name} optimises by hand")
    if loop.workers.data_parallel:
        raise NotVectorizable("strategy=ddp divides each client's batches over processes")
    if loop.channels_last:
        raise NotVectorizable("trainer.channels_last lays out one client's images")
    if loop.is_mixed:
        raise NotVectorizable(
            f"autocast of precision {loop.fabric.strategy.precision.precision} does not see all operations of a group, "
            "some of which would run in another precision than alone; bf16-true trains in groups"
        )
    for hook in _HOOKS:
        if loop.listeners(hook):
            raise NotVectorizable(f"model {name} or a callback has {hook}, which needs a single client")


def probe(session: Session, kind: str, broadcast: Broadcast, group: GroupLoop, finish: GroupFinish) -> None:
    """Compare two clients of a kind trained and asked one after the other with the same clients as a group.

    States, generators and the model stay unchanged.

    Args:
        session: Admits them.
        kind: The kind of network.
        broadcast: As they will receive.
        group: Its `pad_to` is set where smaller batches may be padded, because the objective is a mean over samples.
        finish: Its `together` is set where all clients can be asked at once.

    Raises:
        NotVectorizable: If the two ways differ, or the group fails.
        ClientFailure: If a client's result alone is not finite, so that nothing can be compared.
    """
    loop = session.loops[kind]
    ids = _two_clients(session, kind)
    cuda = [loop.fabric.device] if loop.fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), loop.model.lent(), _all_bits():
        alone = {client_id: _train_alone(session, client_id, broadcast) for client_id in ids}
        group.pad_to = _largest_smaller_batch(session)
        if group.pad_to and not _misfit(session, group, finish, ids, broadcast, alone):
            return
        group.pad_to = 0
        if misfit := _misfit(session, group, finish, ids, broadcast, alone):
            raise NotVectorizable(misfit)


@contextmanager
def _all_bits() -> Iterator[None]:
    """Float32 without TF32, whose coarse rounding on GPUs differs between a group's products and a client's."""
    backends: Any = torch.backends  # whose settings have no types
    kinds = (backends.cudnn.conv, backends.cuda.matmul)
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def _largest_smaller_batch(session: Session) -> int:
    """Samples of the population's largest batch that is smaller than a full one; 0 where there is none.

    Of a private run the largest that there can be: no client's data may change how another's batches are padded.
    """
    data, found = session.data, 0
    if session.wrappers.private and not data.drop_last:
        return data.batch_size - 1
    for client_id in data.clients:
        num_samples = data.num_samples(client_id)
        rest = 0 if data.drop_last else num_samples % data.batch_size
        found = max(found, num_samples if num_samples < data.batch_size else rest)
    return found


def _two_clients(session: Session, kind: str) -> list[int]:
    """Two small clients, of different sizes where possible, the larger first; fewer in a smaller population."""
    sizes: dict[int, list[int]] = {}
    for client_id in session.data.clients:
        if session.kinds[client_id] == kind and (size := session.data.num_samples(client_id)):
            sizes.setdefault(size, []).append(client_id)
    smallest = sorted(sizes)[:2]
    return sizes[smallest[0]][:2] if len(smallest) == 1 else [sizes[size][0] for size in reversed(smallest)]


def _admit(session: Session, client_id: int, broadcast: Broadcast) -> Client:
    client = session.admit(client_id, broadcast, "train")
    loader: Any = client.train_loader()
    epochs, steps = client.work.epochs, client.work.steps
    if len(loader) * (epochs or 1) > _PROBE_STEPS or (steps or 0) > _PROBE_STEPS:
        client.work = LocalWork(None, _PROBE_STEPS)
    return client


def _train_alone(session: Session, client_id: int, broadcast: Broadcast) -> _Alone:
    client = _admit(session, client_id, broadcast)
    session.become(client)
    metrics = session.train(client).compute()
    answer = session.answer(client)
    try:
        session.check_finite(client, metrics, answer)
    except NonFiniteUpdate as error:
        raise failure(client_id, broadcast.round_idx, error) from error
    return _Alone(client.model.copy(), {name: tensor.clone() for name, tensor in _tensors(answer).items()}, metrics)


def _tensors(answer: Answer) -> dict[str, Tensor]:
    return {**answer.kept, **answer.payload}


def _misfit(
    session: Session,
    group: GroupLoop,
    finish: GroupFinish,
    ids: Sequence[int],
    broadcast: Broadcast,
    alone: Mapping[int, _Alone],
) -> str:
    """The first difference between the two ways; empty where there is none."""
    clients = [_admit(session, client_id, broadcast) for client_id in ids]
    try:
        trained = group.train(clients)
    except NotVectorizable as error:
        return str(error)
    except Exception as error:  # of any kind, from a task that trains alone
        if "randomness" in str(error):
            return "training draws random numbers (dropout, say), which come from each client's own stream"
        return " ".join(str(error).split())[:300]
    close = _COARSE if _is_coarse(group.loop) else _CLOSE
    answers = finish.of_all(clients, trained.tensors)
    for idx, (client, logged) in enumerate(zip(clients, trained.metrics, strict=True)):
        expected = alone[client.id]
        for name, tensor in client.model.tensors(trained.tensors).items():
            if not _is_close(tensor, expected.model[name], client.begun.get(name), close):
                return f"{name!r} differs after training in a group and alone: {_CAUSES}"
        for name, value in expected.metrics.items():
            if not abs(value - logged.get(name, math.nan)) <= close * (1 + abs(value)):
                return f"the logged {name!r} differs between a client in a group and alone"
        found = _tensors(session.answer(client))
        if answers is not None and not _same(found, _tensors(answers[idx])):
            finish.together = False
        for name, tensor in found.items():
            if name not in expected.answer or not _is_close(
                tensor, expected.answer[name], client.begun.get(name), close
            ):
                return (
                    f"algorithm.finish gives a different {name!r} for a client in a group than alone, though its model "
                    "is the same after training; it must depend on the client only"
                )
    return ""


def _is_close(found: Tensor, expected: Tensor, begun: Tensor | None, close: float) -> bool:
    """Whether two results differ by rounding only, relative to the client's movement."""
    if found.shape != expected.shape:
        return False
    infinite = expected.isinf() & (found == expected)  # a method's state may start so
    found, expected = found.double().masked_fill(infinite, 0), expected.double().masked_fill(infinite, 0)
    moved = expected if begun is None else expected - begun.double().masked_fill(infinite, 0)
    return bool((found - expected).norm() <= close * moved.norm() + _ROUNDING * expected.norm())


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.equal(other[name]) for name, tensor in one.items()
    )


def _is_coarse(loop: LocalLoop) -> bool:
    return str(loop.fabric.strategy.precision.precision) not in ("32-true", "64-true")
