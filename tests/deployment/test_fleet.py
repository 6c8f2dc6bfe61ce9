"""A blob as Flower's objects: written as Flower writes them, read without believing who wrote them."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import pytest

from lit_fed.deployment import fleet
from lit_fed.errors import WireError

pytest.importorskip("flwr")

MOST = 2**26


def packed(blob: bytes) -> fleet.Parcel:
    return fleet.pack(blob, fleet.about(7, fleet.SERVER_ID, 5, 60.0))


@pytest.mark.parametrize("size", [0, 3, fleet.CHUNK_BYTES, 2 * fleet.CHUNK_BYTES + 1])
@pytest.mark.parametrize("content", [os.urandom, bytes])
def test_flowers_own_reader_finds_the_blob_and_what_is_said_of_it(size: int, content: Any) -> None:
    """Zeros make equal chunks, which travel once."""
    from flwr.app import ArrayRecord, Message
    from flwr.common.serde import message_from_proto
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content

    blob = content(size)
    parcel = packed(blob)
    for name, one in parcel.objects.items():
        assert name == hashlib.sha256(one).hexdigest()
        validate_object_content(one)
    found = inflate_object_from_contents(parcel.message_id, dict(parcel.objects))
    assert isinstance(found, Message)
    record = found.content["lit_fed"]
    assert isinstance(record, ArrayRecord)
    assert bytes(record["blob"].data) == blob
    about = found.metadata
    assert (about.run_id, about.src_node_id, about.dst_node_id, about.ttl, about.message_type) == (
        7,
        1,
        5,
        60.0,
        "train",
    )
    bare = message_from_proto(parcel.message)
    assert (bare.metadata.message_id, bare.has_content(), dict(bare.content)) == (parcel.message_id, True, {})
    assert set(fleet.names(parcel.tree, 20)) == parcel.objects.keys()
    assert fleet.unpack(parcel.message_id, parcel.objects, MOST) == blob


def test_what_flower_writes_is_read() -> None:
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.app.metadata import Metadata
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    array = Array(dtype="uint8", shape=(5,), stype="lit_fed", data=b"hello")
    about = Metadata(7, "", 1, 5, "", "", 1.8e9, 60.0, "train")
    message = Message(content=RecordDict({"lit_fed": ArrayRecord({"blob": array})}), metadata=about)
    objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    assert fleet.unpack(message.object_id, objects, MOST) == b"hello"


def changed(parcel: fleet.Parcel, kind: str, change: Any) -> tuple[str, dict[str, bytes]]:
    """The objects with one of them changed, and the names of all above it."""
    objects, below = {}, {}
    for name, content in parcel.objects.items():
        for old, new in below.items():
            content = content.replace(old.encode(), new.encode())
        if content.startswith(kind.encode() + b" "):
            content = change(content)
        below[name] = hashlib.sha256(content).hexdigest()
        objects[below[name]] = content
    return below[parcel.message_id], objects


def with_body(content: bytes, body: bytes) -> bytes:
    head = content[: content.index(0)].decode().split(" ")
    return f"{head[0]} {head[1]} {len(body)}\0".encode() + body


def test_a_chunk_that_is_repeated_without_end_is_refused() -> None:
    """Flower's reader makes 1,000 × 5 MiB of these few bytes, and would make a terabyte of a few more."""
    order = json.dumps({"arraychunk_ids": [0] * 1000}).encode()
    message_id, objects = changed(packed(bytes(fleet.CHUNK_BYTES)), "Array", lambda one: with_body(one, order))
    with pytest.raises(WireError, match="a message is over the limit of 67,108,864 bytes; raise --most_bytes"):
        fleet.unpack(message_id, objects, MOST)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Array", lambda one: with_body(one, b'{"arraychunk_ids": [1]}')),
        ("Array", lambda one: with_body(one, b'{"arraychunk_ids": [-1]}')),
        ("Array", lambda one: with_body(one, b'{"arraychunk_ids": [true]}')),
        ("Array", lambda one: with_body(one, b'{"arraychunk_ids": ["0"]}')),
        ("Array", lambda one: with_body(one, b'{"arraychunk_ids": 3}')),
        ("Array", lambda one: with_body(one, b"[" * 100_000)),
        ("Array", lambda one: with_body(one, b"\xff")),
        ("Array", lambda one: one[:-1]),
        ("Array", lambda one: one.replace(b"Array ", b"Errays ")),
        ("ArrayRecord", lambda one: b""),
        ("RecordDict", lambda one: b"RecordDict  2\0{}"),
        ("Message", lambda one: b"x" * 100),
        ("ArrayChunk", lambda one: one + b"x"),
    ],
)
def test_objects_that_are_none_of_ours_are_refused(kind: str, change: Any) -> None:
    message_id, objects = changed(packed(b"hello"), kind, change)
    with pytest.raises(WireError, match=r"the objects of a message are malformed|over the limit"):
        fleet.unpack(message_id, objects, MOST)


def test_objects_are_what_their_names_say_and_not_too_large() -> None:
    for name, content in packed(b"hello").objects.items():
        fleet.check_object(name, content)
        with pytest.raises(WireError, match="an object does not match its hash"):
            fleet.check_object(name, content + b"x")
    with pytest.raises(WireError, match="an object of 262,145 bytes is over the limit of 262,144"):
        fleet.check_object("0" * 64, b"A" * (2**18 + 1))
    with pytest.raises(WireError, match="an object of 5,244,928 bytes is over"):
        fleet.check_object("0" * 64, b"ArrayChunk " + bytes(5_244_928 - 11))


def test_names_that_cannot_be_and_trees_that_are_too_large() -> None:
    tree = fleet.proto().ObjectTree
    with pytest.raises(WireError, match="an object's name is malformed"):
        fleet.names(tree(object_id="../x"), 9)
    many = tree(object_id="0" * 64, children=[tree(object_id=f"{one:064x}") for one in range(1, 9)])
    assert len(fleet.names(many, 9)) == 9
    with pytest.raises(WireError, match="a message has more than 8 objects"):
        fleet.names(many, 8)


def test_an_error_is_read_by_flower() -> None:
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    parcel = fleet.pack_error("no room", fleet.about(7, 5, fleet.SERVER_ID, 60.0, "0" * 64))
    found = inflate_object_from_contents(parcel.message_id, dict(parcel.objects))
    assert isinstance(found, Message)
    assert found.error.reason == "no room"
