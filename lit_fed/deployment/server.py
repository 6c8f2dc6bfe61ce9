"""The server of a federation: the same trainer, whose clients live on nodes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from lit_fed.deployment.agreed import agreed
from lit_fed.deployment.executor import GridExecutor, Patience
from lit_fed.deployment.grid import Grid
from lit_fed.deployment.roster import Identity, Roster
from lit_fed.deployment.wire import MOST_BYTES
from lit_fed.errors import ConfigError
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.algorithm import Algorithm


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

    Raises:
        ConfigError: If a client does not come, or the parts cannot work together.
    """
    if (processes := trainer.fabric.world_size) > 1:
        raise ConfigError(
            f"trainer.devices makes {processes} processes, and the server of a federation is one; set it to 1"
        )
    identity = Identity(secrets.token_hex(8))
    say = trainer.fabric.print
    roster = Roster(grid, identity, agreed(trainer.settings.config), data.num_clients, say, limit)
    roster.wait_for_all(gathering_s)
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit", clients=())
    data.learn(roster.reports())
    tolerant = trainer.settings.on_client_failure == "skip"
    trainer.callbacks.insert(0, identity)
    trainer.make_executor = lambda session: GridExecutor(
        session, roster, trainer.channel, patience or Patience(), tolerant
    )
    trainer.fit(model, data, algorithm, ckpt_path)
