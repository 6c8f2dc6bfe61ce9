"""One client at work: what a method's hooks are handed, and what its local work consists of.

What a client keeps and what it received are mappings of tensors; nothing of a client is an attribute of the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from typing import Protocol as Interface

import torch
from torch import Tensor

from lit_fed.engine.method.model import Model
from lit_fed.engine.method.steps import EffectiveSteps
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, torch_generator

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule

Stage = Literal["train", "personal", "test", "predict"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class FineTuning:
    """How a model is adapted to a client before it is tested there.

    Args:
        epochs: Passes over the client's training data.
        lr: Learning rate of every parameter group; None keeps the round's own.
    """

    epochs: int = 1
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class LocalWork:
    """How long a client trains in a round.

    Args:
        epochs: Passes over the client's data, also fractions of one; None with ``steps``.
        steps: Batches instead of epochs.
    """

    epochs: float | None = 1
    steps: int | None = None


class Outputs(NamedTuple):
    """What a task gives for a batch.

    Args:
        loss: The task's own, 0-d; None where the task skips the batch.
        logits: (B, …), what the head put out; None where no method asked for it.
        features: (B, …), what the head saw; None where no method asked for it.
    """

    loss: Tensor | None
    logits: Tensor | None = None
    features: Tensor | None = None


class TaskRun(Interface):
    """What a client runs its task with: `lit_fed.engine.lightning.objective.Objective`."""

    def run(self, batch: Any) -> Outputs:
        """The task's own step on a batch."""

    def run_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Outputs:
        """The same with other parameters and buffers, by name, in place of the task's."""

    def muted(self) -> AbstractContextManager[None]:
        """What the task logs meanwhile is dropped."""

    def __call__(self, x: Any) -> Any:
        """The task's ``forward``."""


def local_work(epochs: float | None, steps: int | None) -> LocalWork:
    """How long a client trains in a round: one epoch where nobody says otherwise.

    Raises:
        ConfigError: If both epochs and steps are given, or one of them is nothing.
    """
    if steps is not None and epochs is not None:
        raise ConfigError(f"trainer.local_epochs is {epochs} and local_steps is {steps}; set one of them to null")
    if steps is not None:
        return LocalWork(None, steps)
    if epochs is not None and not (epochs > 0 and math.isfinite(epochs)):
        raise ConfigError(f"trainer.local_epochs is {epochs}; it must be above 0, such as 5 or 0.5")
    return LocalWork(1 if epochs is None else epochs, None)


@dataclass(slots=True)
class Phase:
    """One stretch of local training, over one loader, with one fresh set of optimizers.

    Args:
        name: What the hooks see as ``client.phase``.
        loader: Batches; iterated anew each epoch.
        epochs: How often to go through the loader, also fractions. Give this or ``steps``.
        steps: How many batches to train on, going through the loader as often as that takes.
        trains: Names of the parameters that train in this phase; None for all that are not frozen.
        begin: Tensors to begin with; the model as it was is then ``client.left``. None goes on with it.
        moves: Whether the optimizer steps. Where not, ``client.results[name]`` is the mean gradient over the samples.
        public: Whether the batches are the public set's, ``(x, index)``: no regularizer goes over them, their terms are
            logged by name and not as ``train/loss``, and fine-tuning's learning rate is not theirs.
        seed: Seeds the device's generators anew, for dropout and the like; None goes on with their stream.
        lr: Learning rate of every parameter group; None for that of the fine-tuning, else the round's own.
    """

    name: str
    loader: Iterable[Any]
    epochs: float | None = None
    steps: int | None = None
    trains: Collection[str] | None = None
    begin: Payload | None = None
    moves: bool = True
    public: bool = False
    seed: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        """Check that the length is given in exactly one way."""
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"phase {self.name!r} needs either epochs or steps, not both and not neither")


@dataclass(slots=True)
class Pass:
    """One reading of a loader that trains nothing, such as predictions on a public set.

    It runs in evaluation mode, without gradients and in the weights' own precision.

    Args:
        name: Where the answer stands: ``client.results[name]``.
        loader: Batches.
        read: What is taken from a client and a batch, tensors by name.
        gather: ``cat`` joins what the batches gave along the first dimension, ``sum`` adds it up.
        example: Empty tensors of the answer's names and sizes, for ``cost`` and for a loader without a batch.
    """

    name: str
    loader: Iterable[Any]
    read: Callable[[Client, Any], Tensors]
    gather: Literal["cat", "sum"] = "cat"
    example: Tensors = field(default_factory=dict)


@dataclass(slots=True)
class Client:
    """A client at work: who it is, what it holds, and ways to run its task.

    Args:
        id: The client, counted from 0.
        round_idx: The round, counted from 0.
        stage: ``train`` (local work of a round), ``personal`` (fine-tuning for a test), ``test`` or ``predict``.
        seed: The seed of the run.
        model: The task's tensors, this client's at the moment.
        data: Where the client's loaders come from; None under a plain ``lightning.Trainer``.
        work: How long it trains.
        fine_tuning: How to adapt the model, in the ``personal`` stage.
        state: What the method keeps for this client between rounds. Its tensors must not be changed.
        is_new: Whether the client never took part before.
        received: The broadcast as it arrived. Its tensors must not be changed.
        begun: The model it began with, shared and personal tensors by name; empty under a plain trainer.
        left: The model as it was before a phase that begins with other tensors.
        results: What passes and phases gave, by their names.
        steps: What the optimizer's steps amount to, where the method needs it.
        phase: Name of the phase under way, empty before the first one.
    """

    id: int
    round_idx: int
    stage: Stage
    seed: int
    model: Model
    data: FederatedDataModule | None = None
    work: LocalWork = field(default_factory=LocalWork)
    fine_tuning: FineTuning | None = None
    state: Payload = field(default_factory=dict)
    is_new: bool = True
    received: Payload = field(default_factory=dict)
    begun: Tensors = field(default_factory=dict)
    left: Tensors = field(default_factory=dict)
    results: dict[str, Tensors] = field(default_factory=dict)
    steps: EffectiveSteps = field(default_factory=EffectiveSteps)
    phase: str = ""
    own: Payload = field(default_factory=dict)
    objective: TaskRun | None = None
    around: Callable[[Iterable[Any], Client], Iterable[Any]] | None = None
    _anchor: Tensors | None = None
    _at: Mapping[str, Tensor] | None = None
    _ran: dict[int, tuple[Any, Outputs]] = field(default_factory=dict)

    # ------------------------------------------------------------------ tensors

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters by name, differentiable."""
        return self.model.parameters

    @property
    def device(self) -> torch.device:
        """Where the client works."""
        return next(iter(self.model.parameters.values())).device

    @property
    def anchor(self) -> Tensors:
        """What a term may hold the client to: its shared parameters as they arrived.

        Where the method sends no parameters, the client's own as it began; empty where nothing was received at all.
        """
        if self._anchor is None:
            names = self.model.split.shared or self.model.split.personal
            self._anchor = {name: self.begun[name] for name in names if name in self.begun}
        return self._anchor

    # ------------------------------------------------------------------ data

    def derive_seed(self, purpose: str) -> int:
        """A seed for one purpose of this client in this round."""
        return derive_seed(self.seed, self.stage, self.round_idx, self.id, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for one purpose of this client in this round."""
        return torch_generator(self.seed, self.stage, self.round_idx, self.id, purpose)

    @property
    def population(self) -> FederatedDataModule:
        """The data, of which a client looks only at its own and at what is shared.

        Raises:
            ConfigError: Under a plain ``lightning.Trainer``, where there is none.
        """
        if self.data is None:
            raise ConfigError("this part of the method needs a federation; under a plain Trainer there is no client")
        return self.data

    def train_loader(self) -> Iterable[Any]:
        """The client's own training data, shuffled by this client's generator for this round."""
        loader = self.population.train_loader(self.id, self.generator("data"))
        return loader if self.around is None else self.around(loader, self)

    @property
    def num_samples(self) -> int:
        """Number of the client's training samples."""
        return self.population.num_samples(self.id)

    # ------------------------------------------------------------------ the task

    def run(self, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """The task's ``training_step`` on a batch: loss, and logits and features where the method needs them.

        Asked again for the same batch it gives the same tensors, without a second pass.

        Args:
            batch: As the loader gives it.
            tensors: Use these parameters and buffers, by name, in place of the model's; differentiable in them.
        """
        objective = self._objective
        if tensors is not None:
            return objective.run_with(batch, tensors)
        found = self._ran.get(id(batch))
        if found is None:
            ran = objective.run(batch) if self._at is None else objective.run_with(batch, self._at)
            found = self._ran[id(batch)] = batch, ran
        return found[1]

    @contextmanager
    def at(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let `run` use these parameters and buffers, by name, in place of the model's; differentiable in them."""
        self.forget()
        self._at = tensors
        try:
            yield
        finally:
            self._at = None
            self.forget()

    @torch.no_grad()
    def teach(self, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """What a teacher gives for a batch: evaluation mode, no gradient, nothing logged.

        Args:
            batch: As the loader gives it.
            tensors: The teacher's parameters and buffers by name; by default the model the client began with.
        """
        with self.model.evaluating(), self.muted():
            return self._objective.run_with(batch, self.begun if tensors is None else tensors)

    def forward(self, x: Any) -> Tensor:
        """The task's ``forward`` on inputs without labels, such as a public set's."""
        output: Tensor = self._objective(x)
        return output

    def gradients(self, loss: Tensor, create_graph: bool = False) -> Tensors:
        """The gradient of a loss by name, in every parameter that trains and that the loss depends on."""
        own = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        found = torch.autograd.grad(loss, list(own.values()), create_graph=create_graph, allow_unused=True)
        return {name: gradient for name, gradient in zip(own, found, strict=True) if gradient is not None}

    def targets(self, batch: Any) -> Tensor:
        """The labels of a batch: ``task.targets(batch)`` where the task has it, else the second of a pair."""
        own = getattr(self.model.task, "targets", None)
        found: Tensor = own(batch) if callable(own) else batch[1]
        return found

    def levels(self, batch: Any) -> list[Any]:
        """A batch at its lower resolutions, in descending order, by the task's own ``levels(batch)``."""
        own: Callable[[Any], list[Any]] = self.model.task.levels  # type: ignore[assignment]  # declared in `needs`
        return own(batch)

    def muted(self) -> AbstractContextManager[None]:
        """What the task logs meanwhile is dropped: it is not about the model that trains."""
        return self._objective.muted()

    def forget(self) -> None:
        """Forget the outputs of batches, whose parameters have moved."""
        self._ran.clear()

    @property
    def _objective(self) -> TaskRun:
        if self.objective is None:
            raise RuntimeError("a client runs its task only while it works")
        return self.objective


@dataclass(slots=True)
class Update:
    """What a client's work gave, before it is anybody's.

    Args:
        payload: What is sent to the server.
        state: What the method keeps for the client, beside its personal tensors.
        weight: Its weight in a weighted mean; None for its number of training samples.
    """

    payload: Payload
    state: Tensors = field(default_factory=dict)
    weight: float | None = None
