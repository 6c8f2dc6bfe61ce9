"""Flower's Fleet API: paths, header names, and the object format that carries a blob.

This is the only module that imports flwr, for its protobuf classes. It reimplements Flower's object format
(``TYPE CHILDREN LENGTH``, a zero byte and a body, stored under the SHA-256 of these bytes), because Flower's own reader
trusts the sender's number of repetitions of a chunk and can expand a few bytes to terabytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from lit_fed.errors import WireError

MEDIA_TYPE = "application/protobuf"
KEY, SIGNATURE, TIMESTAMP = "flwr-public-key", "flwr-signature", "flwr-timestamp"  # headers of a request
PREFIX = "/v1/fleet/"
REQUESTS = {
    "register-node": "RegisterNodeFleet",
    "activate-node": "ActivateNode",
    "deactivate-node": "DeactivateNode",
    "send-node-heartbeat": "SendNodeHeartbeat",
    "pull-messages": "PullMessages",
    "push-messages": "PushMessages",
    "pull-object": "PullObject",
    "push-object": "PushObject",
    "confirm-message-received": "ConfirmMessageReceived",
}
"""Requests of a node, by the end of the path. Flower's request for an app, which is code, is left out on purpose."""

CHUNK_BYTES = 5 * 2**20
"""Bytes of a blob per object, Flower's chunk size."""
MOST_ABOUT_BYTES = 2**18
"""Maximum size of an object that is not a chunk: 3,800 names of chunks, enough for 19 GB."""
SERVER_ID = 1
"""The server's node id."""

_SHAPE = ("Message", "RecordDict", "ArrayRecord", "Array")
_CHUNK = b"ArrayChunk "


@cache
def proto() -> Any:
    """Import Flower's protobuf classes."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    from flwr.proto import error_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2

    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    found: dict[str, Any] = {"Error": error_pb2.Error, "Node": node_pb2.Node}
    for name in ("Message", "Metadata", "ObjectTree"):
        found[name] = getattr(message_pb2, name)
    for word in REQUESTS.values():
        for name in (f"{word}Request", f"{word}Response"):
            found[name] = next(
                getattr(one, name) for one in (fleet_pb2, heartbeat_pb2, message_pb2) if hasattr(one, name)
            )
    return SimpleNamespace(**found)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A blob packed into Flower's objects: metadata, the tree of names, and the content by name, children first."""

    message: Any
    tree: Any
    objects: dict[str, bytes]

    @property
    def message_id(self) -> str:
        """The name of the outermost object."""
        return str(self.tree.object_id)


def pack(blob: bytes, about: Any) -> Parcel:
    """Pack a blob as a message with one array; ``about`` is Flower's metadata without the message's id."""
    pb, objects = proto(), dict[str, bytes]()

    def add(kind: str, children: Sequence[str], body: bytes | memoryview) -> str:
        content = b"".join([f"{kind} {','.join(children)} {len(body)}\0".encode(), body])
        name = hashlib.sha256(content).hexdigest()
        objects[name] = content
        return name

    view = memoryview(blob)
    chunks = [add("ArrayChunk", (), view[at : at + CHUNK_BYTES]) for at in range(0, len(blob), CHUNK_BYTES)]
    places = {name: place for place, name in enumerate(dict.fromkeys(chunks))}
    order = [places[one] for one in chunks]
    of_array = {"dtype": "uint8", "shape": [len(blob)], "stype": "lit_fed", "arraychunk_ids": order}
    about.message_id = ""
    whole: bytes = pb.Message(metadata=about).SerializeToString(deterministic=True)
    array = add("Array", list(places), json.dumps(of_array).encode())
    record = add("ArrayRecord", [array], json.dumps({"blob": array}).encode())
    records = add("RecordDict", [record], json.dumps({"lit_fed": record}).encode())
    about.message_id = add("Message", [records], whole)
    tree = [pb.ObjectTree(object_id=name) for name in places]
    for name in (array, record, records, about.message_id):
        tree = [pb.ObjectTree(object_id=name, children=tree)]
    message = pb.Message(metadata=about)
    message.content.SetInParent()  # marks the message as one with content, which is among the objects
    return Parcel(message, tree[0], objects)


def pack_error(reason: str, about: Any) -> Parcel:
    """Pack an error reply with its reason."""
    pb = proto()
    about.message_id = ""
    said = pb.Error(code=1, reason=reason)
    body = pb.Message(metadata=about, error=said).SerializeToString(deterministic=True)
    content = b"".join([f"Message  {len(body)}\0".encode(), body])
    about.message_id = hashlib.sha256(content).hexdigest()
    tree = pb.ObjectTree(object_id=about.message_id)
    return Parcel(pb.Message(metadata=about, error=said), tree, {about.message_id: content})


def unpack(message_id: str, objects: Mapping[str, bytes], most: int) -> bytes:
    """Unpack the blob of a message from objects that `check_object` has checked.

    Raises:
        WireError: If the message is malformed, or has more than ``most`` bytes.
    """
    try:
        children = [message_id]
        body = b""
        for kind in _SHAPE:
            (name,) = children
            children, body = _opened(objects[name], kind)
        order = json.loads(body)["arraychunk_ids"]
        chunks = [memoryview(objects[name]) for name in children]
        starts = [_start(objects[name], "ArrayChunk") for name in children]
        sizes = [len(chunk) - start for chunk, start in zip(chunks, starts, strict=True)]
        if any(type(place) is not int or place < 0 for place in order) or sum(sizes[place] for place in order) > most:
            raise WireError(f"a message is over the limit of {most:,} bytes; raise --most_bytes on both ends")
        return b"".join(chunks[place][starts[place] :] for place in order)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise WireError("the objects of a message are malformed; run the same lit_fed on both ends") from error


def names(tree: Any, most: int) -> list[str]:
    """Return the names of a tree's objects, children first, without duplicates.

    Raises:
        WireError: If a name is malformed, or there are more than ``most``.
    """
    found: dict[str, None] = {}
    for name in _walk(tree):
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise WireError("an object's name is malformed; run the same lit_fed on both ends")
        found[name] = None
        if len(found) > most:
            raise WireError(f"a message has more than {most:,} objects; run the same lit_fed on both ends")
    return list(found)


def check_object(name: str, content: bytes) -> None:
    """Raise `WireError` if an object is too large or does not match its hash."""
    most = CHUNK_BYTES + 2**10 if content.startswith(_CHUNK) else MOST_ABOUT_BYTES
    if len(content) > most:
        raise WireError(f"an object of {len(content):,} bytes is over the limit of {most:,}")
    if hashlib.sha256(content).hexdigest() != name:
        raise WireError("an object does not match its hash; send it again")


def about(run_id: int, sender: int, receiver: int, ttl: float, reply_to: str = "") -> Any:
    """Return Flower's metadata for a message."""
    return proto().Metadata(
        run_id=run_id, src_node_id=sender, dst_node_id=receiver, reply_to_message_id=reply_to, ttl=ttl,
        message_type="train", created_at=time.time(),
    )  # fmt: skip


def _walk(tree: Any) -> Iterator[str]:
    for child in tree.children:  # protobuf limits the depth to 100
        yield from _walk(child)
    yield tree.object_id


def _opened(content: bytes, kind: str) -> tuple[list[str], bytes]:
    start = _start(content, kind)
    children = content[: start - 1].decode().split(" ")[1]
    return children.split(",") if children else [], content[start:]


def _start(content: bytes, kind: str) -> int:
    """Return the offset of an object's body."""
    end = content.index(0, 0, MOST_ABOUT_BYTES + 1)
    found, _, length = content[:end].decode().split(" ")
    if found != kind or int(length) != len(content) - end - 1:
        raise ValueError(f"expected {kind}")
    return end + 1
