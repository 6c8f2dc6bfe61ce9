"""``lit-fed federate``: train a federation whose clients live on nodes."""

from __future__ import annotations

from contextlib import ExitStack

from jsonargparse import ArgumentParser

from lit_fed.command.commands.deployed import add_run, make
from lit_fed.command.endings import ending_told
from lit_fed.command.table import Call
from lit_fed.deployment.ends import check_installed, keep_private
from lit_fed.deployment.executor import Patience
from lit_fed.deployment.node_keys import read_node_keys
from lit_fed.deployment.roster import Gathering
from lit_fed.deployment.security import Security
from lit_fed.deployment.server import federate
from lit_fed.deployment.serving import fleet_grid
from lit_fed.deployment.wire import MOST_BYTES

OWN = (
    "superlink", "bind", "ckpt_path", "patience", "gathering", "most_bytes", "ca", "certificate", "key", "node_keys",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and of the connection to nodes."""
    add_run(parser)
    parser.add_argument(
        "--superlink", type=str, default="127.0.0.1:9092", help="address by which nodes know the server"
    )
    parser.add_argument(
        "--bind", type=str | None, default=None, help="address to listen at, if it differs from --superlink"
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
        help="file of nodes' public keys, each with the clients that the node may serve",
    )


def run(call: Call) -> int:
    """Train like ``fit``."""
    settings = call.settings
    check_installed()
    keep_private()
    patience = Patience(**settings.patience)
    security = Security(settings.ca, settings.certificate, settings.key)
    node_clients = None if settings.node_keys is None else read_node_keys(settings.node_keys)
    trainer, parts = make(call, OWN)
    with ExitStack() as stack:
        stack.enter_context(ending_told())
        grid = stack.enter_context(
            fleet_grid(
                settings.superlink, security, settings.most_bytes, 2 * patience.round_s, settings.bind, node_clients
            )
        )
        federate(
            grid, trainer, *parts, settings.ckpt_path, patience, Gathering(**settings.gathering), settings.most_bytes,
            node_clients=node_clients,
        )  # fmt: skip
    return 0
