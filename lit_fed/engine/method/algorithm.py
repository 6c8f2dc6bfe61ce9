"""A whole method: the client's work beside the task's loss, and the server's.

Thirteen hooks carry every method here. The client's hooks take a `lit_fed.engine.method.client.Client` and keep nothing
between calls; the state of a client or the server is a mapping of tensors. An algorithm's own attributes are its
settings and what `Algorithm.setup` learnt about the population.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.arguments import Checked
from lit_fed.checks import check_range
from lit_fed.engine.method.client import Client, Pass, Phase, Stage, Tensors, Update
from lit_fed.engine.method.model import Model, Split
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.wire.payload import ClientUpdate, Payload
from lit_fed.engine.wire.updates import Updates
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
    "body": "parameters that train below the head: choose a network with hidden layers",
    "targets": "integer class labels: batches (x, y), or a method targets(batch) of the model",
    "levels": "lower resolutions of a batch: a method levels(batch) of the model",
    "classes": "classes to predict",
    "forward": "a forward(x) that gives predictions for inputs without labels",
    "probability": "the probability with which clients take part, which this participation does not know",
    "one_model": "updates that start from one model, which in an asynchronous federation they do not",
    "public": "a public set: set algorithm.public_size above 0",
    "one_optimizer": "a single optimizer with one learning rate, whose steps it measures",
    "linear_steps": "steps in proportion to the gradients; use torch.optim.SGD",
    "no_decay": "an optimizer without weight decay, because the method adds one itself; set weight_decay to 0",
    "one_client": "one client at a time, which groups do not have",
    "unweighted": "a model without class_weights, because it puts a loss of its own in place of the model's",
    "whole_batches": "whole batches, which strategy=ddp would cut over processes; use 'clients'",
}
"""Needs of a method beyond a LightningModule, each as completion of "needs …" in an error."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """The clients whose updates the server steps on.

    Args:
        round_idx: The round, from 0.
        delivered: Clients whose updates arrived, ascending; twice where a late update arrived too.
        num_clients: Clients in the population.
        expected: Divisor of the sum of updates, where it is not the number delivered.
    """

    round_idx: int
    delivered: tuple[int, ...]
    num_clients: int
    expected: float | None = None

    @property
    def size(self) -> float:
        """Number of updates in the aggregate's mean."""
        return len(self.delivered) if self.expected is None else self.expected


class Regularizer(Checked, ABC):
    """A term around a method's objective in a federation.

    Args:
        weight: The term's weight.
        objective_weight: The weight of everything else.
    """

    name: str
    """The term is logged as ``train/<name>``, with its weight."""

    needs: frozenset[str] = frozenset({"loss"})
    """Needs of the task, see `NEEDS`; a regularizer sets the instance's attribute where its settings need more."""

    def __init__(self, weight: float = 1.0, objective_weight: float = 1.0) -> None:
        of = f"of regularizer {type(self).__name__}"
        self.weight = check_range(f"weight {of}", weight, least=0)
        self.objective_weight = check_range(f"objective_weight {of}", objective_weight, least=0)

    @abstractmethod
    def term(self, client: Client, batch: Any) -> Tensor:
        """The term of a batch, without its weight.

        Args:
            client: The client; ``client.run(batch)`` has its task's results, ``client.teach(batch)`` the downloaded
                model's.
            batch: As from the loader.
        """

    def terms(self, client: Client, batch: Any, objective: Callable[[Client, Any], Terms]) -> Terms:
        """Weighted terms of the objective below and this one; without this one where nothing was received."""
        terms = objective(client, batch)
        if not client.begun or any(cast("Tensor | None", term) is None for term in terms.values()):  # the task skips it
            return terms
        if self.objective_weight != 1.0:
            terms = {name: self.objective_weight * term for name, term in terms.items()}
        if self.weight:
            terms[self.name] = self.weight * self.term(client, batch)
        return terms


class Algorithm(Checked, ABC, Generic[AggregateT]):
    """A federated-learning method. Every process holds one, in the same state.

    The type parameter is the reducer's aggregate of a cohort's updates, which `step` takes: a `Payload` for
    `lit_fed.engine.method.reducers.WeightedMean`.

    Args:
        regularizer: A term over the method's objective, wherever a client trains on its own data.
        head: Submodule with the features as input and the logits as output; null for the task's own (``model.head``,
            where it is a module).
        public_size: Training samples set aside, before the partition, as a public set without labels; also by methods
            that need none, for comparison on the same private data.
        calibration_fraction: Share of every client's samples held out for density models and the like.
    """

    _refused_as = "algorithm"

    needs: frozenset[str] = frozenset({"loss"})
    """Needs of the task beyond a LightningModule, see `NEEDS`; checked before any training.

    A method sets the instance's attribute where its settings need more.
    """

    varying: frozenset[str] = frozenset()
    """Tensors of an update whose first dimension depends on a client's data, such as a row for each of its classes.

    The dimension is the same in all of these tensors, and at most an untrained client's. Also tensors of what is
    addressed to a client, which may be shorter than in the first round.
    """

    nonnegative: frozenset[str] = frozenset()
    """Tensors of an update without negative numbers, such as counts and variances; a server refuses others."""

    heaviest: float | None = None
    """Largest weight of a client, where `finish` sets weights.

    None where the weight is the number of training samples: a server then accepts no other from a node.
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
        """Needs of the method and its regularizer."""
        return self.needs | (self.regularizer.needs if self.regularizer is not None else frozenset())

    # ------------------------------------------------------------------ the whole

    def adapt(self, task: LightningModule) -> None:
        """Change a task's network in place, where the method needs another than the user's; by default no change.

        Called once for every network, before anything else, also under a plain ``lightning.Trainer``.
        """

    @abstractmethod
    def setup(self, models: Mapping[str, Model], population: Population) -> Server:
        """Read the population and make the server's first state; called once on every process.

        Args:
            models: The clients' models by kind; one where all clients have the same network.
            population: The server's knowledge of the clients.

        Returns:
            Tensors and primitives, nested in dictionaries, as checkpoints hold them. A method with a global model puts
            it under ``model``, by parameter and buffer name, or one for each kind under ``models``.
        """

    def split(self, model: Model, round_idx: int) -> Split:
        """Division of the parameters in a round, a pure function of it; by default all travel."""
        return Split(tuple(model.parameters))

    # ------------------------------------------------------------------ the client's half

    def initial_state(self, client: Client) -> Tensors:
        """State of a client that has not taken part; by default empty."""
        return {}

    def start(self, client: Client) -> Tensors:
        """The model that a client starts from, or is tested with, by name.

        By default the received tensors and the client's personal ones (``client.own``).
        """
        received = {name: tensor for name, tensor in client.received.items() if name in client.model}
        return {**received, **client.own}

    def phases(self, client: Client) -> list[Phase | Pass]:
        """The client's local work in order.

        By default one phase over its data where it trains or is fine-tuned, none where it is tested or predicts.
        """
        if client.stage == "train":
            return [Phase("train", client.train_loader(), epochs=client.work.epochs, steps=client.work.steps)]
        if client.fine_tuning is not None:
            return [Phase("fine_tuning", client.train_loader(), epochs=client.fine_tuning.epochs)]
        return []

    def objective(self, client: Client, batch: Any) -> Terms:
        """Terms by name, whose sum is minimised on a batch; by default the task's own loss, as ``task``."""
        return {"task": client.run(batch).loss}  # type: ignore[dict-item]  # None is Lightning's way to skip a batch

    def correct(self, client: Client, gradients: Tensors) -> Tensors:
        """Gradients to step along, by parameter name, before clipping; by default unchanged."""
        return gradients

    def finish(self, client: Client) -> Update:
        """The client's answer and its new state; by default its shared tensors, and no state."""
        return Update(client.model.tensors(client.model.shared_names("up")))

    # ------------------------------------------------------------------ the server's half

    @abstractmethod
    def broadcast(self, server: Server, round_idx: int, kind: str, stage: Stage = "train") -> Payload:
        """Tensors for every client of a kind; read-only for clients.

        Args:
            server: The server's state.
            round_idx: The round, from 0.
            kind: Kind of network, a key of `setup`'s models.
            stage: ``train``, or the stage of a test. The global model is tested, saved and handed out with the tensors
                for tests.
        """

    def address(self, server: Server, client_id: int, round_idx: int, kind: str, stage: Stage = "train") -> Payload:
        """Tensors for one client beside the broadcast to its kind; read-only for the client; by default none.

        Called on the process that trains the client; over nodes on the server, and on the node with the first state,
        for names and shapes. Called in any order, once or several times a client and round, and again for tests: a
        pure function of the state and the arguments. Its names differ from the broadcast's.

        Args:
            server: The server's state; read-only.
            client_id: The client.
            round_idx: The round, from 0.
            kind: The client's kind of network.
            stage: ``train``, or the stage of a test.
        """
        return {}

    @property
    def addresses(self) -> bool:
        """Whether single clients get more than the broadcast."""
        return type(self).address is not Algorithm.address

    @abstractmethod
    def reducer(self, server: Server) -> Reducer[AggregateT]:
        """A new reducer for a round."""

    def arrive(self, update: ClientUpdate, begun: Payload, server: Server) -> ClientUpdate:
        """An update as the reducer takes it; by default as the client sent it.

        Args:
            update: As it arrived; ``update.staleness`` is above 0 only in an asynchronous federation.
            begun: What the client received at its start; read-only.
            server: The server's state before its step; read-only.
        """
        return update

    @abstractmethod
    def step(self, server: Server, aggregate: AggregateT, cohort: Cohort) -> dict[str, float]:
        """Update the server's state in place; skipped in a round without updates.

        Args:
            server: The server's state.
            aggregate: The reducer's result.
            cohort: The clients whose updates were combined.

        Returns:
            Metrics of the server by name, such as ``server/step_size``.
        """

    # ------------------------------------------------------------------ for show and for use

    def figures(self, server: Server) -> dict[str, Figure]:
        """Figures of the server's state by name, for TensorBoard, on the first process only; by default none."""
        return {}

    def release(self, task: LightningModule) -> nn.Module:
        """A trained task as a network for use without a federation; by default its ``network``, else the task.

        A method whose `adapt` changed the network's form and not its function restores the form.
        """
        network = getattr(task, "network", None)
        return network if isinstance(network, nn.Module) else task

    def tested(self, server: Server, round_idx: int, kind: str) -> Payload:
        """Tensors of the global model as it is tested, saved and handed out; by default the broadcast for tests.

        A method whose clients make some of them of what they receive (`start`) makes them here, too.
        """
        return self.broadcast(server, round_idx, kind, "test")

    def forecast(self, server: Server, round_idx: int, kind: str) -> Payload:
        """Names and shapes of a round's broadcast, for ``cost``, which never calls `step`.

        Also of tensors that are addressed to a client, where the first state of the server does not tell.
        """
        return self.broadcast(server, round_idx, kind)

    # ------------------------------------------------------------------ what the engine calls

    def arrived(self, updates: Updates, begun: Payload, server: Server) -> Updates:
        """`arrive` of updates whose clients received the same."""
        if type(self).arrive is Algorithm.arrive:
            return updates
        return Updates.of([self.arrive(update, begun, server) for update in updates])

    def terms(self, client: Client, batch: Any, public: bool = False) -> Terms:
        """The objective with the regularizer around it.

        A method that evaluates both at tensors other than the client's overrides this (`lit_fed.methods.per_fedavg`).
        """
        if self.regularizer is None or public:
            return self.objective(client, batch)
        return self.regularizer.terms(client, batch, self.objective)


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


def held_model(server: Server, kind: str) -> Payload:
    """The model of a kind in the server's state, from which clients train; empty for methods without one."""
    held: Payload = server["models"].get(kind, {}) if "models" in server else server.get("model", {})
    return held


def global_model(algorithm: Algorithm[Any], server: Server, round_idx: int, kind: str) -> dict[str, Tensor]:
    """The global model of a kind, as it is tested, by parameter and buffer name; empty for methods without one."""
    held = held_model(server, kind)
    if not held:
        return {}
    tested = algorithm.tested(server, round_idx, kind)
    return {**held, **{name: tensor for name, tensor in tested.items() if name in held}}
