"""A client's objective: a task's class with a method's client half mixed in, again a LightningModule.

The mixture shares the task's memory, attributes and hooks, so nothing is copied and no parameter changes its name; the
task itself stays what it is. It also trains under a plain ``lightning.Trainer`` (`objective_of`), where a method's
terms that need something received are absent.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from lit_fed.engine.client import Client, Outputs
from lit_fed.engine.meter import Meter
from lit_fed.engine.model import Model
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning import Fabric
    from torch.utils.hooks import RemovableHandle

    from lit_fed.engine.algorithm import Algorithm
    from lit_fed.engine.task_trainer import TaskTrainer

_STAGE = re.compile(r"^(train|val|test)[/_]")
_ATTRIBUTE = "_lit_fed"  # where a task's attributes hold what its objective works on


@cache
def plain_name(name: str) -> str:
    """A logged name without a leading ``train``, ``val`` or ``test`` and its ``/`` or ``_``."""
    return _STAGE.sub("", name)


@dataclass(slots=True)
class ObjectiveState:
    """What an objective works on at the moment; a plain object, because ``nn.Module`` makes setting attributes slow.

    Args:
        algorithm: The method.
        client: Whose work it is.
        step: The task's own ``training_step``, with the arguments it takes.
        head: The submodule whose input and output are captured, None where no method asks for them.
        meter: Takes what is logged; None under a plain ``lightning.Trainer``.
        trainer: What the task sees as ``self.trainer`` in a federation.
        training: Whether what is logged is about training.
        muted: Whether what is logged is dropped.
        public: Whether the batch is the public set's.
        batch_idx: Number of the batch in its epoch.
        capturing: Whether the head is listened to at the moment.
        captured: What the head saw and put out, once for every time it ran.
    """

    algorithm: Algorithm[Any]
    client: Client
    step: Callable[[Any, int], Any]
    head: nn.Module | None = None
    meter: Meter | None = None
    trainer: TaskTrainer | None = None
    training: bool = False
    muted: bool = False
    public: bool = False
    batch_idx: int = 0
    capturing: bool = False
    captured: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Objective(LightningModule):
    """The half of a client's objective that the method adds to a task's class; made by `objective_of`."""

    @property
    def state(self) -> ObjectiveState:
        """What it works on."""
        return cast(ObjectiveState, self.__dict__[_ATTRIBUTE])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """The method's objective on a batch: the sum of its terms, each of which is logged."""
        state = self.state
        state.batch_idx = batch_idx
        state.client.forget()
        found = state.algorithm.terms(state.client, batch, state.public)
        terms = list(found.items())
        loss = cast("Tensor | None", terms[0][1])
        if loss is None:  # Lightning's way of skipping a batch
            return None
        for _, term in terms[1:]:
            loss = loss + term
        if state.meter is None:
            self._log_under_trainer(found, loss)
        else:
            if len(terms) > 1 or state.public:
                for name, term in terms:
                    state.meter.add(f"train/{name}", term)
            if not state.public:  # ``train/loss`` is of the client's own data
                state.meter.add("train/loss", loss)
        return loss

    def run(self, batch: Any) -> Outputs:
        """The task's own step on a batch."""
        state = self.state
        if state.head is None:
            return _outputs(state.step(batch, state.batch_idx))
        state.captured.clear()
        state.capturing = True
        try:
            returned = state.step(batch, state.batch_idx)
        finally:
            state.capturing = False
        given = returned if isinstance(returned, Mapping) else {}
        logits, features = given.get("logits"), given.get("features")
        if logits is None or features is None:
            saw, put_out = self._once(state)
            logits, features = put_out if logits is None else logits, saw if features is None else features
        return Outputs(_outputs(returned).loss, logits, features)

    def run_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Outputs:
        """`run` with other parameters and buffers, by name, in place of the task's."""
        renamed = {f"objective.{name}": tensor for name, tensor in tensors.items()}
        found: Outputs = functional_call(_Runner(self), renamed, (batch,))
        return found

    def _once(self, state: ObjectiveState) -> tuple[Tensor, Tensor]:
        if len(state.captured) != 1:
            raise ConfigError(
                f"the head {type(state.head).__name__} ran {len(state.captured)} times in a training_step of "
                f"{task_name(self)}, where once is needed for logits and features; name another submodule as "
                "algorithm.head, or return them from training_step"
            )
        return state.captured[0]

    def _log_under_trainer(self, terms: Mapping[str, Tensor], loss: Tensor) -> None:
        if self._trainer is None:
            return
        if len(terms) > 1:
            super().log_dict({f"train/{name}": term for name, term in terms.items()})
            super().log("train/objective", loss, prog_bar=True)

    # ------------------------------------------------------------------ what a task uses of Lightning

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Log as in Lightning; in a federation the value joins the client's mean over batches, without a device sync.

        ``on_step``, ``prog_bar`` and the like have no meaning there; ``logger=False`` keeps a value out of the record.
        """
        state = self.state
        if state.meter is None:
            if self._trainer is not None and not state.muted:
                super().log(name, value, *args, batch_size=batch_size, **kwargs)  # type: ignore[misc]
            return
        logged = args[1] if len(args) > 1 else kwargs.get("logger")
        if state.muted or logged is False:
            return
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self.log(f"{name}.{key}", entry, *args, batch_size=batch_size, **kwargs)
            return
        plain = plain_name(name)
        if state.training:
            if plain == "loss" and self.automatic_optimization:
                return  # it is the objective that stands there, and beside it the task's loss as a term of its own
            plain = f"train/{plain}"
        state.meter.add(plain, value, batch_size)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values, see `log`."""
        if self.state.meter is None:
            if self._trainer is not None:
                super().log_dict(dictionary, *args, **kwargs)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @property
    def trainer(self) -> Any:
        """In a federation the client's clock and surroundings, see `lit_fed.engine.task_trainer.TaskTrainer`."""
        own = self.state.trainer
        return super().trainer if own is None else own

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]  # the property's own setter

    @property
    def current_epoch(self) -> int:
        """The round, in a federation: the unit in which learning rates are scheduled there."""
        own = self.state.trainer
        return super().current_epoch if own is None else own.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps of the client's work in this round, in a federation."""
        own = self.state.trainer
        return super().global_step if own is None else own.global_step

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        own = self.state.trainer
        return super().global_rank if own is None else own.global_rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        own = self.state.trainer
        return super().local_rank if own is None else own.local_rank

    @property
    def logger(self) -> Any:
        """The run's first logger, on the first process."""
        own = self.state.trainer
        return super().logger if own is None else own.logger

    @property
    def loggers(self) -> Any:
        """The run's loggers, on the first process."""
        own = self.state.trainer
        return super().loggers if own is None else own.loggers

    def lr_schedulers(self) -> Any:
        """The schedulers of a client that optimises by hand, as in Lightning: one, several or none."""
        own = self.state.trainer
        if own is None:
            return super().lr_schedulers()
        return None if not own.schedulers else own.schedulers[0] if len(own.schedulers) == 1 else own.schedulers

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, as in Lightning."""
        own = self.state.trainer
        if own is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            own.clip(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")


class _Runner(nn.Module):
    """An objective's `Objective.run` as a module's forward, which is what ``functional_call`` takes."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: Any) -> Outputs:
        return self.objective.run(batch)


def _outputs(returned: Any) -> Outputs:
    if isinstance(returned, Mapping):
        return Outputs(returned.get("loss"), returned.get("logits"), returned.get("features"))
    return Outputs(returned)


def task_name(task: LightningModule) -> str:
    """The name of a task's own class, also of an objective's."""
    own = [kind for kind in type(task).__mro__ if kind is not Objective and "_objective_class" not in kind.__dict__]
    return own[0].__name__


def bind_step(task: LightningModule, hook: str) -> Callable[..., Any]:
    """One of a task's steps as a function of (batch, batch_idx), whether or not it takes the index."""
    step = getattr(task, hook)
    parameters = list(inspect.signature(step).parameters.values())
    several = len(parameters) > 1 or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return cast(Callable[..., Any], step) if several else (lambda batch, _batch_idx: step(batch))


def head_of(task: LightningModule, name: str | None) -> nn.Module | None:
    """The submodule whose input are the features and whose output the logits; None where the task has none.

    Args:
        task: Any LightningModule.
        name: Its name (``algorithm.head``); None for ``task.head``.

    Raises:
        ConfigError: If there is no submodule of this name.
    """
    if name is None:
        found = getattr(task, "head", None)
        return found if isinstance(found, nn.Module) else None
    try:
        return task.get_submodule(name)
    except AttributeError:
        known = ", ".join(key for key, _ in task.named_modules() if key)
        raise ConfigError(f"algorithm.head is {name!r}, and the model's submodules are {known}") from None


def head_names(model: Model, name: str | None) -> tuple[str, ...]:
    """Names of the parameters of a task's head (`head_of`), in the model's order; none where it has no head."""
    head = head_of(model.task, name)
    own = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return tuple(key for key, parameter in model.parameters.items() if id(parameter) in own)


_CLASSES: dict[type[LightningModule], type[Objective]] = {}


def _objective_class(kind: type[LightningModule]) -> type[Objective]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"{kind.__name__}Objective", (Objective, kind), {"_objective_class": True})
    return _CLASSES[kind]


def join(task: LightningModule, algorithm: Algorithm[Any], model: Model) -> tuple[Objective, ObjectiveState]:
    """A task's objective under a method, sharing the task's memory; `at_work` puts the two together."""
    kind = _objective_class(type(task))
    objective: Objective = object.__new__(kind)
    client = Client(0, 0, "train", 0, model)
    state = ObjectiveState(algorithm, client, _unbound)
    objective.__dict__ = task.__dict__
    client.objective = objective
    state.step = _own_step(objective, type(task))
    if algorithm.all_needs & {"logits", "outputs", "features"}:
        state.head = head_of(task, algorithm.head)
    return objective, state


def objective_of(task: LightningModule, algorithm: Algorithm[Any]) -> LightningModule:
    """A client's objective as a LightningModule for a plain ``lightning.Trainer``: the task with the method's terms.

    ``Trainer().fit(objective_of(MyModule(), FedProx(mu=0.1)), datamodule)`` trains centrally; terms that need something
    received, such as FedProx's, are absent.

    Args:
        task: Any LightningModule. It is trained in place.
        algorithm: The method.

    Raises:
        ConfigError: If the task lacks what the method needs.
    """
    from lit_fed.engine.compatibility import check_task

    algorithm.adapt(task)
    check_task(task, algorithm)
    objective, state = join(task, algorithm, Model(task))
    task.__dict__[_ATTRIBUTE] = state
    _listen(state)
    return objective


@contextmanager
def at_work(objective: Objective, state: ObjectiveState, fabric: Fabric | None = None) -> Iterator[None]:
    """An objective bound to its state and Fabric for a while; its task is a plain LightningModule before and after."""
    own = objective.__dict__
    before = own.get(_ATTRIBUTE)
    if before is state:
        yield
        return
    own[_ATTRIBUTE], own["_fabric"] = state, fabric
    listening = _listen(state)
    try:
        yield
    finally:
        if listening is not None:
            listening.remove()
        own["_fabric"], own["_fabric_optimizers"] = None, []
        if before is None:
            del own[_ATTRIBUTE]
        else:
            own[_ATTRIBUTE] = before


def _listen(state: ObjectiveState) -> RemovableHandle | None:
    """Capture what the head sees and puts out, while a step runs that is asked for it."""

    def capture(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if state.capturing:
            state.captured.append((inputs[0], output))

    return None if state.head is None else state.head.register_forward_hook(capture)


def _own_step(objective: Objective, kind: type[LightningModule]) -> Callable[[Any, int], Any]:
    """The task's own ``training_step``, run with the objective as ``self``."""
    function = kind.training_step
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if len(parameters) > 1 or any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return lambda batch, batch_idx: function(objective, batch, batch_idx)
    return lambda batch, _batch_idx: function(objective, batch)


def _unbound(batch: Any, batch_idx: int) -> Any:
    raise RuntimeError("an objective runs once it is joined")
