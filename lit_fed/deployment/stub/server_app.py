"""Does with Flower's grid what the server that lives beside this process says, until it says no more."""

from __future__ import annotations

import json
import socket

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from .blobs import pack, unpack
from .pipe import receive, send

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
def main(grid: Grid, context: Context) -> None:
    """Serve the server."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(context.run_config["socket"]))
        while True:
            asked = json.loads(receive(connection, 2**20))
            if asked["do"] == "nodes":
                found = {str(node.node_id): bytes(node.public_key or b"").hex() for node in grid.get_nodes()}
                send(connection, json.dumps(found).encode())
            elif asked["do"] == "push":
                message = Message(
                    pack(receive(connection, 2**40)), int(asked["node"]), "train", ttl=float(asked["ttl"])
                )
                (message_id,) = grid.push_messages([message])
                send(connection, json.dumps(message_id or "").encode())
            elif asked["do"] == "pull":
                replies = list(grid.pull_messages(asked["ids"]))
                send(connection, json.dumps(len(replies)).encode())
                for reply in replies:
                    error = f"{reply.error.code}: {reply.error.reason}" if reply.has_error() else ""
                    said = {"id": reply.metadata.reply_to_message_id, "error": error}
                    send(connection, json.dumps(said).encode(), b"" if error else unpack(reply.content))
            else:
                return
