"""A trial: one step of a task on the smallest batch of any client, and its schedules up to the last step.

A task that cannot train is refused in one line before the run's folder is created. Tensors, modes and generators are
restored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.lightning.objective import task_name
from lit_fed.engine.lightning.optimization import Schedule, has_own_scheduler_step, same_for_all
from lit_fed.engine.method.client import LocalWork, Phase
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.wire.batches import batch_size_of, first_samples
from lit_fed.errors import ConfigError, own_traceback, reason
from lit_fed.machine import free_memory
from lit_fed.private_names import tree_leaves

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

_BEFORE = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
_COPIES = 4  # of the parameters at least: current, initial, the server's, and a client's gradients or update
_NOISE = 1e-9  # a smaller relative change of a rate is rounding
_MOST_ROUNDS = 10_000  # a schedule that fails later has failed before


class Extremes(NamedTuple):
    """The extreme batches of a population.

    Args:
        client_id: Client with the smallest batch.
        smallest: Samples of this batch.
        busiest: Client with the most batches in a round.
    """

    client_id: int
    smallest: int
    busiest: int


def extremes(data: FederatedDataModule, kinds: Kinds, kind: str, work: LocalWork) -> Extremes | None:
    """Extremes of the clients with a kind of network; None where they have no samples."""
    own = [client_id for client_id in data.census.clients if kinds[client_id] == kind]
    sizes = np.array([data.census.num_samples(client_id) for client_id in own], dtype=np.int64)
    if not sizes.any():
        return None
    full = data.batch_size
    batches, left = sizes // full, sizes % full
    last = np.where(left == 0, np.minimum(sizes, full), left)
    if data.drop_last:
        last = np.where(sizes > full, full, last)
    else:
        batches = batches + (left > 0)
    each = np.array([work.batches_of(count) for count in batches.tolist()])
    taken = np.ceil(each * work.epochs) if work.epochs is not None else np.full(len(sizes), work.steps)
    # else the last batch is left out
    smallest = np.where(np.minimum(taken, each) >= batches, last, np.minimum(sizes, full))
    smallest[sizes == 0] = np.iinfo(np.int64).max
    least = int(smallest.argmin())
    return Extremes(own[least], int(smallest[least]), own[int(sizes.argmax())])


def try_out(loop: LocalLoop, data: FederatedDataModule, extremes: Extremes, work: LocalWork, max_rounds: int) -> None:
    """Take one training step on the smallest batch, and step the schedules through all rounds.

    Only a task whose ``training_step`` and ``configure_optimizers`` are declared free of side effects by `same_for_all`
    is tried; of other tasks only the size is checked. Where hooks prepare a task for a batch, only its schedules are
    tried, because hooks are called for clients only.

    Args:
        loop: The task's, at work.
        data: The population.
        extremes: Its extremes.
        work: Length of a client's training.
        max_rounds: Rounds in all.
    """
    task = loop.model.task
    _check_memory(loop)
    if not (same_for_all(task.training_step) and same_for_all(task.configure_optimizers)):
        return
    if task.automatic_optimization and not any(overrides(task, hook) for hook in _BEFORE):
        batch = next(loop.batches(_loader(data, extremes.client_id, work)), None)
        if batch is not None:
            size = min(extremes.smallest, batch_size_of(batch))
            _take_step(loop, first_samples(batch, size), size, extremes.client_id)
    loop.expect(Phase("train", _loader(data, extremes.busiest, work), work.epochs, work.steps))
    _run_schedules(loop, max_rounds)


def try_test(loop: LocalLoop, data: FederatedDataModule, client_id: int) -> None:
    """Refuse test data that the task cannot take and that differ from a client's training data in shape or dtype.

    Only then the task evaluates a batch before the run: its own code may have side effects.
    """
    trained, tested = _form(data.first_sample("train", client_id)), _form(data.first_sample("test", client_id))
    if trained == tested or not tested:
        return
    with loop.state.client.rehearsed(), loop.model.lent():
        try:
            loop.evaluate([*islice(data.test_loader(), 1)] or [*islice(data.test_loader(client_id), 1)], "test")
        except Exception as error:  # any error of a network on a batch
            raise ConfigError(
                f"model {task_name(loop.objective)} cannot be tested: a test sample is {tested}, and a training sample "
                f"of client {client_id} is {trained}: {reason(error)}",
                own_traceback(error),
            ) from error


def _form(sample: Any) -> str:
    """Dtypes and shapes of a sample's tensors."""
    tensors = (leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor))
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape[1:])}" for one in tensors)


def schedule_line(loop: LocalLoop, data: FederatedDataModule, extremes: Extremes, work: LocalWork) -> str:
    """A line on a schedule by steps: its number of steps, and whether its learning rate rises to the last step.

    Args:
        loop: The task's, at work.
        data: The population.
        extremes: Its extremes.
        work: Length of a client's training.

    Returns:
        The line; empty without such a schedule, and for one that spans the run and turns.
    """
    loop.expect(Phase("train", _loader(data, extremes.busiest, work), work.epochs, work.steps))
    optimizers, _, by_step = loop.optimizers.make()
    if not by_step or not loop.objective.automatic_optimization:
        return ""
    steps, name = loop.trainer.estimated_stepping_batches, task_name(loop.objective)
    rises = "its learning rate still rises at the last step: the warm-up never ends"
    only_rises = _only_rises(loop, optimizers, by_step)
    if loop.trainer.spans_run:
        line = f"model {name}: its schedule by steps has at most {steps} steps in the run, and {rises}"
        return line if only_rises else ""
    return (
        f"model {name}: a client takes at most {steps} steps in a round, and its schedule by steps starts anew for "
        f"each client and round{f'; {rises}' if only_rises else ''}; trainer.schedule_steps=run lays it out over all "
        "rounds"
    )


def length_line(loop: LocalLoop) -> str:
    """A line on a schedule by rounds whose length is not the run's; empty without one.

    A schedule that ends before the run counts where its rate then turns (``T_max``), and not a warm-up.
    """
    from lit_fed.parsing import ROUNDS  # takes a second to import

    rounds = loop.trainer.max_epochs
    for entry in loop.optimizers.make()[1] if loop.objective.automatic_optimization else ():
        name = next((name for name in ROUNDS if isinstance(getattr(entry.scheduler, name, None), int)), "")
        length = getattr(entry.scheduler, name) * entry.frequency if name else rounds
        if length > rounds or (name == "T_max" and length < rounds - 1):  # the last of n rounds has step n − 1
            kind = type(entry.scheduler).__name__
            return (
                f"model {task_name(loop.objective)}: its schedule {kind} is made for {length} rounds, and the run has "
                f"{rounds}; {name}: null in a configuration stands for all rounds"
            )
    return ""


def _only_rises(loop: LocalLoop, optimizers: Sequence[Optimizer], by_step: Sequence[Schedule]) -> bool:
    """Whether no learning rate ever falls over a client's steps, and one is about to rise once more after them.

    A task's own ``lr_scheduler_step``, which may have side effects, is not tried, and very many steps are not either.
    """
    steps = loop.trainer.estimated_stepping_batches
    if has_own_scheduler_step(loop.model.task) or not 0 < steps <= _MOST_ROUNDS:
        return False
    rates = [_rates(optimizers)]
    try:
        for step in range(1, steps + 1):
            for entry in by_step:
                if step % entry.frequency == 0:
                    loop.optimizers.advance(entry)
            rates.append(_rates(optimizers))
    except Exception:  # a schedule may raise after its last step; it is then not a warm-up
        return False
    changes = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(rates)]
    return all(change >= 0 for each in changes for change in each) and max(changes[-1]) > _NOISE * max(rates[-1])


def _loader(data: FederatedDataModule, client_id: int, work: LocalWork) -> Iterable[Any]:
    return work.limited(data.train_loader(client_id, torch.Generator().manual_seed(0)))


def _check_memory(loop: LocalLoop) -> None:
    needed = _COPIES * sum(tensor.numel() * tensor.element_size() for tensor in loop.model.tensors().values())
    free = free_memory() if loop.fabric.device.type == "cpu" else None
    if free is not None and needed > free:
        raise ConfigError(
            f"model {task_name(loop.objective)} needs about {needed / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free; use a smaller model"
        )


def _take_step(loop: LocalLoop, batch: Any, size: int, client_id: int) -> None:
    model, objective, client = loop.model, loop.objective, loop.state.client
    name, optimizer = task_name(objective), "its optimizer"
    with client.rehearsed(), client.muted(), model.lent():
        objective.train()
        try:
            with loop.autocast():
                loss = client.run(batch).loss
            gradients = {} if loss is None else client.gradients(loss)
        except ConfigError:
            raise
        except Exception as error:  # any error of a network on a batch
            samples = "one sample" if size == 1 else f"{size} samples"
            raise ConfigError(
                f"model {name} cannot train on a batch of {samples}, such as client {client_id}'s: {reason(error)}"
                + ("; choose data.batch_size or data.drop_last so that no batch has one sample" if size == 1 else ""),
                own_traceback(error),
            ) from error
        finally:
            client.forget()
        if loss is None or overrides(model.task, "optimizer_step") or overrides(model.task, "backward"):
            return
        try:
            for made in loop.optimizers.build("trial", 0)[0]:
                optimizer = type(made).__name__
                for key, gradient in gradients.items():
                    model.parameters[key].grad = gradient
                made.step()
        except Exception as error:  # any error of an optimizer
            line = f"model {name} cannot be trained by {optimizer}: {reason(error)}"
            raise ConfigError(line, own_traceback(error)) from error


def _run_schedules(loop: LocalLoop, max_rounds: int) -> None:
    """Step the schedules through a run's rounds and the longest work of a client."""
    if not loop.objective.automatic_optimization:
        return
    optimizers, by_round, by_step = loop.optimizers.make()
    first, name = _rates(optimizers), task_name(loop.objective)
    steps = loop.trainer.estimated_stepping_batches
    # A schedule also steps after a client's last batch, to an unused rate.
    for entries, count, used, what in (
        (by_round, max_rounds - 1, max_rounds, "round"),
        (by_step, steps, steps, "step"),
    ):
        for step in range(1, min(max(count, 1), _MOST_ROUNDS) + 1 if entries else 1):
            for entry in (candidate for candidate in entries if step % candidate.frequency == 0):
                _advance(loop, entry, step - 1, f"in {what} {step}")
            for rate, begun in zip(_rates(optimizers), first, strict=True):
                if step < used and (not math.isfinite(rate) or rate < -1e-6 * abs(begun)):
                    raise ConfigError(f"model {name}: its schedule gives a learning rate of {rate} in {what} {step}")


def _advance(loop: LocalLoop, entry: Schedule, epoch: int, where: str) -> None:
    try:
        loop.optimizers.advance(entry, epoch)
    except Exception as error:  # any error of a schedule without a further step
        kind = type(entry.scheduler).__name__
        line = f"model {task_name(loop.objective)}: its schedule {kind} fails {where}: {reason(error)}"
        raise ConfigError(line, own_traceback(error)) from error


def _rates(optimizers: Sequence[Optimizer]) -> list[float]:
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
