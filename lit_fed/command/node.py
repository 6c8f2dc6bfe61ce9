"""``lit-fed node``: be some clients of a federation, where their data are."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.deployed import add_run, make
from lit_fed.command.table import Call
from lit_fed.deployment.node import Node
from lit_fed.deployment.wire import MOST_BYTES

OWN = ("client", "superlink", "state_dir", "histogram", "most_bytes")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options: those of a run, and who lives here."""
    add_run(parser)
    parser.add_argument(
        "--client", type=int | list[int], required=True, help="who lives here: an id, or a list of them"
    )
    parser.add_argument("--superlink", type=str, default="127.0.0.1:9092", help="address of the server's SuperLink")
    parser.add_argument("--state_dir", type=str, default="lit_fed_states", help="where the clients keep their states")
    parser.add_argument("--histogram", type=bool, default=True, help="report the samples of every class as well")
    parser.add_argument("--most_bytes", type=int, default=MOST_BYTES, help="the largest message that is taken")


def make_node(call: Call) -> Node:
    """The node that the settings describe."""
    settings = call.settings
    trainer, parts = make(call, OWN)
    clients = [settings.client] if isinstance(settings.client, int) else settings.client
    return Node(trainer, *parts, clients, Path(settings.state_dir), settings.histogram, settings.most_bytes)


def run(call: Call) -> int:
    """Serve until it is ended."""
    make_node(call)
    return 0
