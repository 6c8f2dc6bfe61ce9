"""Messages as frames of a gRPC stream, and the settings of both ends.

A frame is the message's id, the message's length, and at most `CHUNK` bytes of the message; an empty message
acknowledges an answer. No code is generated: gRPC carries bytes.
"""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Callable, Iterator

from lit_fed.errors import WireError
from lit_fed.federation.messages.body import Blob, Bytes, buffer_of

# gRPC reads these once, before its first use. It has no setting for TLS's version; the only cipher of TLS 1.2 that we
# leave needs a pre-shared key, which neither end has, so that TLS 1.3 remains, whose ciphers cannot be configured. Data
# workers are forked and use no gRPC; its own support of forks would crash them. They collect nothing from before the
# fork: a server or channel that was garbage would wait for ever for a thread that they do not have.
os.environ |= {
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305", "GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0",
}  # fmt: skip
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

SERVICE, METHOD, OPERATE = "lit_fed.Federation", "Attend", "Operate"
CHUNK = 2**20
"""Bytes of a message per frame; only a message's last frame has fewer."""
HEAD = struct.Struct("<QQ")
GOODBYE = 0
"""Id of the empty message by which a node takes its leave; no message has it."""

KEEPALIVE_S = (8.0, 14.0)  # interval of pings and time-out of their answers: a cut of 10 s is survived, 22 s are not
HANDSHAKE_S = 10.0
IDLE_S = 30.0  # time-out of a connection without a stream
MOST_METADATA_BYTES = 2**13
_MS = 1000


def options() -> list[tuple[str, int]]:
    """Return gRPC's settings of both ends."""
    return [
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S[0] * _MS)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S[1] * _MS)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S[1] * _MS)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S[0] * _MS / 2)),
        ("grpc.max_receive_message_length", CHUNK + HEAD.size),
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.max_connection_idle_ms", int(IDLE_S * _MS)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * _MS)),
        ("grpc.so_reuseport", 0),
        ("grpc.min_reconnect_backoff_ms", 10 * _MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5 * _MS),
    ]


def divide(message_id: int, blob: Bytes | Blob) -> Iterator[bytes]:
    """Divide a message into frames."""
    head = HEAD.pack(message_id, len(blob))
    parts = (blob.head, blob.body.content) if isinstance(blob, Blob) else (blob, b"")
    views, split = [memoryview(part) for part in parts], len(parts[0])
    for at in range(0, max(len(blob), 1), CHUNK):
        end = at + CHUNK
        yield b"".join((head, views[0][at:end], views[1][max(at - split, 0) : max(end - split, 0)]))


class Joiner:
    """Joins untrusted frames to messages.

    Args:
        most: Returns the maximum size of a message by its id, bytes; None discards the message.
    """

    def __init__(self, most: Callable[[int], int | None]) -> None:
        self.most = most
        self.message_id = -1
        """Id of the last frame's message."""
        self.discarded = 0
        """Number of discarded messages."""
        self._total = self._size = 0
        self._content = bytearray()  # of the message's whole size from its first frame on: growing would copy it

    def take(self, frame: bytes) -> tuple[int, bytearray] | None:
        """Return a message's id and content if this frame is its last.

        Raises:
            WireError: If the frame is malformed, belongs to another message, or the message is too large.
        """
        if len(frame) < HEAD.size:
            raise WireError("a frame of a message is malformed; run the same lit_fed on both ends")
        message_id, total = HEAD.unpack_from(frame)
        if not self._size:
            self.message_id, self._total = message_id, total
        size = len(frame) - HEAD.size
        if (message_id, total, size) != (self.message_id, self._total, min(CHUNK, self._total - self._size)):
            raise WireError("a frame of a message is malformed; run the same lit_fed on both ends")
        most = self.most(message_id)
        if most is not None and total > most:
            raise WireError(f"a message of {total:,} bytes exceeds the {most:,} that are due, or --most_bytes")
        if most is None:
            self._content = bytearray()
        else:
            self._content = self._content or buffer_of(total)
            self._content[self._size : self._size + size] = memoryview(frame)[HEAD.size :]
        self._size += size
        if self._size < total:
            return None
        content, self._content, self._size = self._content, bytearray(), 0
        self.discarded += most is None
        return None if most is None else (message_id, content)
