"""``lit-fed federate``: train a federation whose clients live on nodes."""

from __future__ import annotations

from contextlib import ExitStack

from jsonargparse import ArgumentParser

from lit_fed.command.commands.deployed import add_run, make
from lit_fed.command.endings import ending_told
from lit_fed.command.table import Call
from lit_fed.deployment.ends import keep_private, log_line
from lit_fed.deployment.executor import Patience
from lit_fed.deployment.node_keys import NodeKeys
from lit_fed.deployment.roster import Gathering
from lit_fed.deployment.security import Security
from lit_fed.deployment.server import federate
from lit_fed.deployment.serving import rpc_grid
from lit_fed.deployment.status import status_page
from lit_fed.deployment.wire import MOST_BYTES

OWN = (
    "server", "bind", "ckpt_path", "patience", "gathering", "most_bytes", "ca", "certificate", "key", "node_keys",
    "revoked", "status_port",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and of the connection to nodes."""
    add_run(parser)
    parser.add_argument("--server", type=str, default="127.0.0.1:9092", help="address by which nodes know the server")
    parser.add_argument(
        "--bind", type=str | None, default=None, help="address to listen at, if it differs from --server"
    )
    parser.add_argument(
        "--ckpt_path", type=str | None, default=None, help="checkpoint to resume from: last, a file or a run"
    )
    parser.add_class_arguments(Gathering, "gathering")
    parser.add_argument(
        "--most_bytes", type=int, default=MOST_BYTES, help="size of the largest message, sent or received"
    )
    parser.add_class_arguments(Patience, "patience")
    parser.add_argument("--ca", type=str | None, default=None, help="certificate of the authority, for TLS")
    parser.add_argument("--certificate", type=str | None, default=None, help="the server's certificate, for TLS")
    parser.add_argument("--key", type=str | None, default=None, help="private key of the server's certificate")
    parser.add_argument(
        "--node_keys",
        type=str | None,
        default=None,
        help="file of nodes' certificates, each with the clients that the node may serve",
    )
    parser.add_argument("--revoked", type=str | None, default=None, help="list of keys that are refused from now on")
    parser.add_argument(
        "--status_port",
        type=int | None,
        default=None,
        help="port on 127.0.0.1 of a page with the run's state, JSON at / and Prometheus text at /metrics",
    )


def run(call: Call) -> int:
    """Train like ``fit``."""
    settings = call.settings
    keep_private()
    patience = Patience(**settings.patience)
    security = Security(settings.ca, settings.certificate, settings.key)
    node_keys = None if settings.node_keys is None else NodeKeys(settings.node_keys, settings.revoked, log_line)
    trainer, parts = make(call, OWN)
    with ExitStack() as stack:
        stack.enter_context(ending_told())
        grid = stack.enter_context(rpc_grid(settings.server, security, settings.most_bytes, settings.bind, node_keys))
        if settings.status_port is not None:
            trainer.callbacks.append(stack.enter_context(status_page(settings.status_port, grid)))
        federate(
            grid, trainer, *parts, settings.ckpt_path, patience, Gathering(**settings.gathering), settings.most_bytes,
            node_clients=node_keys,
        )  # fmt: skip
    return 0
