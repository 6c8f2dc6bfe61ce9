"""A blob within a message of Flower's."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

_RECORD, _ARRAY = "lit_fed", "blob"


def pack(blob: bytes) -> RecordDict:
    """A blob as a record: one array, which Flower sends as it is."""
    array = Array(dtype="uint8", shape=(len(blob),), stype="lit_fed", data=blob)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unpack(content: RecordDict) -> bytes:
    """The blob of a record; empty where there is none."""
    record = content.get(_RECORD)
    array = record.get(_ARRAY) if isinstance(record, ArrayRecord) else None
    return bytes(array.data) if array is not None else b""
