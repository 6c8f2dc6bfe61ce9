"""A running federation: its parts, broadcasts and global models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning import Fabric
from torch import Tensor

from lit_fed.engine.clients.executor import Executor, Question
from lit_fed.engine.clients.local import LocalLoop
from lit_fed.engine.clients.session import Session
from lit_fed.engine.lightning.metric_names import MetricNames
from lit_fed.engine.method.algorithm import Algorithm, Server, global_model, held_model
from lit_fed.engine.method.client import Stage
from lit_fed.engine.method.kinds import Kinds
from lit_fed.engine.method.wrapper import Wrappers
from lit_fed.engine.storage.store import ClientStore
from lit_fed.engine.wire.channel import Channel
from lit_fed.engine.wire.payload import Addressed, Arrival, Broadcast, ClientUpdate, Payload, not_finite
from lit_fed.engine.wire.workers import Workers
from lit_fed.errors import ClientFailure, ConfigError, NonFiniteServer
from lit_fed.participation import Participation
from lit_fed.tracking import tracked

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule


_GLOBAL = "the global model"


@dataclass(slots=True)
class Federation:
    """The parts of a running federation.

    Args:
        fabric: Launched.
        workers: The processes over which clients are spread.
        algorithm: The method.
        server: The server's state.
        data: The population.
        participation: Draws the cohorts.
        kinds: The kind of network of each client.
        channel: The wire.
        store: The clients' states.
        session: Enters clients.
        executor: Trains cohorts.
        seed: The seed of the run.
        tolerant: Whether protocols leave out clients that fail (``trainer.on_client_failure``).
        names: Directions of metrics, and the metric that chooses the best round.
        begun_infinite: Names of the server's entries that were not finite before the first round.
        versions: Earlier rounds' broadcasts that clients still work on, by round.
    """

    fabric: Fabric
    workers: Workers
    algorithm: Algorithm[Any]
    server: Server
    data: FederatedDataModule
    participation: Participation
    kinds: Kinds
    channel: Channel
    store: ClientStore
    session: Session
    executor: Executor
    seed: int
    tolerant: bool = False
    names: MetricNames = field(default_factory=MetricNames)
    begun_infinite: frozenset[str] = frozenset()
    versions: dict[int, Broadcast] = field(default_factory=dict)
    _printed_causes: set[tuple[str, str]] = field(default_factory=set)

    @property
    def wrappers(self) -> Wrappers:
        """Wrappers around the method."""
        return self.session.wrappers

    @property
    def loops(self) -> Mapping[str, LocalLoop]:
        """The local loop of each kind."""
        return self.session.loops

    def broadcast(self, round_idx: int, stage: Stage = "train") -> Broadcast:
        """Send a round's payloads across the downlink.

        Raises:
            NonFiniteServer: If the downlink's codec turns a finite value into NaN or infinity.
        """
        self.session.divide(round_idx)
        arrived = {
            kind: self._crossed(self.algorithm.broadcast(self.server, round_idx, kind, stage), round_idx, kind)
            for kind in self.kinds.names
        }
        frozen = {}
        for kind, loop in self.loops.items():
            names = loop.model.split.frozen
            held = held_model(self.server, kind)
            frozen[kind] = {name: held[name] for name in names if name in held}
        return Broadcast(
            round_idx,
            {kind: arrival.payload for kind, arrival in arrived.items()},
            frozen,
            {kind: arrival.num_bytes for kind, arrival in arrived.items()},
            {kind: arrival.wire for kind, arrival in arrived.items()},
            self._addressed(arrived, round_idx, stage) if self.algorithm.addresses else None,
        )

    def _addressed(self, arrived: Mapping[str, Arrival], round_idx: int, stage: Stage) -> Addressed:
        """The payloads of `Algorithm.address` by client, after the downlink."""

        def make(client_id: int) -> Arrival:
            kind = self.kinds[client_id]
            sent = self.algorithm.address(self.server, client_id, round_idx, kind, stage)
            if twice := sorted(sent.keys() & arrived[kind].payload.keys()):
                method = type(self.algorithm).__name__
                raise ConfigError(
                    f"algorithm {method} broadcasts and addresses {twice[0]!r}; give one of them a prefix"
                )
            return self._crossed(sent, round_idx, kind)

        return Addressed(make)

    def _crossed(self, sent: Payload, round_idx: int, kind: str) -> Arrival:
        """A payload after the downlink, whose codec must keep finite values finite."""
        downlink = self.channel.downlink
        arrival = downlink.cross(sent, self.channel.down(round_idx, kind))
        if downlink.codec is not None and (odd := not_finite(arrival.payload, not_finite(sent))):
            raise NonFiniteServer(
                f"{odd[0]} of the server's payload in round {round_idx} is no longer finite after "
                "trainer.downlink_codec; choose one with a wider range"
            )
        return arrival

    def ask(self, question: Question, client_ids: Sequence[int], broadcast: Broadcast) -> Iterator[ClientUpdate]:
        """Ask clients, every process its own; yield this process's answers.

        Called on every process with the same clients. Tolerated failures are printed once for each cause.

        Raises:
            ClientFailure: If a client of any process fails and this is not tolerated.
        """
        failed = list[tuple[int, str, str]]()
        mine = self.workers.share(client_ids, self.data.census.num_samples)
        for outcome in tracked(self.executor.ask(question, mine, broadcast), "evaluating", len(mine)):
            if not isinstance(outcome, ClientFailure):
                yield outcome
                continue
            failed.append((outcome.client_id, outcome.cause, outcome.details))
            if not self.tolerant:
                break  # the other processes learn of it below
        for client_id, cause, details in sorted(one for part in self.workers.gather(failed) for one in part):
            failure = ClientFailure(client_id, broadcast.round_idx, cause, details, protocol=question.protocol)
            if not self.tolerant:
                raise failure
            if (question.protocol, cause) not in self._printed_causes:
                self._printed_causes.add((question.protocol, cause))
                what = f"its {question.protocol} metrics are missing"
                self.fabric.print(f"{failure}; {what}; further failures of this cause are not printed")

    def keep_version(self, broadcast: Broadcast) -> None:
        """Before a round's step, keep the broadcasts on which clients still work, and no others."""
        needed = self.participation.in_flight(broadcast.round_idx)
        self.versions = {version: one for version, one in self.versions.items() if version in needed}
        for version, one in self.versions.items():
            if one.addressed is not None:
                one.addressed = {client_id: one.addressed[client_id] for client_id in needed[version]}
        if broadcast.round_idx in needed:
            self.versions[broadcast.round_idx] = broadcast.detached(needed[broadcast.round_idx])

    def not_finite(self, round_idx: int) -> list[str]:
        """Names of NaN or infinite entries of the server's state and global models after a round.

        Entries that the method began with as such, like a best loss or an attention mask, are skipped.
        """
        held = {**self.server, _GLOBAL: self.global_models(round_idx)}
        return not_finite(held, self.begun_infinite)

    def global_model(self, round_idx: int, kind: str | None = None) -> dict[str, Tensor]:
        """The global model of a kind, by default the first; empty for methods without one."""
        return global_model(self.algorithm, self.server, round_idx, kind or self.kinds.names[0])

    def is_partly_personal(self, round_idx: int, kind: str) -> bool:
        """Whether models of a kind have a personal part of which the method broadcasts no value for tests."""
        personal = self.loops[kind].model.split.personal
        return bool(set(personal) - self.algorithm.broadcast(self.server, round_idx, kind, "test").keys())

    def global_models(self, round_idx: int) -> dict[str, dict[str, Tensor]]:
        """The global model of every kind that has one."""
        models = {kind: self.global_model(round_idx, kind) for kind in self.kinds.names}
        return {kind: model for kind, model in models.items() if model}
