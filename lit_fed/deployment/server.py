"""The server of a federation: the same trainer, whose clients live on nodes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lit_fed.callbacks import Callback
from lit_fed.data.partitions.cut import named
from lit_fed.deployment.agreed import agreed
from lit_fed.deployment.executor import GridExecutor, Patience, ServerEnd
from lit_fed.deployment.grid import Grid
from lit_fed.deployment.heard import kept
from lit_fed.deployment.roster import Identity, Roster
from lit_fed.deployment.wire import MOST_BYTES, Message
from lit_fed.engine.clients.session import Session
from lit_fed.engine.loop.run import Run
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import ConfigError
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm


_PARTING_S = 120.0


class Parting(Callback):
    """Leaves every node the end of a run, so that its clients can predict and be tested without a server.

    Args:
        roster: Knows the nodes.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def on_fit_end(self, run: Run) -> None:
        """Send the last model, and say whom it has not reached."""
        federation, round_idx = run.federation, max(run.next_round - 1, 0)
        broadcast = federation.broadcast(round_idx, "predict")
        self.roster.refresh()
        messages = {}
        for node, home in self.roster.homes.items():
            tensors: dict[str, Payload] = {}
            for kind in sorted({federation.kinds[one] for one in home.clients}):
                tensors |= {f"payload/{kind}": broadcast.wire[kind], f"frozen/{kind}": broadcast.frozen.get(kind, {})}
            versions = {str(one): federation.store.version(one) for one in home.clients}
            fields = {"run": self.roster.identity.run_id, "round": round_idx, "versions": versions}
            messages[node] = Message("keep", fields, tensors)
        reached = self.roster.ask(messages, _PARTING_S, lambda _, answer: kept(answer))
        there = {one for node in reached for one in self.roster.homes[node].clients}
        if absent := set(range(federation.data.num_clients)) - there:
            run.fabric.print(
                f"the nodes of {named(absent)} were not there to keep the end of the run; go on with it once "
                "they are, by --ckpt_path last"
            )


def federate(
    grid: Grid,
    trainer: FederatedTrainer,
    model: Tasks,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    ckpt_path: str | None = None,
    patience: Patience | None = None,
    gathering_s: float = 120.0,
    limit: int = MOST_BYTES,
    node_clients: Mapping[str, frozenset[int]] | None = None,
) -> None:
    """Train a federation whose clients live on nodes.

    Args:
        grid: Reaches the nodes.
        trainer: With the settings of the run.
        model: What is learnt.
        data: The population, not set up yet; of nobody here but for what all share.
        algorithm: How it is federated.
        ckpt_path: Resume from here, as in `FederatedTrainer.fit`.
        patience: How long to wait in a round.
        gathering_s: Seconds in which all clients must have come at the start.
        limit: The size of the largest message that is sent or taken.
        node_clients: By the public key of a node: who may live there. None where there are no keys.

    Raises:
        ConfigError: If a client does not come, or the parts cannot work together.
    """
    if (processes := trainer.fabric.world_size) > 1:
        raise ConfigError(
            f"trainer.devices makes {processes} processes, and the server of a federation is one; set it to 1"
        )
    identity = Identity(secrets.token_hex(8))
    say = trainer.fabric.print
    settings = agreed(trainer.settings.config)
    roster = Roster(grid, identity, settings, data.num_clients, say, limit, data.num_classes, node_clients)
    roster.wait_for_all(gathering_s)
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit", clients=())
    data.learn(roster.reports())
    tolerant = trainer.settings.on_client_failure == "skip"
    trainer.callbacks.insert(0, identity)
    trainer.callbacks.append(Parting(roster))
    channel = trainer.channel = ServerEnd(trainer.channel.uplink.codec, trainer.channel.downlink.codec)

    def executor(session: Session) -> GridExecutor:
        return GridExecutor(session, roster, channel, patience or Patience(), tolerant)

    trainer.local = replace(trainer.local, executor=executor)
    trainer.fit(model, data, algorithm, ckpt_path)
