"""The seam around a method: privacy, robust rules and attacks wrap whatever a method does, and none of them is one.

There are four places: the client's loader, its finished update, the reducer, and the released aggregate. All of them do
nothing by default, so that each kind of wrapper overrides those it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning import Fabric
from torch import Tensor

from lit_fed.arguments import Checked
from lit_fed.engine.method.algorithm import Algorithm, Cohort, Server
from lit_fed.engine.method.client import Client, LocalWork, Stage
from lit_fed.engine.method.reducers import Reducer
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Layout
from lit_fed.errors import ConfigError
from lit_fed.participation import Participation

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.data.population.census import ClientReport

STATE_PREFIX = "around."
"""Prefix of the wrappers' entries in the server's state."""

View = Literal["sum", "updates", "honest updates", "payloads"]
"""A view of a round on the server: the sum of its updates; single updates, for a rule; all honest updates, for an
attacker that knows them; each client's payload, for a codec and for the loop's metrics of clients.
"""

Tested = tuple[int, str, str, float]
"""Client, stage, metric and value, as a `lit_fed.engine.evaluation.protocols.ClientRow`."""


@dataclass(frozen=True, slots=True)
class WrappedRun:
    """The run that a wrapper is set up for.

    Args:
        algorithm: The method, set up.
        server: Its state.
        data: The population.
        participation: Who takes part.
        broadcast: The first round's.
        layout: Gives names, types and shapes of a round's updates, by its broadcast; of the first kind of network.
        common_places: Gives the places, of a layout's tensors one after the other, at which a round's updates can
            differ from its broadcast; None for all (`lit_fed.codecs.Codec.common_seed`).
        loops: The local loop of each kind (`lit_fed.engine.clients.local.LocalLoop`), whose task is at work.
        work: Length of a client's training in a round.
        protocols: What is measured.
        averaged: Names of the buffers that are averaged.
        max_rounds: Rounds of the run.
        on_client_failure: The setting ``trainer.on_client_failure``.
        seed: The run's seed.
        fabric: Devices and processes.
    """

    algorithm: Algorithm[Any]
    server: Server
    data: FederatedDataModule
    participation: Participation
    broadcast: Broadcast
    layout: Callable[[Broadcast], Layout]
    common_places: Callable[[Broadcast, Layout], Tensor | None]
    loops: Mapping[str, Any]
    work: LocalWork
    protocols: tuple[Any, ...]
    averaged: frozenset[str]
    max_rounds: int
    on_client_failure: str
    seed: int
    fabric: Fabric

    def check_kinds(self, key: str) -> None:
        """Refuse several kinds of network; the key is the wrapper's setting."""
        if len(self.loops) > 1:
            raise ConfigError(f"{key} needs one kind of network; trainer.kinds has several")

    def check_sends(self, key: str, verb: str) -> None:
        """Refuse a method whose clients send nothing; the verb says what the wrapper does to what they send."""
        if not self.layout(self.broadcast):
            method = type(self.algorithm).__name__
            raise ConfigError(f"{key} has nothing to {verb}: clients of {method} send nothing; leave it out")


@dataclass(kw_only=True)
class WrapperState:
    """State of a wrapper between rounds: the fields of a subclass, tensors and primitives, which checkpoints hold."""

    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that model cards leave out; their entries in a checkpoint begin with an underscore."""

    def as_state(self) -> dict[str, Any]:
        """The entries of a checkpoint."""
        return {self._entry(name): value for name, value in vars(self).items()}

    def load_state(self, entries: Mapping[str, Any]) -> None:
        """Take the entries of a checkpoint."""
        for name in vars(self):
            setattr(self, name, entries[self._entry(name)])

    def _entry(self, name: str) -> str:
        return f"_{name}" if name in self.unlisted else name


class Wrapper(Checked):
    """Something around a method; every place does nothing by default."""

    name = "wrapper"
    """Name of its entry in the server's state, and of its card."""

    sees: View = "updates"
    """View that its half on the server needs. With ``sum``, a wrapper outside of it may replace its reducer."""

    hides: ClassVar[Mapping[View, str]] = {}
    """Views that it leaves to nothing else in the run, each with the words by which the rest of a run is refused."""

    private: bool = False
    """Whether nothing but its release may depend on clients' data, such as the choice of the best round."""

    least_nodes: int = 0
    """Number of nodes that are sure to be in every sum; 0 where no nodes sum."""

    own_settings: tuple[str, ...] = ()
    """Settings that a federation's server and its nodes may set differently."""

    state: WrapperState = WrapperState()
    """Its state between rounds; `setup` makes a new one."""

    run: WrappedRun
    """The run that it is set up for; in `begin` and in rounds ``max_rounds`` is that of the call of ``fit``."""

    @property
    def tolerated_attackers(self) -> int | None:
        """The number of attackers in a cohort that it tolerates; None where it states none."""
        return None

    def negotiate(self, others: Sequence[Wrapper]) -> None:
        """Refuse settings that do not fit those of the run's other wrappers, and take from these what it needs."""

    def setup(self) -> None:
        """Check that the method can be wrapped, before any training, and make the state."""

    def prepare(self, resumed: bool) -> None:
        """Open files that a run needs, before its folder is made, on every process; not called on nodes.

        Args:
            resumed: Whether the run goes on with what another call of ``fit`` began.
        """

    def begin(self) -> None:
        """Called before the first round of a call of ``fit``, on every process; not called on nodes.

        The state is that of the checkpoint, if the run is resumed.
        """

    def settle(self) -> None:
        """Called on a node in place of `prepare` and `begin`, before its clients train."""

    def report(self, report: ClientReport, client_id: int) -> ClientReport:
        """A node's report of a client's data to the server, after `settle`."""
        return report

    def loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        """The loader that a client trains on."""
        return loader

    def visible_data(self, data: FederatedDataModule) -> Any:
        """What a task sees as ``self.trainer.datamodule`` in training."""
        return data

    def on_client(self, update: ClientUpdate, client: Client) -> ClientUpdate:
        """A client's finished update, where the client is, before it is stored, encoded or sent.

        Args:
            update: Names, shapes and types stay as they are.
            client: The client; ``client.received`` is the broadcast that the update was trained from.
        """
        return update

    def on_clients(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> list[ClientUpdate]:
        """`on_client` of several clients at once; all of one kind of network, with one ``client.received``."""
        return [self.on_client(update, client) for update, client in zip(updates, clients, strict=True)]

    keeps_finite: bool = False
    """Whether `on_client` leaves a finite update finite."""

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        """The round's reducer: the method's, another in its place, or one around it."""
        return below

    def release(self, aggregate: Any, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        """The aggregate on which the server steps, from the reducer's result: the same on every process.

        Args:
            aggregate: The reducer's result; None where no update arrived.
            cohort: The clients whose updates arrived.

        Returns:
            The aggregate, None to leave the server as it is; the cohort; metrics by name.
        """
        return aggregate, cohort, {}

    def client_rows(self) -> list[tuple[int, str, float]]:
        """Client, metric and value for ``clients.csv``, of the round that was released last."""
        return []

    def evaluation_metrics(self, tests: Sequence[Tested]) -> dict[str, float]:
        """Metrics from the results of an evaluation's clients."""
        return {}

    def card(self) -> str | None:
        """A text in Markdown for readers of the run's folder, written as ``<name>.md`` after every round."""
        return None

    def closing_line(self) -> str | None:
        """A line for the terminal at the end of a run; None for none."""
        return None

    def exhausted(self, round_idx: int) -> str | None:
        """Why a round may not be run; None where it may."""
        return None

    withhold: bool = False
    """Whether values of single clients and sums over them are kept out of files: see `RoundRecord.withheld`."""

    def seal(self, content: Iterable[bytes]) -> str | None:
        """A name of hexadecimal digits for what a checkpoint must not hold, which hides its content.

        None leaves everything in the checkpoint.
        """
        return None


class Privacy(Wrapper):
    """Bounds the information of a released model about the data behind it: `trainer.privacy`."""

    name = "privacy"
    private = True
    own_settings: tuple[str, ...] = ("key_file", "withhold")
    hides: ClassVar[Mapping[View, str]] = {
        "updates": "looks at single updates, which trainer.privacy hides in a sum",
        "honest updates": "{} forges updates from all honest ones, which trainer.privacy bounds one by one",
    }


class Aggregation(Wrapper):
    """Combines updates differently from the method's mean: `trainer.aggregation`."""

    name = "aggregation"


class Attack(Wrapper):
    """Makes some clients attack the training: `trainer.attack`."""

    name = "attack"
    sees: View = "sum"


class Wrappers:
    """All wrappers of a run, from the inside out; the server's state holds the state of each.

    Args:
        stack: The wrappers, None for those that the run lacks. A client's update passes them in this order; on the
            server the last is outermost, and its reducer takes the updates first.

    Raises:
        ConfigError: If one must see what another hides, or their settings do not fit.
    """

    def __init__(self, stack: Sequence[Wrapper | None] = ()) -> None:
        self.stack = tuple(wrapper for wrapper in stack if wrapper is not None)
        self.private = any(wrapper.private for wrapper in self.stack)
        """See `Wrapper.private`."""
        self.withhold = any(wrapper.withhold for wrapper in self.stack)
        """See `Wrapper.withhold`."""
        self.keep_finite = all(wrapper.keeps_finite for wrapper in self.stack)
        """See `Wrapper.keeps_finite`."""
        self.sees_sums_only = any("payloads" in wrapper.hides for wrapper in self.stack)
        """Whether the server sees sums only: the loop then keeps no value of a single client."""
        for wrapper in self.stack:
            self.check_view(wrapper.name, wrapper, wrapper.sees)
            wrapper.negotiate([other for other in self.stack if other is not wrapper])

    def check_view(self, key: str, part: object, sees: View) -> None:
        """Refuse a part of the run, which is the trainer's setting `key`, if a wrapper hides what it must see."""
        for wrapper in self.stack:
            if wrapper is not part and (reason := wrapper.hides.get(sees)) is not None:
                raise ConfigError(f"trainer.{key} {reason.format(type(part).__name__)}; leave one out")

    def setup(self, run: WrappedRun) -> None:
        """See `Wrapper.setup`; refuse a method that addresses clients, if the server sees no single update to do so."""
        for wrapper in self.stack:
            if run.algorithm.addresses and (wrapper.private or "updates" in wrapper.hides):
                raise ConfigError(
                    f"algorithm {type(run.algorithm).__name__} makes each client a message from others' updates, which "
                    f"trainer.{wrapper.name} neither shows nor accounts for; leave one out"
                )
            wrapper.run = run
            wrapper.setup()
            run.server[_key(wrapper)] = wrapper.state.as_state()

    def prepare(self, resumed: bool) -> None:
        """See `Wrapper.prepare`."""
        for wrapper in self.stack:
            wrapper.prepare(resumed)

    def begin(self, max_rounds: int) -> None:
        """See `Wrapper.begin`."""
        for wrapper in self.stack:
            wrapper.run = replace(wrapper.run, max_rounds=max_rounds)
            wrapper.state.load_state(wrapper.run.server[_key(wrapper)])
            wrapper.begin()
            wrapper.run.server[_key(wrapper)] = wrapper.state.as_state()

    def settle(self) -> None:
        """See `Wrapper.settle`."""
        for wrapper in self.stack:
            wrapper.settle()

    def report(self, report: ClientReport, client_id: int) -> ClientReport:
        """See `Wrapper.report`."""
        return reduce(lambda report, wrapper: wrapper.report(report, client_id), self.stack, report)

    def loader_of(self, stage: Stage) -> Callable[[Iterable[Any], Client], Iterable[Any]] | None:
        """The function around a client's loader; None where there is none."""
        return self._loader if self.stack and stage == "train" else None

    def _loader(self, loader: Iterable[Any], client: Client) -> Iterable[Any]:
        return reduce(lambda loader, wrapper: wrapper.loader(loader, client), self.stack, loader)

    def visible_data(self, data: Any) -> Any:
        """See `Wrapper.visible_data`."""
        return reduce(lambda data, wrapper: wrapper.visible_data(data), self.stack, data)

    def on_clients(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> Sequence[ClientUpdate]:
        """See `Wrapper.on_clients`."""
        for wrapper in self.stack if updates else ():
            updates = wrapper.on_clients(updates, clients)
        return updates

    def reducer(self, below: Reducer[Any], broadcast: Broadcast) -> Reducer[Any]:
        """See `Wrapper.reducer`."""
        return reduce(lambda below, wrapper: wrapper.reducer(below, broadcast), self.stack, below)

    def release(self, aggregate: Any, cohort: Cohort) -> tuple[Any, Cohort, dict[str, float]]:
        """See `Wrapper.release`."""
        metrics: dict[str, float] = {}
        for wrapper in reversed(self.stack):  # the outermost reducer's result first
            aggregate, cohort, released = wrapper.release(aggregate, cohort)
            wrapper.run.server[_key(wrapper)] = wrapper.state.as_state()
            metrics |= released
        return aggregate, cohort, metrics

    def client_rows(self) -> list[tuple[int, str, float]]:
        """See `Wrapper.client_rows`."""
        return [row for wrapper in self.stack for row in wrapper.client_rows()]

    def evaluation_metrics(self, tests: Sequence[Tested]) -> dict[str, float]:
        """See `Wrapper.evaluation_metrics`."""
        return {name: value for wrapper in self.stack for name, value in wrapper.evaluation_metrics(tests).items()}

    def exhausted(self, round_idx: int) -> str | None:
        """See `Wrapper.exhausted`."""
        return next((why for wrapper in self.stack if (why := wrapper.exhausted(round_idx)) is not None), None)

    def cards(self) -> dict[str, str]:
        """The cards by name."""
        return {wrapper.name: card for wrapper in self.stack if (card := wrapper.card()) is not None}

    def closing_lines(self) -> list[str]:
        """The lines of `Wrapper.closing_line`."""
        return [line for wrapper in self.stack if (line := wrapper.closing_line()) is not None]

    def seal(self, content: Iterable[bytes]) -> str | None:
        """See `Wrapper.seal`."""
        return next((seal for wrapper in self.stack if (seal := wrapper.seal(content)) is not None), None)


def _key(wrapper: Wrapper) -> str:
    """The entry of a wrapper in the server's state."""
    return f"{STATE_PREFIX}{wrapper.name}"
