"""An operator's request to the queue of a server, and the lines of the answer; read without PyTorch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from lit_fed.errors import WireError

MOST_CONFIG = 1_000_000
"""Maximum size of a configuration, bytes: with its name it fits into one frame."""


class QueueRequest(Struct, forbid_unknown_fields=True):
    """What to do with the queue.

    Args:
        verb: The command.
        name: The name of the run to stop, or of the file to submit, without its ending.
        config: The content of the file to submit.
    """

    verb: Literal["submit", "runs", "stop"]
    name: Annotated[str, Meta(max_length=200)] = ""
    config: Annotated[bytes, Meta(max_length=MOST_CONFIG)] = b""


pack = msgspec.msgpack.encode
"""Serialise a request, or a list of lines."""


def unpack(blob: bytes, kind: type) -> Any:
    """Parse an untrusted request or list of lines; raise `WireError` if it is malformed."""
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise WireError("an operator's message is malformed; run the same lit_fed on both ends") from None
