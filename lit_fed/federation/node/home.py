"""Prediction and evaluation with clients' models of a finished run, on their node and without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed.data.population.naming import called
from lit_fed.engine.evaluation.prediction import write_predictions
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol, check_protocols
from lit_fed.engine.wire.payload import Arrival, Broadcast
from lit_fed.errors import ConfigError
from lit_fed.federation.node.kept import read
from lit_fed.federation.node.run import settle
from lit_fed.networks.base import given
from lit_fed.tensors import map_tensors
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm


class Home:
    """Clients of a finished run on their node.

    Args:
        trainer: The trainer, with the settings of the run.
        model: The task.
        data: The data; `Home` sets them up for these clients only.
        algorithm: The method.
        clients: Positions of the clients; by default all clients of the node.
        folder: The node's folder.
        stage: The stage to set up.

    Raises:
        CheckpointError: If the folder holds no finished run.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        model: Tasks,
        data: FederatedDataModule,
        algorithm: Algorithm[Any],
        clients: list[int] | None,
        folder: Path,
        stage: Any,
    ) -> None:
        self.end = read(folder)
        self.clients = sorted(self.end.versions) if clients is None else sorted(set(clients))
        if absent := [client_id for client_id in self.clients if client_id not in self.end.versions]:
            there = ", ".join(called(data, client_id) for client_id in sorted(self.end.versions))
            raise ConfigError(f"{folder} has no state of client {called(data, absent[0])}; its clients are {there}")
        self.run = settle(trainer, model, data, algorithm, self.clients, stage)
        self.federation = self.run.federation
        device, store = self.federation.fabric.device, self.federation.store
        if odd := {self.federation.kinds[client_id] for client_id in self.clients} - self.end.payloads.keys():
            raise ConfigError(f"{folder} has no model of the kind {min(odd)!r}; use the configuration of the run")
        store.open(folder / self.end.run_id)
        versions = {str(client_id): version for client_id, version in self.end.versions.items() if version is not None}
        store.load_state_dict(versions, self.end.round_idx + 1)
        own = {kind: self.federation.loops[kind].model.initial for kind in self.end.payloads}
        bases = {kind: given(self.end.base.get(kind, {}), own[kind], folder) for kind in own}
        frozen = {kind: {**entry, **bases.get(kind, {})} for kind, entry in self.end.frozen.items()}
        held = (self.end.payloads, frozen, self.end.addressed)
        payloads, frozen, own_messages = map_tensors(held, lambda tensor: tensor.to(device))
        self.broadcast = Broadcast(self.end.round_idx, payloads, frozen)
        if self.federation.algorithm.addresses:
            self.broadcast.addressed = {i: Arrival({}, payload, 0) for i, payload in own_messages.items()}

    def predict(self, client_id: int, output: Path, inputs: Path | None = None) -> None:
        """Write predictions of a client's model.

        Args:
            client_id: The client's position.
            output: A path that `lit_fed.engine.evaluation.prediction.check_output` accepts.
            inputs: A file of inputs; by default the client's test data.
        """
        with self.federation.session.at_work("predict"):
            write_predictions(self.federation, output, client_id, self.end.round_idx, self.broadcast, inputs)

    def evaluate(self, subset: EvalSubset) -> dict[int, dict[str, float]]:
        """Evaluate every client on its data with all protocols that ask clients; return the metrics by client."""
        check_protocols([], self.federation, subset)
        asking = [protocol for protocol in self.run.settings.protocols if type(protocol).answer is not Protocol.answer]
        metrics_by_client: dict[int, dict[str, float]] = {}
        with self.federation.session.at_work("validate" if subset == "val" else "test"):
            for protocol in asking:
                asked: Callable[[Any], Any] = getattr(protocol, "clients", lambda _: self.clients)
                mine = [int(client_id) for client_id in asked(self.federation) if client_id in self.clients]
                rows = {client_id: metrics_by_client.setdefault(client_id, {}) for client_id in mine}
                for answer in self.federation.ask(protocol.question(self.federation, subset), mine, self.broadcast):
                    named = {f"{protocol.name}/{name}": value for name, value in answer.metrics.items()}
                    rows[answer.client_id].update(named)
        return metrics_by_client
