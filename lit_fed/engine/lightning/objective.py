"""A client's objective: a task's class with a method's client half mixed in, again a LightningModule.

The objective shares the task's memory, attributes and hooks: nothing is copied, no parameter is renamed, and the task
itself stays unchanged. It also trains under a plain ``lightning.Trainer`` (`lit_fed.engine.lightning.alone`), without
the method's terms that need a broadcast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from lightning import LightningModule
from lightning.fabric.utilities.apply_func import convert_to_tensors
from torch import Tensor, nn
from typing_extensions import override

from lit_fed.engine.lightning.meter import Meter
from lit_fed.engine.lightning.metric_names import plain_name
from lit_fed.engine.lightning.task_trainer import GradientOptions, TaskTrainer, clip_gradients
from lit_fed.engine.method.client import Client
from lit_fed.engine.method.model import Model
from lit_fed.engine.method.task_run import Outputs, TaskRun
from lit_fed.errors import ConfigError
from lit_fed.patterns import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lit_fed.engine.method.algorithm import Algorithm

ATTRIBUTE = "_lit_fed"
"""Attribute of a task that holds its objective's state."""


@dataclass(slots=True)
class ObjectiveState:
    """State of an objective at work; a plain object, because ``nn.Module`` makes setting attributes slow.

    Args:
        algorithm: The method.
        client: The client at work.
        task_run: Runs the task's own step.
        meter: Takes logged values; None under a plain ``lightning.Trainer``.
        trainer: The task's ``self.trainer`` in a federation.
        training: Whether logged values are about training.
        public: Whether the batch is of the public set.
    """

    algorithm: Algorithm[Any]
    client: Client
    task_run: TaskRun
    meter: Meter | None = None
    trainer: TaskTrainer | None = None
    training: bool = False
    public: bool = False


def _of_trainer(name: str) -> Any:
    """A property of Lightning's that the task's trainer answers in a federation."""

    def answer(self: Objective) -> Any:
        trainer = self.state.trainer
        return getattr(super(Objective, self) if trainer is None else trainer, name)

    return property(answer)


class Objective(LightningModule):
    """The half of a client's objective that is mixed into a task's class by `join`.

    It adds the method's terms to the task's step, and answers the task where Lightning's trainer would; under a plain
    ``lightning.Trainer`` the answers are Lightning's own.
    """

    @property
    def state(self) -> ObjectiveState:
        """The state put there by `at_work`."""
        state: ObjectiveState = self.__dict__[ATTRIBUTE]
        return state

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The method's objective on a batch: the sum of its terms, each of which is logged."""
        state = self.state
        state.task_run.batch_idx = batch_idx
        state.client.forget()
        losses = state.algorithm.terms(state.client, batch, state.public)
        loss: Tensor | None = None
        for term in losses.values():
            if cast("Tensor | None", term) is None:  # Lightning's way of skipping a batch
                return None
            loss = term if loss is None else loss + term
        if state.meter is not None:
            if len(losses) > 1 or state.public:
                for name, term in losses.items():
                    state.meter.add(f"train/{name}", term)
            if not state.public:  # ``train/loss`` is of the client's own data
                state.meter.add("train/loss", loss)
        elif state.trainer is None and len(losses) > 1:
            super().log_dict({f"train/{name}": term for name, term in losses.items()})
            super().log("train/objective", cast(Tensor, loss), prog_bar=True)
        return loss

    def run(self, batch: Any) -> Outputs:
        """The task's own step on a batch."""
        return self.state.task_run.run(batch)

    @override
    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Log as in Lightning; in a federation the value joins the client's mean over batches, without a device sync.

        ``on_step``, ``prog_bar`` and the like have no effect there; ``logger=False`` keeps a value out of the record.
        """
        state = self.state
        if state.meter is None:
            if state.trainer is not None and not state.task_run.is_muted:
                raise ConfigError(
                    f"self.log({name!r}, …) runs outside of training, validation and test, where nothing is recorded; "
                    "move or remove it, or call the step within client.muted()"
                )
            if not state.task_run.is_muted:
                super().log(name, value, *args, batch_size=batch_size, **kwargs)  # type: ignore[misc]
            return
        logged = args[1] if len(args) > 1 else kwargs.get("logger")
        if state.task_run.is_muted or logged is False:
            return
        reduce_fx = args[4] if len(args) > 4 else kwargs.get("reduce_fx", "mean")
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self.log(f"{name}.{key}", entry, *args, batch_size=batch_size, **kwargs)
            return
        plain = plain_name(name)
        if state.training:
            if plain == "loss" and self.automatic_optimization:
                return  # the objective is logged under this name, and the task's loss beside it as a term
            plain = f"train/{plain}"
        if (before := state.meter.names.setdefault(plain, name)) != name:
            raise ConfigError(
                f"model {task_name(self)} logs {before!r} and {name!r} in one step, and both are the metric {plain!r} "
                "of the record, which has the stage in its own prefix; rename one of them"
            )
        state.meter.add(plain, value, batch_size, reduce_fx)

    @override
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.meter is None and self.state.trainer is None:
            super().log_dict(dictionary, *args, **kwargs)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @property
    @override
    def trainer(self) -> Any:
        """In a federation, the client's clock and surroundings."""
        trainer = self.state.trainer
        return super().trainer if trainer is None else trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]  # the property's own setter

    current_epoch = _of_trainer("current_epoch")
    """In a federation, the round: the unit of learning-rate schedules."""
    global_step = _of_trainer("global_step")
    """In a federation, optimizer steps of the client's work in this round."""
    global_rank = _of_trainer("global_rank")
    local_rank = _of_trainer("local_rank")
    logger = _of_trainer("logger")
    loggers = _of_trainer("loggers")
    fabric = _of_trainer("fabric")

    @override
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        trainer = self.state.trainer
        if trainer is None:
            return super().optimizers(use_pl_optimizer)
        optimizers = (
            trainer.fabric_optimizers if use_pl_optimizer and not self.automatic_optimization else trainer.optimizers
        )
        return optimizers[0] if len(optimizers) == 1 else optimizers

    @override
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        trainer = self.state.trainer
        if trainer is not None:
            trainer.call("on_before_backward", loss)
        super().manual_backward(loss, *args, **kwargs)
        if trainer is not None:
            trainer.call("on_after_backward")

    @override
    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors from the processes that work on one client; a single process gets its tensors back."""
        trainer = self.state.trainer
        if trainer is None or trainer.data_parallel:
            return super().all_gather(data, group, sync_grads)
        return convert_to_tensors(data, device=self.device)

    @override
    def lr_schedulers(self) -> Any:
        trainer = self.state.trainer
        if trainer is None:
            return super().lr_schedulers()
        return trainer.schedulers[0] if len(trainer.schedulers) == 1 else trainer.schedulers or None

    @override
    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        trainer = self.state.trainer
        if trainer is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        value = trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if value is not None:
            algorithm: Any = gradient_clip_algorithm or trainer.gradient_clip_algorithm
            clip_gradients(optimizer, GradientOptions(value, algorithm))


def task_name(task: LightningModule) -> str:
    """Name of a task's own class, also of an objective's."""
    kinds = type(task).__mro__
    return next(kind for kind in kinds if kind is not Objective and "_objective_class" not in kind.__dict__).__name__


def bind_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A task's step as a function of (batch, batch_idx), with or without the index in its signature."""
    parameters = list(inspect.signature(step).parameters.values())
    several = len(parameters) > 1 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return step if several else (lambda batch, _batch_idx: step(batch))


def head_of(task: LightningModule, name: str | None) -> nn.Module | None:
    """The submodule with the features as input and the logits as output; None where the task has none.

    Args:
        task: Any LightningModule.
        name: The submodule's (``algorithm.head``); None for ``task.head``.

    Raises:
        ConfigError: If the task has no submodule of this name.
    """
    if name is None:
        head = getattr(task, "head", None)
        return head if isinstance(head, nn.Module) else None
    try:
        return task.get_submodule(name)
    except AttributeError:
        known = [key for key, _ in task.named_modules() if key]
        raise unknown_name("algorithm.head", name, "submodule of the model is called so", known) from None


def head_names(model: Model, name: str | None) -> tuple[str, ...]:
    """Names of the parameters of a task's head (`head_of`) in the model's order; empty without a head.

    Raises:
        ConfigError: If none of them trains, as in the layer that peft's ``modules_to_save`` copies.
    """
    head = head_of(model.task, name)
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    names = tuple(key for key, parameter in model.task.named_parameters() if id(parameter) in of_head)
    if head is not None and set(names) <= set(model.fixed):
        why = f"{names[0]!r} is frozen" if names else f"{type(head).__name__} has no parameters"
        raise ConfigError(
            f"the head of model {task_name(model.task)} does not train, and the method would do nothing to it: "
            f"{why}; name the module that trains as algorithm.head, or choose FedAvg"
        )
    return names


_CLASSES: dict[type[LightningModule], type[Objective]] = {}


def _objective_class(kind: type[LightningModule]) -> type[Objective]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"{kind.__name__}Objective", (Objective, kind), {"_objective_class": True})
    return _CLASSES[kind]


def join(task: LightningModule, algorithm: Algorithm[Any], model: Model) -> tuple[Objective, ObjectiveState]:
    """A task's objective under a method, sharing the task's memory, and its state; `at_work` binds the two."""
    objective: Objective = object.__new__(_objective_class(type(task)))
    objective.__dict__ = task.__dict__
    needs_head = algorithm.all_needs & {"logits", "outputs", "features"}
    head = head_of(task, algorithm.head) if needs_head else None
    step = bind_step(MethodType(type(task).training_step, objective))  # the task's own, with the objective as ``self``
    task_run = TaskRun(objective, step, task_name(task), head)
    return objective, ObjectiveState(algorithm, Client(0, 0, "train", 0, model, task_run=task_run), task_run)


@contextmanager
def at_work(objective: Objective, state: ObjectiveState) -> Iterator[None]:
    """Bind an objective to its state; its task is a plain LightningModule before and after."""
    attributes = objective.__dict__
    before = attributes.get(ATTRIBUTE)
    if before is state:
        yield
        return
    attributes[ATTRIBUTE] = state
    listening = state.task_run.listen()
    try:
        yield
    finally:
        if listening is not None:
            listening.remove()
        if before is None:
            del attributes[ATTRIBUTE]
        else:
            attributes[ATTRIBUTE] = before
