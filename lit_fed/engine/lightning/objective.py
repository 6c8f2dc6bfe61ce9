"""A client's objective: a task's class with a method's client half mixed in, again a LightningModule.

The mixture shares the task's memory, attributes and hooks, so nothing is copied and no parameter changes its name; the
task itself stays what it is. It also trains under a plain ``lightning.Trainer`` (`lit_fed.engine.lightning.alone`),
where a method's terms that need something received are absent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from lit_fed.engine.lightning.surface import ATTRIBUTE, ObjectiveState, Surface
from lit_fed.engine.method.client import Client, Outputs
from lit_fed.engine.method.model import Model
from lit_fed.engine.method.names import unknown_name
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning import Fabric
    from torch.utils.hooks import RemovableHandle

    from lit_fed.engine.method.algorithm import Algorithm


class Objective(Surface):
    """The half of a client's objective that the method adds to a task's class; made by `join`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The method's objective on a batch: the sum of its terms, each of which is logged."""
        state = self.state
        state.batch_idx = batch_idx
        state.client.forget()
        found = state.algorithm.terms(state.client, batch, state.public)
        loss: Tensor | None = None
        for term in found.values():
            if cast("Tensor | None", term) is None:  # Lightning's way of skipping a batch
                return None
            loss = term if loss is None else loss + term
        if state.meter is None:
            self._log_under_trainer(found, cast(Tensor, loss))
        else:
            if len(found) > 1 or state.public:
                for name, term in found.items():
                    state.meter.add(f"train/{name}", term)
            if not state.public:  # ``train/loss`` is of the client's own data
                state.meter.add("train/loss", loss)
        return loss

    def run(self, batch: Any) -> Outputs:
        """The task's own step on a batch."""
        state = self.state
        if state.head is None:
            state.returned = state.step(batch, state.batch_idx)
            return _outputs(state.returned)
        state.captured.clear()
        state.capturing = True
        try:
            returned = state.returned = state.step(batch, state.batch_idx)
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

    @contextmanager
    def muted(self) -> Iterator[None]:
        """What the task logs meanwhile is dropped: it is not about the model that trains."""
        state = self.state
        before, state.muted = state.muted, True
        try:
            yield
        finally:
            state.muted = before

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


class _Runner(nn.Module):
    """An objective's `Objective.run` as a module's forward, which is what ``functional_call`` takes."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: Any) -> Outputs:
        return self.objective.run(batch)


def _outputs(returned: Any) -> Outputs:
    """What a ``training_step`` returned, in any of the forms that Lightning takes.

    Raises:
        ConfigError: For another form, which has no loss.
    """
    if returned is None or isinstance(returned, Tensor):
        return Outputs(returned)
    if isinstance(returned, Mapping) and "loss" in returned:
        return Outputs(returned["loss"], returned.get("logits"), returned.get("features"))
    what = f"a dict of {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else type(returned).__name__
    raise ConfigError(f"training_step must return a tensor, a dict with the key loss, or None, and returned {what}")


def task_name(task: LightningModule) -> str:
    """The name of a task's own class, also of an objective's."""
    ours = (Objective, Surface)
    own = (kind for kind in type(task).__mro__ if kind not in ours and "_objective_class" not in kind.__dict__)
    return next(own).__name__


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
        known = [key for key, _ in task.named_modules() if key]
        raise unknown_name("algorithm.head", name, "submodule of the model is called so", known) from None


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


@contextmanager
def at_work(objective: Objective, state: ObjectiveState, fabric: Fabric | None = None) -> Iterator[None]:
    """An objective bound to its state and Fabric for a while; its task is a plain LightningModule before and after."""
    own = objective.__dict__
    before = own.get(ATTRIBUTE)
    if before is state:
        yield
        return
    own[ATTRIBUTE], own["_fabric"] = state, fabric
    listening = listen(state)
    try:
        yield
    finally:
        if listening is not None:
            listening.remove()
        own["_fabric"], own["_fabric_optimizers"] = None, []
        if before is None:
            del own[ATTRIBUTE]
        else:
            own[ATTRIBUTE] = before


def listen(state: ObjectiveState) -> RemovableHandle | None:
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
