"""The server of a federation: a `FederatedTrainer` whose clients are on nodes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.data.partitions.cut import named
from lit_fed.engine.loop.checkpoint import callback_states, read_checkpoint, run_folder
from lit_fed.engine.loop.run import Run
from lit_fed.engine.loop.runs import checkpoint_to_continue
from lit_fed.engine.storage.run_lock import sole_writer
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation.audit import Audit
from lit_fed.federation.ends import Alert, log_line
from lit_fed.federation.messages.frozen import Hashes, KnownHashes
from lit_fed.federation.messages.schema import Keep, NodeAnswer
from lit_fed.federation.messages.settings import agreed, signs
from lit_fed.federation.messages.wire import MOST_BYTES, Message
from lit_fed.federation.secure.summed import secure_sum_of
from lit_fed.federation.server.answers import answer_of
from lit_fed.federation.server.arrivals import ArrivalOrder, FlightExecutor, arrivals_of
from lit_fed.federation.server.audited import AuditedRun
from lit_fed.federation.server.executor import GridExecutor, Patience, ServerEnd
from lit_fed.federation.server.identity import Identity
from lit_fed.federation.server.roster import Gathering, Roster
from lit_fed.federation.transport.grid import Grid
from lit_fed.trainer import FederatedTrainer, Tasks

if TYPE_CHECKING:
    from lit_fed.data import FederatedDataModule
    from lit_fed.engine.method.algorithm import Algorithm
    from lit_fed.federation.keys.node_keys import Grant
    from lit_fed.federation.keys.statements import SigningKey


_PARTING_S = 120.0


class Parting(Callback):
    """Sends every node the end of a run, for prediction and evaluation without a server; failures go to the log."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    @override
    def on_fit_start(self, run: Run) -> None:
        """Give lines about failures a time and a level."""
        run.alert = lambda line: self.roster.say(Alert(line))

    @override
    def on_fit_end(self, run: Run) -> None:
        """Send the last model, and print which clients it did not reach."""
        federation, round_idx = run.federation, max(run.next_round - 1, 0)
        broadcast = federation.broadcast(round_idx, "predict")
        self.roster.refresh()
        messages, hashes = {}, KnownHashes()
        for node, home in self.roster.homes.items():
            tensors: dict[str, Payload] = {}
            held: Hashes = {}
            for kind in sorted({federation.kinds[client_id] for client_id in home.clients}):
                known = home.frozen.setdefault(kind, {})
                frozen, held[kind] = hashes.divide(kind, broadcast.frozen.get(kind, {}), known)
                tensors |= {f"payload/{kind}": broadcast.wire[kind], f"frozen/{kind}": frozen}
            if broadcast.addressed is not None:
                tensors |= {f"addressed/{one}": broadcast.addressed[one].wire for one in home.clients}
            versions = {str(client_id): federation.store.version(client_id) for client_id in home.clients}
            messages[node] = Message.pack(Keep(self.roster.identity.run_id, round_idx, versions, held), tensors)
        reached = self.roster.ask(messages, _PARTING_S, lambda _, answer: answer_of(answer, NodeAnswer))
        there = {client_id for node in reached for client_id in self.roster.homes[node].clients}
        if absent := set(range(federation.data.num_clients)) - there:
            what = self.roster.advice(absent, "resume with --ckpt_path last once they are connected")
            self.roster.say(Alert(f"the nodes of {named(absent)} did not save the end of the run; {what}"))


@contextmanager
def run_to_continue(trainer: FederatedTrainer, ckpt_path: str | None) -> Iterator[str | None]:
    """Find the checkpoint to resume from, and lock its run's folder, so that a second server is refused at once."""
    found = None if ckpt_path is None else checkpoint_to_continue(trainer.fabric, ckpt_path, trainer.settings.logs)
    with ExitStack() as held:
        if found is not None and found.name == "last.ckpt" and trainer.fabric.world_size == 1:  # others start a folder
            held.enter_context(sole_writer(trainer.fabric, run_folder(found) or found.parent))
        yield None if found is None else str(found)


def federate(
    grid: Grid,
    trainer: FederatedTrainer,
    model: Tasks,
    data: FederatedDataModule,
    algorithm: Algorithm[Any],
    ckpt_path: str | None = None,
    patience: Patience | None = None,
    gathering: Gathering | None = None,
    limit: int = MOST_BYTES,
    node_clients: Mapping[str, Grant] | None = None,
    audit: Audit | None = None,
    config: str = "",
    key: SigningKey | None = None,
) -> None:
    """Train a federation whose clients are on nodes.

    Args:
        grid: The transport.
        trainer: The trainer, with the settings of the run.
        model: The task.
        data: The population; `federate` sets up the shared sets only.
        algorithm: The method.
        ckpt_path: Resume from here, as in `FederatedTrainer.fit`.
        patience: The time-outs of a round.
        gathering: The start: how long to wait for clients, and for how many.
        limit: Maximum size of a message, bytes.
        node_clients: The clients that a node may claim, by the node's public key; None without keys.
        audit: The server's log; None writes none.
        config: SHA-256 of the run's configuration file, by which nodes that stand know it.
        key: Signs receipts of what nodes send, where the trainer writes a record; None without TLS.
    """
    if (processes := trainer.fabric.world_size) > 1:
        raise ConfigError(f"trainer.devices starts {processes} processes; it must be 1 for the server of a federation")
    arrivals = arrivals_of(trainer.participation)
    summed = secure_sum_of(trainer)
    identity = Identity(secrets.token_hex(8))
    settings = agreed(trainer.settings.config)
    say, num_classes = log_line if audit is None else audit.say, data.num_classes
    roster = Roster(grid, identity, settings, data.num_clients, say, limit, num_classes, node_clients, config)
    checkpoint = None if ckpt_path is None else checkpoint_to_continue(trainer.fabric, ckpt_path, trainer.settings.logs)
    done = False
    if checkpoint is not None:  # before nodes are greeted, so that a changed client is refused alone
        content = read_checkpoint(checkpoint)
        done = content["round_idx"] >= trainer.max_rounds
        states = callback_states(content, checkpoint)
        _learn(identity, states, checkpoint)
        if arrivals is not None:
            arrivals.learn(states, content["round_idx"], checkpoint)
        del content  # holds a model
    roster.gather(gathering or Gathering(), done)
    patience = patience or Patience()
    sums, receipts = None, None
    if signs(trainer, key, say) and key is not None:
        from lit_fed.federation.server.receipts import Receipting  # with cryptography, which not every run needs

        receipts = Receipting(roster, key, trainer.local.wrappers.withhold)
        (place,) = (place for place, one in enumerate(trainer.callbacks) if one.keeps_record)
        trainer.callbacks.insert(place + 1, receipts)
    if summed is not None:
        from lit_fed.federation.server.summing import Summing

        sums = Summing(roster, summed, patience.round_s, receipts)
    data.reserve(algorithm.public_size, algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit", clients=())
    data.census.learn(identity.begin(roster.present()))
    tolerant = trainer.settings.on_client_failure == "skip"
    trainer.callbacks.insert(0, identity)
    if arrivals is not None:
        trainer.participation = arrivals
        trainer.callbacks.insert(0, ArrivalOrder(arrivals))
    trainer.callbacks.append(Parting(roster))
    if audit is not None:
        trainer.callbacks.append(AuditedRun(audit, identity, settings))
    ends = trainer.channel
    channel = trainer.channel = ServerEnd(ends.uplink.codec, ends.downlink.codec, ends.seed)
    kind = GridExecutor if arrivals is None else FlightExecutor
    executor = partial(kind, roster=roster, channel=channel, patience=patience, tolerant=tolerant, sums=sums)
    executor = partial(executor, receipts=receipts)
    trainer.local = replace(trainer.local, executor=executor)
    trainer.fit(model, data, algorithm, None if checkpoint is None else str(checkpoint))


def _learn(identity: Identity, states: Mapping[str, Any], checkpoint: Path) -> None:
    """Take the clients' reports from the states of a checkpoint's callbacks; a simulation has none."""
    saved = states.get(Identity.__name__)
    try:
        if saved is not None:
            identity.load_state_dict(saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint} holds no reports of clients that can be read: {error!r}") from error
