"""A method, whole: what a client does beside the task's loss, and what the server does.

Twelve hooks carry every method here. The client's hooks are handed a `lit_fed.engine.method.client.Client` and keep
nothing between two calls; what a client or the server keeps are mappings of tensors. An algorithm's own attributes are
its settings and what `Algorithm.setup` learnt about the population.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.engine.method.client import Client, Pass, Phase, Stage, Tensors, Update
from lit_fed.engine.method.model import Model, Split
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lit_fed.engine.method.population import Population

AggregateT = TypeVar("AggregateT")
Server = dict[str, Any]
Terms = dict[str, Tensor]

NEEDS = {
    "loss": "a loss that training_step returns; a module that optimises by hand returns none",
    "logits": "logits: name the submodule that puts them out as algorithm.head",
    "outputs": "the head's outputs: name the submodule that puts them out as algorithm.head",
    "features": "features: name the submodule that reads them as algorithm.head",
    "head": "a last layer: name it as algorithm.head",
    "targets": "integer class labels: batches (x, y), or a method targets(batch) of the model",
    "levels": "lower resolutions of a batch: a method levels(batch) of the model",
    "classes": "classes to predict",
    "forward": "a forward(x) that gives predictions for inputs without labels",
    "probability": "the probability with which clients take part, which this participation does not know",
    "public": "a public set: set algorithm.public_size above 0",
    "one_optimizer": "a single optimizer with one learning rate, whose steps it measures",
    "no_decay": "an optimizer without weight decay, beside which its own would be a second one; set weight_decay to 0",
    "whole_batches": "whole batches, which strategy=ddp would cut over processes; use 'clients'",
}
"""What a method may need beyond a LightningModule, and what to do where it is missing."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Whose updates the server steps on.

    Args:
        round_idx: The round, counted from 0.
        delivered: The clients whose updates arrived, ascending; a client with a late update may be there twice.
        num_clients: Clients in the population.
    """

    round_idx: int
    delivered: tuple[int, ...]
    num_clients: int


class Regularizer(ABC):
    """A term that wraps a method's objective while a client works for a federation.

    Args:
        weight: The term's weight.
        objective_weight: The weight of everything else.

    Raises:
        ConfigError: If a weight is negative.
    """

    name: str
    """What the term is logged as: ``train/<name>``, with its weight."""

    needs: frozenset[str] = frozenset({"loss"})
    """What it needs of the task, see `NEEDS`; one whose settings ask for more sets its own."""

    def __init__(self, weight: float = 1.0, objective_weight: float = 1.0) -> None:
        for key, value in (("weight", weight), ("objective_weight", objective_weight)):
            if not value >= 0:
                raise ConfigError(f"regularizer {type(self).__name__}: {key} is {value}; it must not be negative")
        self.weight = weight
        self.objective_weight = objective_weight

    @abstractmethod
    def term(self, client: Client, batch: Any) -> Tensor:
        """The term of a batch, without its weight.

        Args:
            client: The client; ``client.run(batch)`` gives what its task gave, ``client.teach(batch)`` what the
                downloaded model gives.
            batch: As the loader gives it.
        """

    def around(self, client: Client, batch: Any, below: Callable[[Client, Any], Terms]) -> Terms:
        """The terms of the objective below, weighed, and this one; without it where nothing was received."""
        terms = below(client, batch)
        if not client.begun or any(cast("Tensor | None", term) is None for term in terms.values()):  # the task skips it
            return terms
        if self.objective_weight != 1.0:
            terms = {name: self.objective_weight * term for name, term in terms.items()}
        if self.weight:
            terms[self.name] = self.weight * self.term(client, batch)
        return terms


class Algorithm(ABC, Generic[AggregateT]):
    """A federated-learning method. Every process holds one, in the same state.

    The type parameter is what the reducer makes of a cohort's updates and `step` takes: a `Payload` for
    `lit_fed.engine.method.reducers.WeightedMean`.

    Args:
        regularizer: A term over the method's objective, wherever a client trains on its own data.
        head: The submodule whose input are the features and whose output the logits; null for the task's own
            (``model.head``, where it is a module).
        public_size: Training samples set aside, before the partition, as a public set without labels. Methods that
            need none can set them aside too, to be compared on the same private data.
        calibration_fraction: Share of every client's samples that is held out for density models and the like.

    Raises:
        ConfigError: For sizes that cannot be.
    """

    needs: frozenset[str] = frozenset({"loss"})
    """What the method needs of the task beyond a LightningModule, see `NEEDS`; checked before any training.

    A method whose settings ask for more sets its own.
    """

    varying: frozenset[str] = frozenset()
    """Tensors of an update whose first dimension follows from a client's data, such as a row for each class it has.

    It is the same in all of them, and at most that of a client that has not trained.
    """

    nonnegative: frozenset[str] = frozenset()
    """Tensors of an update that hold no negative number, such as counts and variances: a server refuses others."""

    heaviest: float | None = None
    """The largest weight that a client can have, where `finish` gives weights of the method's own.

    None where a client weighs as many as it has training samples: a server then takes no other from a machine.
    """

    def __init__(
        self,
        regularizer: Regularizer | None = None,
        head: str | None = None,
        public_size: int = 0,
        calibration_fraction: float = 0.0,
    ) -> None:
        self.regularizer = regularizer
        self.head = head
        self.public_size = public_size  # the data check it, and the fraction
        self.calibration_fraction = calibration_fraction

    @property
    def all_needs(self) -> frozenset[str]:
        """What the method and its regularizer need."""
        return self.needs | (self.regularizer.needs if self.regularizer is not None else frozenset())

    # ------------------------------------------------------------------ the whole

    def adapt(self, task: LightningModule) -> None:
        """Change a task's network, in place, where the method takes another than the user's; by default not.

        Called once for every network, before anything else, also under a plain ``lightning.Trainer``.

        Raises:
            ConfigError: If the task has no network that can be changed so.
        """

    @abstractmethod
    def setup(self, models: Mapping[str, Model], population: Population) -> Server:
        """Look at the population and make the server's first state; called once on every process.

        Args:
            models: The clients' models by kind; one where all clients have the same network.
            population: What the server may know about the clients.

        Returns:
            Tensors and primitives, nested in dictionaries, which checkpoints hold. Under ``model`` stands the global
            model by parameter and buffer name, or under ``models`` one for each kind, for methods that have one.

        Raises:
            ConfigError: If the method cannot work on this task or population.
        """

    def split(self, model: Model, round_idx: int) -> Split:
        """Which parameters travel, stay and freeze in a round; by default all travel. A pure function of the round."""
        return Split(tuple(model.parameters))

    # ------------------------------------------------------------------ the client's half

    def initial_state(self, client: Client) -> Tensors:
        """What the method keeps for a client that never took part; by default nothing."""
        return {}

    def start(self, client: Client) -> Tensors:
        """The model a client begins with, or is tested with, by name.

        By default what it received and, where it has personal tensors, its own (``client.own``).
        """
        received = {name: tensor for name, tensor in client.received.items() if name in client.model}
        return {**received, **client.own}

    def phases(self, client: Client) -> list[Phase | Pass]:
        """The client's local work in order.

        By default one phase over its own data where it trains or is fine-tuned, nothing where it is tested or used.
        """
        if client.stage == "train":
            return [Phase("train", client.train_loader(), epochs=client.work.epochs, steps=client.work.steps)]
        if client.fine_tuning is not None:
            return [Phase("fine_tuning", client.train_loader(), epochs=client.fine_tuning.epochs)]
        return []

    def objective(self, client: Client, batch: Any) -> Terms:
        """What is minimised on a batch, as terms by name; by default the task's own loss, as ``task``."""
        return {"task": client.run(batch).loss}  # type: ignore[dict-item]  # None is Lightning's way to skip a batch

    def correct(self, client: Client, gradients: Tensors) -> Tensors:
        """The gradients to step along, by parameter name; by default as they are. Before clipping."""
        return gradients

    def finish(self, client: Client) -> Update:
        """The client's answer and what the method keeps of it; by default its shared tensors and nothing."""
        return Update(client.model.tensors(client.model.shared_names("up")))

    # ------------------------------------------------------------------ the server's half

    @abstractmethod
    def broadcast(self, server: Server, round_idx: int, kind: str, stage: Stage = "train") -> Payload:
        """What every client of a kind receives. Clients do not write into it.

        Args:
            server: The server's state.
            round_idx: The round, counted from 0.
            kind: Whose network it is for, a key of `setup`'s models.
            stage: Whether they are to ``train`` with it or not. What is sent to be tested with is also what the
                global model is tested, saved and handed out with.
        """

    @abstractmethod
    def reducer(self, server: Server) -> Reducer[AggregateT]:
        """A new reducer for one round."""

    @abstractmethod
    def step(self, server: Server, aggregate: AggregateT, cohort: Cohort) -> dict[str, float]:
        """Move the server's state, in place; skipped in a round in which no update arrived.

        Args:
            server: The server's state.
            aggregate: What the reducer gave.
            cohort: Whose updates were combined.

        Returns:
            Metrics of the server by name, such as ``server/step_size``.
        """

    # ------------------------------------------------------------------ for show and for use

    def figures(self, server: Server) -> dict[str, Figure]:
        """Pictures of the server's state by name, for TensorBoard; by default none. Drawn on the first process only."""
        return {}

    def release(self, task: LightningModule) -> nn.Module:
        """A trained task as a network for use without a federation; by default its ``network``, else the task itself.

        A method that changed the network's form in `adapt`, and not what it computes, gives it its own form back.
        """
        network = getattr(task, "network", None)
        return network if isinstance(network, nn.Module) else task

    def forecast(self, server: Server, round_idx: int, kind: str) -> Payload:
        """A round's broadcast by names and shapes, for ``cost``, where nothing was ever stepped."""
        return self.broadcast(server, round_idx, kind)

    # ------------------------------------------------------------------ what the engine calls

    def terms(self, client: Client, batch: Any, public: bool = False) -> Terms:
        """The objective with the regularizer around it.

        A method that takes both elsewhere than at the client's tensors says where (`lit_fed.methods.per_fedavg`).
        """
        if self.regularizer is None or public:
            return self.objective(client, batch)
        return self.regularizer.around(client, batch, self.objective)


def sole(models: Mapping[str, Model], algorithm: Algorithm[Any]) -> Model:
    """The one model of a method that combines weights.

    Raises:
        ConfigError: If clients have different networks.
    """
    if len(models) > 1:
        raise ConfigError(
            f"algorithm {type(algorithm).__name__} combines weights, so all clients need the same network; "
            f"trainer.kinds has {', '.join(models)}"
        )
    return next(iter(models.values()))


def zeros_like(tensors: Payload) -> Tensors:
    """Zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def global_model(algorithm: Algorithm[Any], server: Server, round_idx: int, kind: str) -> dict[str, Tensor]:
    """The global model of a kind by parameter and buffer name; empty for methods without one."""
    held: Payload = server["models"].get(kind, {}) if "models" in server else server.get("model", {})
    if not held:
        return {}
    tested = algorithm.broadcast(server, round_idx, kind, "test")
    return {**held, **{name: tensor for name, tensor in tested.items() if name in held}}
