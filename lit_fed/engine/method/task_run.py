"""A task's own step and forward pass, on the module's tensors or on others, with its head captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from typing_extensions import override

from lit_fed.engine.method.model import Model
from lit_fed.errors import ConfigError
from lit_fed.tensors import map_tensors


class Outputs(NamedTuple):
    """A task's results for a batch.

    Args:
        loss: The task's own, 0-d; None where the task skips the batch.
        logits: (B, …), the head's output; None where no method needs it.
        features: (B, …), the head's input; None where no method needs it.
    """

    loss: Tensor | None
    logits: Tensor | None = None
    features: Tensor | None = None


class TaskRun:
    """Runs a task's own ``training_step`` and ``forward``.

    Args:
        module: The module that is ``self`` in the step.
        step: The task's own ``training_step`` of (batch, batch_idx).
        name: The task's, for errors.
        head: Submodule whose input and output are captured; None where no method needs them.
    """

    def __init__(
        self, module: LightningModule, step: Callable[[Any, int], Any], name: str, head: nn.Module | None = None
    ) -> None:
        self.module, self.step, self.name, self.head = module, step, name, head
        self.batch_idx = 0
        self.returned: Any = None
        """The last value that the task's own step returned."""
        self.is_muted = False
        """Whether logged values are dropped."""
        self._metrics = [one for one in module.modules() if isinstance(one, Metric)]
        self._capturing = False
        self._captured: list[tuple[Tensor, Tensor]] = []

    def run(self, batch: Any) -> Outputs:
        """The task's own step on a batch."""
        if self.head is None:
            self.returned = self.step(batch, self.batch_idx)
            return _outputs(self.returned)
        self._captured.clear()
        self._capturing = True
        try:
            returned = self.returned = self.step(batch, self.batch_idx)
        finally:
            self._capturing = False
        given = returned if isinstance(returned, Mapping) else {}
        logits, features = given.get("logits"), given.get("features")
        if logits is None or features is None:
            saw, put_out = self._once()
            logits, features = put_out if logits is None else logits, saw if features is None else features
        return Outputs(_outputs(returned).loss, logits, features)

    def forget(self) -> None:
        """Drop the last results, and with them the graph that autograd keeps for them."""
        self.returned = None
        self._captured.clear()

    def run_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Outputs:
        """`run` with other parameters and buffers, by name, in place of the module's."""
        renamed = {f"objective.{name}": tensor for name, tensor in tensors.items()}
        outputs: Outputs = functional_call(_Runner(self), renamed, (batch,))
        return outputs

    def forward(self, x: Any) -> Any:
        """The task's ``forward``."""
        return self.module(x)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop logged values and what metrics count: they do not describe the model in training."""
        before, self.is_muted = self.is_muted, True
        counted = [dict(metric.__dict__) for metric in self._metrics]
        for metric in self._metrics:  # an update may write into a state
            metric.__dict__.update(map_tensors(metric.metric_state, torch.clone))
        try:
            yield
        finally:
            self.is_muted = before
            for metric, attributes in zip(self._metrics, counted, strict=True):
                metric.__dict__.update(attributes)

    def listen(self) -> RemovableHandle | None:
        """Hook into the head, to capture its input and output during `run`."""

        def capture(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self._capturing:
                self._captured.append((inputs[0], output))

        return None if self.head is None else self.head.register_forward_hook(capture)

    @contextmanager
    def observing(self, head: nn.Module) -> Iterator[None]:
        """Capture a head in `run`, also where no method needs it."""
        before, self.head = self.head, head
        listening = self.listen() if before is None else None
        try:
            yield
        finally:
            self.head = before
            if listening is not None:
                listening.remove()

    def _once(self) -> tuple[Tensor, Tensor]:
        if len(self._captured) != 1:
            raise ConfigError(
                f"the head {type(self.head).__name__} ran {len(self._captured)} times in a training_step of "
                f"{self.name}, and logits and features need exactly one; name another submodule as algorithm.head, or "
                "return them from training_step"
            )
        return self._captured[0]


class TaskRunOn(TaskRun):
    """Runs a task on a model's tensors, which the module does not hold.

    Args:
        own: Runs the task on the module's tensors.
        model: Gives the tensors.
    """

    def __init__(self, own: TaskRun, model: Model) -> None:
        self._own, self._model = own, model

    @override
    def run(self, batch: Any) -> Outputs:
        return self._own.run_with(batch, self._tensors())

    @override
    def run_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Outputs:
        return self._own.run_with(batch, {**self._tensors(), **tensors})

    @override
    def forward(self, x: Any) -> Any:
        return functional_call(self._own.module, self._tensors(), (x,))

    @override
    @contextmanager
    def muted(self) -> Iterator[None]:
        with self._own.muted():
            yield

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._model.parameters, **self._model.tensors(self._model.buffers)}


class _Runner(nn.Module):
    """`TaskRun.run` as a module's forward, as ``functional_call`` needs it."""

    def __init__(self, task_run: TaskRun) -> None:
        super().__init__()
        self.objective, self.task_run = task_run.module, task_run

    def forward(self, batch: Any) -> Outputs:
        return self.task_run.run(batch)


def _outputs(returned: Any) -> Outputs:
    """Read the value that a ``training_step`` returned, in any of Lightning's forms."""
    if returned is None or isinstance(returned, Tensor):
        return Outputs(returned)
    if isinstance(returned, Mapping) and "loss" in returned:
        return Outputs(returned["loss"], returned.get("logits"), returned.get("features"))
    form = f"a dict of {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else type(returned).__name__
    raise ConfigError(f"training_step returned {form}; it must return a tensor, a dict with the key loss, or None")
