"""A client as a method sees it: its task, tensors, batches and phases, and the steps of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lit_fed.checks import check_range
from lit_fed.data.loaders.limited import limited
from lit_fed.engine.method.model import Model
from lit_fed.engine.method.task_run import Outputs, TaskRun
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed, torch_generator

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


class EffectiveSteps:
    r"""Distance of local SGD along a constant gradient of 1: the equivalent number of plain steps.

    Normalising a client's movement takes more than counting its steps, because momentum carries each gradient on.
    With learning rate η and momentum ρ, K steps move the weights by :math:`\eta \tilde K`,
    :math:`\tilde K = \frac{1}{1-\rho}\left(K - \rho\frac{1-\rho^K}{1-\rho}\right)` (Wang, Liu, Liang, Joshi, Poor:
    "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020, Section 3).
    Here the recursion itself runs on one number, which also covers dampening, Nesterov's form and learning rates that
    change between steps.

    Note:
        An optimizer without ``momentum``, such as Adam, counts plain steps: a ratio between clients, but no length, for
        its steps are not in proportion to the gradients (`measures`). The learning rate is that of the first parameter
        group.
    """

    @staticmethod
    def measures(optimizer: type[Optimizer]) -> bool:
        """Whether a movement divided by `distance` is a mean gradient: only where steps are in proportion to gradients.

        False for a class that does not derive from ``torch.optim.SGD``, of which this is not known.
        """
        return issubclass(optimizer, SGD)

    def __init__(self) -> None:
        self.distance = 0.0
        self._is_first = True
        self._first_lr = 0.0
        self._velocity = 0.0

    @property
    def steps(self) -> float:
        """The distance in units of the first learning rate: K̃."""
        return self.distance / self._first_lr if self._first_lr else 0.0

    def begin_phase(self) -> None:
        """The next step is a fresh optimizer's first."""
        self._is_first = True

    def extend(self, distance: float, like: EffectiveSteps) -> None:
        """Add a phase that another instance counted.

        Args:
            distance: The phase's.
            like: The instance that counted it.
        """
        self.distance += distance
        self._first_lr = self._first_lr or like._first_lr

    def count(self, optimizer: Optimizer) -> None:
        """Count one step, before or after the optimizer makes it."""
        group = optimizer.param_groups[0]
        lr, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
        if not self._first_lr:
            self._first_lr = lr
        if self._is_first:  # it fills the momentum buffer undampened
            self._is_first, self._velocity = False, 1.0
        else:
            self._velocity = momentum * self._velocity + 1.0 - float(group.get("dampening", 0.0))
        self.distance += lr * (1.0 + momentum * self._velocity if group.get("nesterov") else self._velocity)


Stage = Literal["train", "personal", "test", "predict"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Adaptation of a model to a client before its test.

    Args:
        epochs: Passes over the client's training data.
        lr: Learning rate of every parameter group; None keeps the round's.
    """

    epochs: int = 1
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class LocalWork:
    """Length of a client's training in a round.

    Args:
        epochs: Passes over the client's data, also fractions; None with ``steps``.
        steps: Batches instead of epochs.
        limit: Most batches of each pass, or their share; None for all.
    """

    epochs: float | None = 1
    steps: int | None = None
    limit: int | float | None = None

    def batches_of(self, batches: int) -> int:
        """Number of batches in a pass over a loader with some batches."""
        if self.limit is None or not batches:
            return batches
        return min(batches, self.limit) if isinstance(self.limit, int) else max(1, int(batches * self.limit))

    def limited(self, loader: Iterable[Any]) -> Iterable[Any]:
        """A client's loader, with at most the batches of the limit in each pass."""
        if self.limit is None:
            return loader
        if not isinstance(loader, Sized):
            raise ConfigError("trainer.limit_train_batches needs a loader with a length; set trainer.local_steps")
        found: Iterable[Any] = limited(loader, self.batches_of(len(loader)))
        return found


def local_work(epochs: float | None, steps: int | None, limit: int | float | None = None) -> LocalWork:
    """Length of a client's training in a round, by default one epoch."""
    if isinstance(limit, float):
        check_range("trainer.limit_train_batches", limit, above=0, most=1, why=", or a number of batches, such as 2")
    check_range("trainer.limit_train_batches", limit, above=0, null="for all batches")
    if steps is not None and epochs is not None:
        raise ConfigError(f"trainer.local_epochs is {epochs} and local_steps is {steps}; set one of them to null")
    check_range("trainer.local_steps", steps, least=1, null="to count epochs")
    if steps is not None:
        return LocalWork(None, steps, limit)
    check_range("trainer.local_epochs", epochs, above=0, why=", such as 5 or 0.5", null="for one")
    return LocalWork(1 if epochs is None else epochs, None, limit)


@dataclass(slots=True)
class Phase:
    """A stretch of local training over one loader, with fresh optimizers unless the client keeps them.

    Args:
        name: ``client.phase`` while it runs.
        loader: Batches, iterated anew each epoch.
        epochs: Passes over the loader, also fractions. Give this or ``steps``.
        steps: Batches to train on, over one or more passes.
        trains: Names of the parameters that train; None for all except the frozen ones.
        begin: Tensors to start from; the model before the phase is then ``client.left``. None continues with it.
        moves: Whether the optimizer steps. If not, ``client.results[name]`` is the mean gradient over the samples.
        public: Whether the batches are of the public set, ``(x, index)``: without regularizer, terms logged by name and
            not as ``train/loss``, and without fine-tuning's learning rate.
        seed: Reseeds the device's generators, for dropout and the like; None continues their stream.
        lr: Learning rate of every parameter group; None for the fine-tuning's, else the round's.
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
        """Check that exactly one of epochs and steps is given."""
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"phase {self.name!r} has both epochs and steps, or neither; give one of them")


@dataclass(slots=True)
class Pass:
    """A pass over a loader without training, such as predictions on a public set.

    It runs in evaluation mode, without gradients, in the precision of the weights.

    Args:
        name: The result's, in ``client.results``.
        loader: Batches.
        read: Takes tensors by name from a client and a batch.
        gather: ``cat`` joins the batches' results along the first dimension, ``sum`` adds them.
        example: Empty tensors of the result's names and shapes, for ``cost`` and for a loader without batches.
    """

    name: str
    loader: Iterable[Any]
    read: Callable[[Client, Any], Tensors]
    gather: Literal["cat", "sum"] = "cat"
    example: Tensors = field(default_factory=dict)


@dataclass(slots=True)
class Client:
    """A client at work: its identity and tensors, and methods that run its task.

    Args:
        id: Position of the client, from 0.
        round_idx: The round, from 0.
        stage: ``train`` (local work of a round), ``personal`` (fine-tuning for a test), ``test`` or ``predict``.
        seed: The run's.
        model: The task's tensors with this client's values. In ``initial_state`` and ``start`` these are the client's
            own tensors and those it received.
        data: Source of the client's loaders; None under a plain ``lightning.Trainer``.
        work: Length of its training.
        fine_tuning: Adaptation of the model, in the ``personal`` stage.
        state: Tensors that the method keeps for this client between rounds; read-only.
        is_new: Whether the client has not taken part before.
        received: The broadcast as it arrived, and what is addressed to this client; read-only.
        addressed: The part of it that no other client gets (`lit_fed.algorithm.Algorithm.address`).
        begun: The model at the start, shared and personal tensors by name; empty under a plain trainer.
        left: The model before a phase that starts from other tensors.
        results: Results of passes and phases, by their names.
        steps: Effective length of the optimizer's steps, where the method needs it.
        phase: Name of the current phase, empty before the first.
        own: Personal tensors that the client kept, or the first ones.
        task_run: Runs the task on this client's tensors.
        optimizers: State of its optimizers that is kept between rounds, by `lit_fed.engine.lightning.optimization`.
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
    addressed: Payload = field(default_factory=dict)
    begun: Tensors = field(default_factory=dict)
    left: Tensors = field(default_factory=dict)
    results: dict[str, Tensors] = field(default_factory=dict)
    steps: EffectiveSteps = field(default_factory=EffectiveSteps)
    phase: str = ""
    own: Payload = field(default_factory=dict)
    task_run: TaskRun | None = None
    wrap_loader: Callable[[Iterable[Any], Client], Iterable[Any]] | None = None
    optimizers: Payload = field(default_factory=dict)
    _anchor: Tensors | None = None
    _override: Mapping[str, Tensor] | None = None
    _ran: dict[int, tuple[Any, Outputs]] = field(default_factory=dict)

    # ------------------------------------------------------------------ tensors

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name, differentiable; within `at`, those that it was given."""
        own = self.model.parameters
        return own if self._override is None else {**own, **{n: t for n, t in self._override.items() if n in own}}

    @property
    def device(self) -> torch.device:
        """Device of the client's tensors."""
        return next(iter(self.model.parameters.values())).device

    @property
    def anchor(self) -> Tensors:
        """Reference parameters for a term: the shared ones as received.

        Where the method sends no parameters, the client's own at the start; empty where nothing was received.
        """
        if not self._anchor:  # empty until the client has begun
            names = self.model.split.shared or self.model.split.personal
            self._anchor = {name: self.begun[name] for name in names if name in self.begun}
        return self._anchor

    # ------------------------------------------------------------------ data

    def rate_of(self, phase: Phase) -> float | None:
        """Learning rate of a phase: its ``lr``, else fine-tuning's on the client's data; None for the round's."""
        if phase.lr is not None or phase.public or self.fine_tuning is None:
            return phase.lr
        return self.fine_tuning.lr

    def derive_seed(self, purpose: str) -> int:
        """A seed for one purpose of this client in this round."""
        return derive_seed(self.seed, self.stage, self.round_idx, self.id, purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator for one purpose of this client in this round."""
        return torch_generator(self.seed, self.stage, self.round_idx, self.id, purpose)

    @property
    def population(self) -> FederatedDataModule:
        """The data module; a client reads only its own data and shared sets."""
        if self.data is None:
            raise ConfigError("this part of the method needs clients' data; a plain Trainer has none")
        return self.data

    def train_loader(self) -> Iterable[Any]:
        """The client's training data, shuffled by its generator for this round."""
        loader = self.work.limited(self.population.train_loader(self.id, self.generator("data")))
        return loader if self.wrap_loader is None else self.wrap_loader(loader, self)

    @property
    def num_samples(self) -> int:
        """Number of the client's training samples."""
        return self.population.census.num_samples(self.id)

    # ------------------------------------------------------------------ the task

    def run(self, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """The task's ``training_step`` on a batch: loss, and logits and features where the method needs them.

        Repeated calls for a batch return the same tensors without a second pass.

        Args:
            batch: As from the loader.
            tensors: Parameters and buffers, by name, in place of the model's; differentiable in them.
        """
        task = self._task
        if tensors is not None:
            return task.run_with(batch, tensors)
        cached = self._ran.get(id(batch))
        if cached is None:
            ran = task.run(batch) if self._override is None else task.run_with(batch, self._override)
            cached = self._ran[id(batch)] = batch, ran
        return cached[1]

    def rehearsed(self) -> AbstractContextManager[None]:
        """Draw the same random numbers again on leaving, such as dropout's in a second pass over a batch."""
        found: AbstractContextManager[None] = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        return found

    @contextmanager
    def at(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Make `run` and `parameters` use these tensors, by name, in place of the model's; differentiable in them."""
        self.forget()
        self._override = tensors
        try:
            yield
        finally:
            self._override = None
            self.forget()

    @torch.no_grad()
    def teach(self, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Outputs:
        """A teacher's results for a batch: evaluation mode, no gradient, nothing logged.

        Args:
            batch: As from the loader.
            tensors: The teacher's parameters and buffers by name; by default the client's model at the start.
        """
        with self.model.evaluating(), self.muted():
            return self._task.run_with(batch, self.begun if tensors is None else tensors)

    def forward(self, x: Any) -> Tensor:
        """The task's ``forward`` on inputs without labels, such as a public set's."""
        output: Tensor = self._task.forward(x)
        return output

    def gradients(self, loss: Tensor, create_graph: bool = False, keep_graph: bool = False) -> Tensors:
        """Gradients of a loss by name, for every trainable parameter of the model that it depends on.

        Args:
            loss: 0-d.
            create_graph: Whether the gradients are differentiable.
            keep_graph: Whether the loss can be differentiated again.
        """
        return gradients_of(loss, self.model.parameters, create_graph, create_graph or keep_graph)

    def targets(self, batch: Any) -> Tensor:
        """The labels of a batch: ``task.targets(batch)`` if the task defines it, else the pair's second element."""
        function = getattr(self.model.task, "targets", None)
        targets: Tensor = function(batch) if callable(function) else batch[1]
        return targets

    def levels(self, batch: Any) -> list[Any]:
        """A batch at its lower resolutions, descending, by the task's own ``levels(batch)``."""
        function: Callable[[Any], list[Any]] = self.model.task.levels  # type: ignore[assignment]  # declared in `needs`
        return function(batch)

    def muted(self) -> AbstractContextManager[None]:
        """Drop the task's logged values: they do not describe the model in training."""
        return self._task.muted()

    def forget(self) -> None:
        """Drop the outputs kept for batches, because the parameters have moved."""
        self._ran.clear()

    @property
    def _task(self) -> TaskRun:
        if self.task_run is None:
            raise RuntimeError("a client without a task_run cannot run its task; enter it in a session")
        return self.task_run


def gradients_of(
    loss: Tensor, parameters: Mapping[str, Tensor], create_graph: bool = False, keep_graph: bool = False
) -> Tensors:
    """Gradients by name, of the trainable parameters that a loss depends on; see `Client.gradients`."""
    own = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(own.values()), None, keep_graph, create_graph, allow_unused=True)
    return {name: gradient for name, gradient in zip(own, found, strict=True) if gradient is not None}


@dataclass(slots=True)
class Update:
    """Result of a client's work.

    Args:
        payload: Tensors for the server.
        state: Tensors that the method keeps for the client, beside its personal tensors.
        weight: Weight in a weighted mean; None for its number of training samples.
    """

    payload: Payload
    state: Tensors = field(default_factory=dict)
    weight: float | None = None
