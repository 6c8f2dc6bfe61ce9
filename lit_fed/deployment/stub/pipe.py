"""Blobs over a local socket, each after its length."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, *blobs: bytes) -> None:
    """Send some blobs."""
    for blob in blobs:
        connection.sendall(_LENGTH.pack(len(blob)))
        connection.sendall(blob)


def receive(connection: socket.socket, limit: int) -> bytes:
    """The next blob.

    Raises:
        OSError: If it is over the limit, or the other end has gone.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > limit:
        raise OSError(f"a message of {length:,} bytes is over the limit of {limit:,}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        taken = connection.recv_into(view)
        if not taken:
            raise OSError("the other end has gone")
        view = view[taken:]
    return bytes(found)
