"""Whether clients of a federation can be trained in groups.

What is known to be impossible is refused by name; whatever else could go wrong without a word (an optimizer that mixes
clients, a loss that is no mean) is found by training two clients both ways before the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lit_fed.engine.clients.executor import failure
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
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
"""Hooks that see one client at a time."""

_PROBE_STEPS = 6
_CLOSE, _ROUNDING = 1e-3, 1e-5
_COARSE = 0.1  # of mixed precision, which rounds otherwise in other kernels
_WHY_OTHERWISE = (
    "something mixes clients or samples; rounding grows in a deep network, which trainer.precision=64-true would tell;"
    " or the optimizer makes a step of what is rounding alone in a gradient, as Adam does for a bias of attention's"
    " keys (with timm's qkv_bias: false there is none)"
)


def refuse(loop: LocalLoop) -> None:
    """Say what keeps a task from being run for a group, as far as one can see.

    Raises:
        NotVectorizable: It names it.
    """
    name = task_name(loop.objective)
    if not loop.objective.automatic_optimization:
        raise NotVectorizable(f"model {name} optimises by hand")
    if loop.workers.data_parallel:
        raise NotVectorizable("strategy=ddp divides each client's batches over processes")
    if loop.channels_last:
        raise NotVectorizable("trainer.channels_last lays out one client's images")
    if loop.scaler is not None:
        raise NotVectorizable("precision 16-mixed scales each client's gradients by a number of its own")
    for hook in _HOOKS:
        if loop.listeners(hook):
            raise NotVectorizable(f"model {name} or a callback has {hook}, which sees one client at a time")


def probe(session: Session, kind: str, broadcast: Broadcast, group: GroupLoop, finish: GroupFinish) -> None:
    """Train two clients of a kind one after the other and as a group, and ask for their answers so.

    Nothing else of it stays: no state is kept, the generators and the model are as before.

    Args:
        session: Admits them.
        kind: The kind.
        broadcast: Such as they will receive.
        group: Learns to how many samples it may pad smaller batches, because the objective is a mean over samples.
        finish: Learns whether all can be asked together.

    Raises:
        NotVectorizable: If the two ways differ, or one fails.
        ClientFailure: If what a client makes alone is not finite, by which nothing can be compared.
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
    """Float32 without TF32, by which GPUs round a group's products otherwise than a client's, too coarsely to tell."""
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
    """The samples of the largest batch in the population that is smaller than the others; 0 where there is none."""
    data, found = session.data, 0
    for client_id in data.clients:
        num_samples = data.num_samples(client_id)
        rest = 0 if data.drop_last else num_samples % data.batch_size
        found = max(found, num_samples if num_samples < data.batch_size else rest)
    return found


def _two_clients(session: Session, kind: str) -> list[int]:
    """Two small clients, of different sizes where there are such, the larger one first; fewer where there are."""
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


def _train_alone(session: Session, client_id: int, broadcast: Broadcast) -> tuple[dict[str, Tensor], dict[str, float]]:
    client = _admit(session, client_id, broadcast)
    session.loop(client).state.client = client
    client.model.renew()
    client.model.load(client.begun)
    metrics = session.train(client).compute()
    made = session.algorithm.finish(client)
    kept = session.kept(client, made.state)
    try:
        session.check_finite(client, metrics, made.payload, kept)
    except NonFiniteUpdate as error:
        raise failure(client_id, broadcast.round_idx, error) from error
    return {name: tensor.clone() for name, tensor in {**kept, **made.payload}.items()}, metrics


def _outcome(session: Session, client: Client) -> dict[str, Tensor]:
    """What a client sends and keeps."""
    made = session.algorithm.finish(client)
    return {**session.kept(client, made.state), **made.payload}


def _misfit(
    session: Session,
    group: GroupLoop,
    finish: GroupFinish,
    ids: Sequence[int],
    broadcast: Broadcast,
    alone: Mapping[int, tuple[dict[str, Tensor], dict[str, float]]],
) -> str:
    """What differs between the two ways; empty where nothing does."""
    clients = [_admit(session, client_id, broadcast) for client_id in ids]
    try:
        trained = group.train(clients)
    except NotVectorizable as error:
        return str(error)
    except Exception as error:  # whatever a task that trains alone cannot do as a group
        if "randomness" in str(error):
            return "training draws random numbers (dropout, say), which are a stream of each client's own"
        return " ".join(str(error).split())[:300]
    close = _COARSE if _is_coarse(group.loop) else _CLOSE
    answers = finish.of_all(clients, trained.tensors)
    for idx, (client, logged) in enumerate(zip(clients, trained.metrics, strict=True)):
        (expected, metrics), outcome = alone[client.id], _outcome(session, client)
        if answers is not None and not _same(outcome, {**answers[idx].kept, **answers[idx].payload}):
            finish.together = False
        for name, tensor in outcome.items():
            if not _is_close(tensor, expected[name], client.begun.get(name), close):
                return f"{name!r} comes out otherwise in a group than alone: {_WHY_OTHERWISE}"
        for name, value in metrics.items():
            if not abs(value - logged.get(name, math.nan)) <= close * (1 + abs(value)):
                return f"{name!r} is logged otherwise for a client of a group than alone"
    return ""


def _is_close(found: Tensor, expected: Tensor, begun: Tensor | None, close: float) -> bool:
    """Whether two results differ by rounding, measured by how far the client moved."""
    if found.shape != expected.shape:
        return False
    infinite = expected.isinf() & (found == expected)  # as a method may begin what it keeps
    found, expected = found.double().masked_fill(infinite, 0), expected.double().masked_fill(infinite, 0)
    moved = expected if begun is None else expected - begun.double().masked_fill(infinite, 0)
    return bool((found - expected).norm() <= close * moved.norm() + _ROUNDING * expected.norm())


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.equal(other[name]) for name, tensor in one.items()
    )


def _is_coarse(loop: LocalLoop) -> bool:
    return str(loop.fabric.strategy.precision.precision) not in ("32-true", "64-true")
