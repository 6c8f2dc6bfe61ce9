"""Optimizers and learning-rate schedules of a client's local work.

`configure_optimizers` is called for every phase of every client, so that momentum never leaks from one client to the
next; where a task declares it `same_for_all`, its optimizers are reset and reused. With ``trainer.client_optimizer:
kept`` the phase then continues with the client's own state (`state_of`, `load_state`). An ``epoch`` schedule counts
rounds: every client of a round starts from the same learning rate. A ``step`` schedule restarts with every client and
round, or with ``trainer.schedule_steps: run`` continues from the steps of the rounds before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_fed.engine.lightning.task_trainer import TaskTrainer
from lit_fed.engine.wire.payload import split_prefix
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.private_names import foreach

_FORMS = "an optimizer, a list of optimizers, ([optimizers], [schedulers]) or {'optimizer': …, 'lr_scheduler': …}"


@dataclass(slots=True)
class Schedule:
    """A scheduler and its frequency.

    Args:
        scheduler: One of torch, or another that the task steps itself.
        frequency: Rounds or optimizer steps between its steps.
    """

    scheduler: Any
    frequency: int = 1


@dataclass(slots=True)
class _Reusable:
    """Optimizers for reuse.

    Args:
        optimizers: From `configure_optimizers`.
        by_round: Whether a schedule sets their learning rates by round.
        trained: Identities of the trainable parameters at creation.
        settings: Settings of each optimizer's parameter groups at creation.
    """

    optimizers: list[Optimizer]
    by_round: bool
    trained: list[int]
    settings: list[list[dict[str, Any]]]

    def renew(self) -> None:
        """Restore the optimizers as at creation."""
        for optimizer, groups in zip(self.optimizers, self.settings, strict=True):
            if _begins_with_zeros(optimizer):  # a new buffer would cost a client of a large model a tenth of its time
                foreach.zero_([state["momentum_buffer"] for state in optimizer.state.values()])
            else:
                optimizer.state.clear()
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)


def _begins_with_zeros(optimizer: Optimizer) -> bool:
    """Whether zero momentum is a new optimizer's state: for torch's SGD without dampening, once it has stepped."""
    return (
        type(optimizer) is SGD
        and bool(optimizer.state)
        and all(group["dampening"] == 0 for group in optimizer.param_groups)
        and all(isinstance(state.get("momentum_buffer"), Tensor) for state in optimizer.state.values())
    )


@dataclass(slots=True)
class _Template:
    """Optimizers that never step, with the settings of the beginning of a round.

    Args:
        optimizers: As `configure_optimizers` gave them.
        by_round: Their schedules by rounds.
        by_step: Their schedules by steps, stepped only where these span the run.
        round_idx: The round.
    """

    optimizers: list[Optimizer]
    by_round: list[Schedule]
    by_step: list[Schedule]
    round_idx: int


def same_for_all(method: Callable[..., Any]) -> bool:
    """Whether an attribute of this name on a task's method declares it equal for all clients.

    It then depends on its arguments, parameters and generators only, and has no side effects.
    """
    return getattr(method, "same_for_all", False) is True


class OptimizerFactory:
    """Makes a client's optimizers, at the learning rate of the round.

    Args:
        task: The module with ``configure_optimizers``.
        clock: The task's clock, which has the steps per round where schedules by steps span the run.

    Note:
        A schedule's values by round come from one optimizer a phase that is stepped once a round; it is not saved, a
        resumed run steps it up to its round. Where schedules by steps span the run, it is also stepped by each round's
        steps, and there is one for each number of steps. A task that optimises by hand steps its schedulers itself, as
        in Lightning: they start anew with every client and round.
    """

    def __init__(self, task: LightningModule, clock: TaskTrainer) -> None:
        self.task, self.clock = task, clock
        self._same_for_all = same_for_all(task.configure_optimizers)
        self._parameters = list(task.parameters()) if self._same_for_all else []
        self._reusable: dict[str, _Reusable] = {}
        self._steps_itself = has_own_scheduler_step(task)
        self._templates: dict[tuple[str, int, int], _Template] = {}
        self._first_rate: tuple[int, float | None] = (-1, None)

    def build(self, phase: str, round_idx: int, lr: float | None = None) -> tuple[list[Optimizer], list[Schedule]]:
        """Fresh optimizers for a phase, and the schedulers that step with every batch.

        Where the task optimises by hand, these are all its schedulers.

        Args:
            phase: The phase's name.
            round_idx: The round, from 0.
            lr: Learning rate of every parameter group; None for the round's.
        """
        optimizers, schedules = self._build(phase, round_idx)
        if self._first_rate[0] != round_idx:
            rate = optimizers[0].param_groups[0].get("lr")
            self._first_rate = (round_idx, None if rate is None else float(rate))
        if lr is not None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr
        return optimizers, schedules

    def rate_of(self, round_idx: int) -> float | None:
        """Learning rate of the first optimizer at the start of a round; None where nothing was trained in it."""
        return self._first_rate[1] if self._first_rate[0] == round_idx else None

    def _build(self, phase: str, round_idx: int) -> tuple[list[Optimizer], list[Schedule]]:
        trained = [id(parameter) for parameter in self._parameters if parameter.requires_grad]
        by_step: list[Schedule] = []
        kept = self._reusable.get(phase)
        if kept is not None and kept.trained == trained:
            kept.renew()
            optimizers, by_round = kept.optimizers, kept.by_round
        else:
            optimizers, schedules, by_step = parse_optimizers(self.task.configure_optimizers(), self._steps_itself)
            if not self.task.automatic_optimization:
                return optimizers, schedules + by_step
            by_round = bool(schedules)
            if self._same_for_all and not by_step and all(map(_keeps_all_in_its_state, optimizers)):
                settings = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
                self._reusable[phase] = _Reusable(optimizers, by_round, trained, settings)
        goes_on = bool(by_step) and self.clock.spans_run
        if by_round or goes_on:
            template = self._template(phase, round_idx)
            for optimizer, stepped in zip(optimizers, template.optimizers, strict=True):
                for group, scheduled in zip(optimizer.param_groups, stepped.param_groups, strict=True):
                    group.update(deepcopy(_settings(scheduled)) if goes_on else _settings(scheduled))
            for entry, begun in zip(by_step, template.by_step, strict=True) if goes_on else ():
                entry.scheduler.load_state_dict(deepcopy(begun.scheduler.state_dict()))
        return optimizers, by_step

    def make(self) -> tuple[list[Optimizer], list[Schedule], list[Schedule]]:
        """Fresh optimizers that never step, the schedules by rounds, and the schedules by batches."""
        made = parse_optimizers(self.task.configure_optimizers(), self._steps_itself)
        for optimizer in made[0]:
            # A scheduler warns unless its optimizer has stepped, by a flag that it adds to the optimizer; these carry
            # hyper-parameters only.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return made

    def advance(self, entry: Schedule, epoch: int | None = None, step: int | None = None) -> None:
        """Step a scheduler, by the task's own hook where it has one.

        Args:
            entry: The scheduler.
            epoch: The finished round, ``self.current_epoch`` in the hook; None for the current one.
            step: The finished steps, ``self.global_step`` in the hook; None for the clock's.
        """
        if not self._steps_itself:
            entry.scheduler.step()
            return
        clock = self.clock
        present = clock.current_epoch, clock.global_step
        clock.current_epoch = present[0] if epoch is None else epoch
        clock.global_step = present[1] if step is None else step
        try:
            self.task.lr_scheduler_step(entry.scheduler, None)
        finally:
            clock.current_epoch, clock.global_step = present

    def _template(self, phase: str, round_idx: int) -> _Template:
        steps = self.clock.steps_per_round
        key = phase, steps, self.clock.max_epochs
        template = self._templates.get(key)
        if template is None or template.round_idx > round_idx:
            template = self._templates[key] = _Template(*self.make(), 0)
        for passed in range(template.round_idx, round_idx):
            for step in range(passed * steps + 1, (passed + 1) * steps + 1):
                for entry in template.by_step:
                    if step % entry.frequency == 0:
                        self.advance(entry, passed, step)
            for entry in template.by_round:
                if (passed + 1) % entry.frequency == 0:
                    self.advance(entry, passed)
        template.round_idx = round_idx
        return template


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _keeps_all_in_its_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer with emptied state is new: true of torch's own with plain values as settings."""
    plain = not any(
        isinstance(value, Tensor) for group in optimizer.param_groups for value in _settings(group).values()
    )
    return plain and type(optimizer).__module__.startswith("torch.optim.")


class HandedOptimizer:
    """Argument of a task's own ``optimizer_step``, as in Lightning: its ``step`` does the whole step.

    Args:
        optimizer: The task's.
        step: Makes the step: correction, clipping, scaling.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self._step = step

    def step(self, closure: Callable[[], Any] | None = None, **_kwargs: Any) -> Any:
        """Compute gradients by the closure, if given, and step."""
        value = None if closure is None else closure()
        self._step()
        return value

    def __getattr__(self, name: str) -> Any:
        """All other attributes are the optimizer's."""
        return getattr(self.optimizer, name)


def has_own_scheduler_step(task: LightningModule) -> bool:
    """Whether a task overrides the hook that steps its schedulers, which may then be others than torch's."""
    return type(task).lr_scheduler_step is not LightningModule.lr_scheduler_step


def parse_optimizers(
    configured: Any, any_scheduler: bool = False
) -> tuple[list[Optimizer], list[Schedule], list[Schedule]]:
    """Read the result of `configure_optimizers`, in any of Lightning's forms.

    Args:
        configured: The result.
        any_scheduler: Whether schedulers may be others than torch's, because the task steps them itself.

    Returns:
        The optimizers, the schedulers by rounds, and the schedulers by batches.
    """
    optimizers: list[Any] = []
    entries: list[Any] = []
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], Sequence):
        optimizers = list(configured[0])
        entries = list(configured[1]) if isinstance(configured[1], Sequence) else [configured[1]]
    else:
        for entry in configured if isinstance(configured, tuple | list) else [configured]:
            if isinstance(entry, dict):
                optimizers.append(entry.get("optimizer"))
                entries += [entry["lr_scheduler"]] if entry.get("lr_scheduler") is not None else []
            else:
                optimizers.append(entry)
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ConfigError(f"model.configure_optimizers must return {_FORMS}; it returned {configured!r:.80}")
    by_round: list[Schedule] = []
    by_step: list[Schedule] = []
    for entry in entries:
        config = entry if isinstance(entry, dict) else {"scheduler": entry}
        scheduler, frequency = config.get("scheduler"), config.get("frequency", 1)
        if isinstance(scheduler, ReduceLROnPlateau) or config.get("reduce_on_plateau"):
            raise ConfigError(
                f"model: learning-rate scheduler {type(scheduler).__name__} watches a metric (monitor) and is not a"
                " function of the round; use one of torch.optim.lr_scheduler that needs none"
            )
        if not isinstance(scheduler, LRScheduler) and not any_scheduler:
            raise ConfigError(
                f"model: {type(scheduler).__name__} is not a scheduler of torch.optim.lr_scheduler; step it in "
                "lr_scheduler_step"
            )
        if config.get("interval", "epoch") not in ("epoch", "step"):
            raise ConfigError(f"model: a scheduler's interval is 'epoch' or 'step', not {config['interval']!r}")
        if not isinstance(frequency, int) or frequency < 1:
            raise ConfigError(f"model: a scheduler's frequency is {frequency!r}; it must be at least 1")
        (by_step if config.get("interval") == "step" else by_round).append(Schedule(scheduler, frequency))
    return optimizers, by_round, by_step


def state_of(optimizers: Iterable[Optimizer], names: Mapping[int, str], phase: str) -> dict[str, Tensor]:
    """Copies of the optimizers' state, by ``<phase>/<position>/<class>/<parameter>/<entry>``.

    Args:
        optimizers: A phase's.
        names: The model's parameters' names by their ``id``.
        phase: The phase's name.

    Raises:
        ConfigError: If an optimizer keeps anything but tensors of its parameters' shapes, or that broadcast to them.
    """
    found = {}
    for place, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            for entry, value in state.items():
                if value is None:  # such as a momentum that has not begun
                    continue
                name = names.get(id(parameter))
                fits = isinstance(value, Tensor) and value.layout == torch.strided and _fits(value, parameter)
                if name is None or not fits:
                    raise ConfigError(
                        f"trainer.client_optimizer is kept, and {kind} has the state {entry!r}, which is not a tensor "
                        "like a parameter of the model; set it to fresh, or choose another optimizer"
                    )
                found[f"{phase}/{place}/{kind}/{name}/{entry}"] = value.detach().clone()
    return found


def load_state(
    optimizers: Iterable[Optimizer], kept: Mapping[str, Tensor], names: Mapping[int, str], phase: str
) -> None:
    """Continue with the state that `state_of` gave; a parameter without one begins fresh.

    Raises:
        CheckpointError: If the state is of another optimizer or model.
    """
    for place, optimizer in enumerate(optimizers):
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in split_prefix(f"{phase}/{place}/", kept)[0].items():
            kind, _, parameter_entry = name.partition("/")
            if kind != type(optimizer).__name__:
                raise CheckpointError(
                    f"a client keeps the state of {kind}, and the model has {type(optimizer).__name__}; resume with "
                    "the run's own optimizer"
                )
            parameter, _, entry = parameter_entry.rpartition("/")
            states.setdefault(parameter, {})[entry] = tensor.clone()
        packed = optimizer.state_dict()
        for idx, one in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            name = names.get(id(one), "")
            state = states.get(name, {})
            for entry, tensor in state.items():
                if not _fits(tensor, one):
                    raise CheckpointError(
                        f"a client keeps {entry!r} {tuple(tensor.shape)} of {name!r}, which is {tuple(one.shape)} "
                        "in this model; resume with the run's own model"
                    )
            if state:
                packed["state"][idx] = state
        if states:
            optimizer.load_state_dict(packed)


def _fits(state: Tensor, parameter: Tensor) -> bool:
    """Whether a state has the shape of its parameter, or is 1 in some dimensions, or a number."""
    return not state.ndim or (
        state.ndim == parameter.ndim and all(a in (1, b) for a, b in zip(state.shape, parameter.shape, strict=True))
    )
