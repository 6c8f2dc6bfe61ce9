"""A node: Flower starts a process for every message, which makes the node anew and lets it answer."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from lit_fed.federation.node.node import Node

from .parts import made, pack, unpack

app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    """Let the node of ``--node-config`` answer: its ``folder``, ``config``, ``clients`` ("0 1") and ``state_dir``."""
    own = context.node_config
    trainer, parts = made(own)
    clients = [int(one) for one in str(own["clients"]).split()]
    node = Node(trainer, *parts, clients=clients, folder=Path(str(own["state_dir"])))
    known = context.state.config_records.setdefault("lit_fed", ConfigRecord({"boot": node.boot}))
    node.boot = str(known["boot"])  # one node over all messages of a run
    with node.at_work():
        return Message(pack(node.handle(unpack(message.content))), reply_to=message)
