"""Whether clients of a federation can be trained in groups.

Known obstacles are refused by name. Training four clients both ways before the run finds silent ones (an optimizer that
mixes clients).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.engine.clients.executor import failure
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.method.algorithm import NEEDS
from lit_fed.engine.method.client import Client
from lit_fed.engine.vectorized.alone import Result, aside, difference, tensors_of, train_alone
from lit_fed.engine.vectorized.objective import NotVectorizable
from lit_fed.engine.vectorized.training import OF_ALL, GroupFinish, GroupLoop, answer_at
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.errors import ClientFailure
from lit_fed.seeding import derive_seed

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

_PROBED = 4  # clients: the largest, the smallest, and drawn ones
_PROBE_STEPS = 6


def refuse(loop: LocalLoop) -> None:
    """Refuse a task with a known obstacle to groups.

    Raises:
        NotVectorizable: Naming the obstacle.
    """
    name = task_name(loop.objective)
    if not loop.objective.automatic_optimization:
        raise NotVectorizable(f"model {name} optimises by hand")
    if "one_client" in loop.algorithm.all_needs:
        raise NotVectorizable(f"algorithm {type(loop.algorithm).__name__} needs {NEEDS['one_client']}")
    if loop.workers.data_parallel:
        raise NotVectorizable("strategy=ddp divides each client's batches over processes")
    if loop.gradients.client_optimizer == "kept":
        raise NotVectorizable("trainer.client_optimizer=kept continues each client's own optimizer")
    if loop.replays is not None:
        raise NotVectorizable("trainer.privacy takes the gradient of every sample, of one client at a time")
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
    """Compare clients of a kind trained and asked one after the other with the same clients as a group.

    The clients are the largest, the smallest and two drawn ones, each with full batches and the smaller last one. A
    client that fails alone shows nothing, and another takes its place. States, generators and the model stay unchanged.

    Args:
        session: Admits them.
        kind: The kind of network.
        broadcast: As they will receive.
        group: Its `pad_to` is set where smaller batches may be padded, because the objective is a mean over samples.
        finish: Its `together` is set where all clients can be asked at once.

    Raises:
        NotVectorizable: If the two ways differ, or the group fails.
        ClientFailure: If every one of these clients fails alone, so that nothing can be compared.
    """
    loop, alone, failed = session.loops[kind], dict[int, Result](), list[ClientFailure]()
    with aside(loop) as outside, _all_bits():
        for client_id in _drawn(session, kind):
            try:
                alone[client_id] = train_alone(session, _admit(session, client_id, broadcast))
            except (Exception, SystemExit) as error:  # of any kind; the round names it, if the client takes part
                failed.append(failure(client_id, broadcast.round_idx, error))
            if len(alone) == _PROBED:
                break
        if failed and not alone:
            raise failed[0]
        if (drawn := outside.drawn()) is not None:
            raise NotVectorizable(f"training draws from {drawn}{OF_ALL}")
        ids = sorted(alone, key=lambda one: (-session.data.census.num_samples(one), one))
        group.pad_to = _largest_smaller_batch(session)
        if misfit := _misfit(session, group, finish, ids, broadcast, alone):
            raise NotVectorizable(misfit)
        if group.unproven:
            group.pad_to = 0


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
    for client_id in data.census.clients:
        num_samples = data.census.num_samples(client_id)
        rest = 0 if data.drop_last else num_samples % data.batch_size
        found = max(found, num_samples if num_samples < data.batch_size else rest)
    return found


def _drawn(session: Session, kind: str) -> list[int]:
    """The largest client of a kind, the smallest, and drawn ones, of which the last replace others; all with data."""
    num_samples = session.data.census.num_samples
    found = [one for one in session.data.census.clients if session.kinds[one] == kind and num_samples(one)]
    if not found:
        return []
    first = list(dict.fromkeys([max(found, key=num_samples), min(found, key=num_samples)]))
    others = [one for one in found if one not in first]
    drawn = random.Random(derive_seed(session.seed, "probe", kind)).sample(others, min(len(others), 2 * _PROBED))
    return [*first, *drawn]


def _admit(session: Session, client_id: int, broadcast: Broadcast) -> Client:
    """A client whose training is cut to a few steps, with its smaller last batch among them."""
    client = session.admit(client_id, broadcast, "train")
    loader: Any = client.train_loader()
    each, epochs, steps = len(loader), client.work.epochs, client.work.steps
    if each * (epochs or 1) > _PROBE_STEPS or (steps or 0) > _PROBE_STEPS:
        client.work = replace(client.work, epochs=None, steps=_PROBE_STEPS)
        if each > _PROBE_STEPS and (epochs or (steps or 0) / each) >= 1:
            before = client.wrap_loader
            client.wrap_loader = lambda loader, one: _shortened(before(loader, one) if before else loader)
    return client


def _shortened(loader: Any) -> Any:
    return loader.shortened(_PROBE_STEPS) if type(loader) is TensorLoader else loader


def _misfit(
    session: Session,
    group: GroupLoop,
    finish: GroupFinish,
    ids: Sequence[int],
    broadcast: Broadcast,
    alone: Mapping[int, Result],
) -> str:
    """The first difference between the two ways; empty where there is none."""
    clients = [_admit(session, client_id, broadcast) for client_id in ids]
    if not clients:
        return ""
    try:
        trained = group.train(clients)
    except NotVectorizable as error:
        return str(error)
    except Exception as error:  # of any kind, from a task that trains alone
        if "randomness" in str(error):
            return "training draws random numbers (dropout, say), which come from each client's own stream"
        return " ".join(str(error).split())[:300]
    answers = finish.of_all(clients, trained.tensors)
    for idx, (client, logged) in enumerate(zip(clients, trained.metrics, strict=True)):
        answer = tensors_of(session.answer(client))
        together = None if answers is None else answer_at(answers, idx)
        if together is not None and not _same(answer, tensors_of(together)):
            finish.together = False
        result = Result(client.model.tensors(trained.tensors), answer, logged)
        if misfit := difference(group.loop, client.begun, result, alone[client.id]):
            return misfit
    group.computations.trust(range(len(ids)))
    return ""


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the same names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.equal(other[name]) for name, tensor in one.items()
    )
