"""Hands a message to the node that lives beside this process, and its answer back."""

from __future__ import annotations

import socket

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .blobs import pack, unpack
from .pipe import receive, send

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
def hand_on(message: Message, context: Context) -> Message:
    """Ask the node."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(context.node_config["socket"]))
        send(connection, unpack(message.content))
        answer = receive(connection, 2**40)
    return Message(pack(answer), reply_to=message)
