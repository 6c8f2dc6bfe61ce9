"""Tensors of a message in safetensors' format, written into one buffer and read as views of it where they are aligned.

The package safetensors copies every tensor twice on each end, which for a large model is most of the memory of an end.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from lit_fed.machine import release_freed_memory
from lit_fed.tensors import ALIGNED, aligned

LENGTH = struct.Struct("<Q")
"""The length of safetensors' header."""
_LARGE = 2**24  # bytes; for smaller messages, releasing memory would take longer than it is worth

Bytes: TypeAlias = bytes | bytearray


@dataclass(frozen=True, eq=False)
class Body:
    """Bytes that many messages share, and the tensors that they are made of, whose identities it keeps in use."""

    content: Bytes
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A message in two parts, of which messages to many nodes share the second."""

    head: Bytes
    body: Body

    def __len__(self) -> int:
        return len(self.head) + len(self.body.content)

    def __bytes__(self) -> bytes:
        return b"".join((self.head, self.body.content))


_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_Dim = Annotated[int, Meta(ge=0, lt=2**48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Dim], Meta(max_length=64)]
    data_offsets: tuple[_Dim, _Dim]


def make_room(size: int) -> None:
    """Release freed memory before a large message is received, written or used.

    glibc keeps that memory for the next training step (`lit_fed.machine.keep_freed_memory`), in blocks of a tensor's
    size, into which a whole model does not fit.
    """
    if size >= _LARGE:
        release_freed_memory()


def buffer_of(size: int) -> bytearray:
    """Return a buffer for a message, which begins at a multiple of `ALIGNED` bytes: CPython cuts both ends in place."""
    make_room(size)
    buffer = bytearray(size + ALIGNED)
    begin = -torch.frombuffer(buffer, dtype=torch.uint8, count=1).data_ptr() % ALIGNED
    del buffer[:begin]
    del buffer[size:]
    return buffer


def pack_tensors(tensors: Sequence[Tensor], start: bytes = b"") -> bytearray:
    """Return some bytes, and behind them tensors, which are named by their places.

    Those of whole blocks of `ALIGNED` bytes come first, so that they are all aligned; the others as safetensors has it.
    """
    places = sorted(range(len(tensors)), key=lambda at: (tensors[at].nbytes % ALIGNED > 0, -tensors[at].itemsize))
    ends = list(accumulate((tensors[place].nbytes for place in places), initial=0))
    entries = {
        str(place): {
            "dtype": _NAMES[tensors[place].dtype],
            "shape": list(tensors[place].shape),
            "data_offsets": ends[i : i + 2],
        }
        for i, place in enumerate(places)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(start) + LENGTH.size + len(text)) % ALIGNED)
    head = start + LENGTH.pack(len(text)) + text
    buffer = buffer_of(len(head) + ends[-1])
    buffer[: len(head)] = head
    for place, begin in zip(places, ends, strict=False):
        if (tensor := tensors[place].detach()).numel():
            flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=len(head) + begin)
            flat.view(tensor.shape).copy_(tensor)
    return buffer


def read_tensors(buffer: bytearray, at: int) -> dict[str, Tensor]:
    """Return the tensors of untrusted bytes behind a place as views of the bytes, copied where they are not `aligned`.

    Raises:
        ValueError: If they are malformed; the parsers raise other exceptions, too.
    """
    (length,) = LENGTH.unpack_from(buffer, at)
    first = at + LENGTH.size + length
    entries = msgspec.json.decode(memoryview(buffer)[at + LENGTH.size : first], type=dict[str, _Entry])
    tensors, place = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, count, (begin, end) = _DTYPES[entry.dtype], math.prod(entry.shape), entry.data_offsets
        if begin != place or end - begin != count * dtype.itemsize:
            raise ValueError(f"the bytes of tensor {name} are not where they belong")
        place = end
        if (first + begin) % dtype.itemsize or not count:  # no view: unaligned, or of no bytes
            part = bytearray(memoryview(buffer)[first + begin : first + end])
            flat = torch.frombuffer(part, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        else:
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=first + begin)
        tensors[name] = aligned(flat).view(entry.shape)
    if first + place != len(buffer):
        raise ValueError("the tensors have other bytes than the message")
    return tensors
