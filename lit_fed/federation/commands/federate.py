"""``lit-fed federate``: train a federation whose clients live on nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from os.path import isfile
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.endings import exit_reported
from lit_fed.command.reading.words import spelled
from lit_fed.federation.audit import Audit, Copy, audit_log
from lit_fed.federation.commands.deployed import ServersEnd, add_run, keys_of, make, signing_key
from lit_fed.federation.ends import keep_private
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate, run_to_continue
from lit_fed.federation.server.queue import QueuedRun, answer, at_hand, work
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.server.status import Status
from lit_fed.federation.transport.serving import RpcGrid, rpc_grid
from lit_fed.federation.transport.status_port import StatusPort, serving_status


@dataclass(frozen=True)
class _Options:
    """Options of the server.

    Args:
        server: address by which nodes know the server
        ckpt_path: checkpoint to resume from: last, a file or a run
        log: where a copy of each line of the audit log goes, beside its file
        queue: folder from which runs are taken, one after the other, in place of --config; see lit-fed submit
    """

    server: str = "127.0.0.1:9092"
    ckpt_path: str | None = None
    log: Copy | None = None
    queue: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and of the connection to nodes."""
    add_run(parser)
    parser.add_class_arguments(_Options, as_group=False)
    parser.add_class_arguments(ServersEnd, as_group=False)
    parser.add_class_arguments(StatusPort, as_group=False)
    parser.add_class_arguments(Gathering, "gathering")
    parser.add_class_arguments(Patience, "patience")


def run(call: Call) -> int:
    """Train like ``fit``."""
    settings = call.settings
    keep_private()
    patience = Patience(**settings.patience)
    security, node_keys = keys_of(settings)
    queue = at_hand() if settings.queue is None else Path(settings.queue)
    operate = None if queue is None else partial(answer, queue)

    def door(audit: Audit) -> AbstractContextManager[RpcGrid]:
        if node_keys is not None:
            node_keys.say = audit.say
        return rpc_grid(settings.server, security, settings.most_bytes, settings.bind, node_keys, operate)

    if queue is not None and settings.queue is not None:
        with suppress(KeyboardInterrupt):
            work(queue, partial(_command, call.words[1:]), door, settings.log)
        return 0
    trainer, parts = make(call)
    key = signing_key(trainer, security)
    with ExitStack() as stack:
        stack.enter_context(exit_reported())
        ckpt_path = stack.enter_context(run_to_continue(trainer, settings.ckpt_path))  # before it listens
        audit = stack.enter_context(audit_log(trainer.settings.logs / "audit", settings.log))
        grid = stack.enter_context(door(audit))
        trainer.callbacks.append(status := Status(grid))
        stack.enter_context(serving_status(StatusPort.of(settings), status))
        federate(
            grid, trainer, *parts, ckpt_path, patience, Gathering(**settings.gathering), settings.most_bytes,
            node_clients=node_keys, audit=audit, config=_hash_of_config(call.words), key=key,
        )  # fmt: skip
    return 0


def _command(words: Sequence[str], run: QueuedRun) -> list[str]:
    """The command of a run of the queue, with the server's own options."""
    own = [f"--config={run.folder / 'config.yaml'}", *words, "--queue", "null", "--ckpt_path", "last"]
    return [sys.executable, "-m", "lit_fed", "federate", *own, "--trainer.default_root_dir", str(run.folder)]


def _hash_of_config(words: Sequence[str]) -> str:
    """SHA-256 of the configuration if it is one file, else nothing."""
    files = [value for word, value in spelled(words) if word == "--config" and value is not None]
    return sha256(Path(files[0]).read_bytes()).hexdigest() if [*map(isfile, files)] == [True] else ""
