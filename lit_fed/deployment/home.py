"""Clients of a finished run where they live: their models predict and are tested without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed.data.population.naming import called
from lit_fed.deployment.kept import read
from lit_fed.deployment.node import settle
from lit_fed.engine.evaluation.prediction import write_predictions
from lit_fed.engine.evaluation.protocols import EvalSubset, Protocol, check_protocols
from lit_fed.engine.wire.broadcast import Broadcast
from lit_fed.errors import ConfigError
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm


class Home:
    """Some clients of a finished run, at home: their models predict and are tested without a server.

    Args:
        trainer: With the settings of the run.
        model: What was learnt.
        data: The data, not set up yet; they are, for these clients only.
        algorithm: How it was federated.
        clients: Who, by position; all that live here by default.
        folder: Where the node keeps their states.
        stage: What is to be done.

    Raises:
        CheckpointError: If nothing is kept here.
        ConfigError: For clients that do not live here, or parts that cannot work together.
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
        self.kept = read(folder)
        self.clients = sorted(self.kept.versions) if clients is None else sorted(set(clients))
        if absent := [one for one in self.clients if one not in self.kept.versions]:
            there = ", ".join(called(data, one) for one in sorted(self.kept.versions))
            raise ConfigError(f"client {called(data, absent[0])} does not live in {folder}, where those are: {there}")
        self.run = settle(trainer, model, data, algorithm, self.clients, stage)
        self.federation = self.run.federation
        device, store = self.federation.fabric.device, self.federation.store
        if odd := {self.federation.kinds[one] for one in self.clients} - self.kept.payloads.keys():
            raise ConfigError(f"{folder} keeps no model of the kind {min(odd)!r}; use the configuration of the run")
        store.open(folder / self.kept.run_id)
        versions = {str(one): version for one, version in self.kept.versions.items() if version is not None}
        store.load_state_dict(versions, self.kept.round_idx + 1)
        moved = [
            {kind: {name: tensor.to(device) for name, tensor in entry.items()} for kind, entry in group.items()}
            for group in (self.kept.payloads, self.kept.frozen)
        ]
        self.broadcast = Broadcast(self.kept.round_idx, moved[0], moved[1])

    def predict(self, client_id: int, output: Path, inputs: Path | None = None) -> None:
        """Write what a client's model predicts on the client's own test data, or on inputs of another file.

        Args:
            client_id: The client, by position.
            output: As `lit_fed.engine.evaluation.prediction.check_output` takes it.
            inputs: Predict on these.
        """
        with self.federation.session.at_work("predict"):
            write_predictions(self.federation, output, client_id, self.kept.round_idx, self.broadcast, inputs)

    def evaluate(self, subset: EvalSubset) -> dict[int, dict[str, float]]:
        """By client: what all protocols that ask clients find on the client's own data."""
        check_protocols([], self.federation, subset)
        asking = [one for one in self.run.settings.protocols if type(one).answer is not Protocol.answer]
        found: dict[int, dict[str, float]] = {}
        with self.federation.session.at_work("validate" if subset == "val" else "test"):
            for protocol in asking:
                asked: Callable[[Any], Any] = getattr(protocol, "clients", lambda _: self.clients)
                for client_id in (one for one in asked(self.federation) if one in self.clients):
                    answer = protocol.answer(self.federation, int(client_id), self.broadcast, subset)
                    metrics = {} if answer is None else answer.metrics
                    row = found.setdefault(int(client_id), {})
                    row |= {f"{protocol.name}/{name}": value for name, value in metrics.items()}
        return found
