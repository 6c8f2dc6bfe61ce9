"""Clients' states as bytes: a safetensors file that names its client.

Files of clients with the same tensors differ in owner and values only. `Form` caches the rest: building and parsing a
header by safetensors for each client took longer than training a small one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lit_fed.errors import CheckpointError

State = dict[str, Tensor]
_Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]
_OWNER = "whose-state-it-is"
_MOST_FORMS = 16
_MOST_BYTES = 2**20  # of a state with a form: above it, a header's cost is negligible, and a form takes three copies
_NUMPYS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes that NumPy shares."""


class Form:
    """The common bytes of states with the same names, dtypes and shapes.

    Args:
        layout: The names, dtypes and shapes.

    Raises:
        ValueError: If the owner cannot be located in the header, or NumPy lacks a dtype.
    """

    def __init__(self, layout: _Layout) -> None:
        blob = packed(_OWNER, {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in layout})
        header = _header(blob)
        self._head, owner, tail = header.partition(_OWNER.encode())
        if not owner or owner in tail or any(dtype not in _NUMPYS for _, dtype, _ in layout):
            raise ValueError("no form")
        self._tail = tail.rstrip(b" ")
        begins = {name: entry["data_offsets"][0] for name, entry in json.loads(header).items() if "dtype" in entry}
        self._order = sorted(begins, key=lambda name: begins[name])
        self._places = [(name, dtype, shape, shape.numel(), begins[name]) for name, dtype, shape in layout]
        self._length = len(blob) - 8 - len(header)

    def encode(self, owner: str, state: Mapping[str, Tensor]) -> bytes:
        """The same bytes as `packed`."""
        return b"".join([self._begin(owner), *[state[name].numpy().data for name in self._order]])

    def decode(self, owner: str, blob: bytes) -> State | None:
        """The same state as `unpacked`; None for bytes of another form or owner."""
        body = self._body(owner, blob)
        if body is None:
            return None
        values = bytearray(body)
        return {
            name: torch.frombuffer(values, dtype=dtype, count=count, offset=place).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
            for name, dtype, shape, count, place in self._places
        }

    def decode_all(self, blobs: Mapping[str, bytes]) -> dict[str, State]:
        """Decode the states of this form, by owner; their tensors share memory."""
        bodies = {owner: self._body(owner, blob) for owner, blob in blobs.items() if _is_plain(owner)}
        fitting = {owner: body for owner, body in bodies.items() if body is not None}
        if not fitting or not self._length:
            return {}
        rows = torch.frombuffer(bytearray().join(fitting.values()), dtype=torch.uint8).view(-1, self._length)
        columns = {}
        for name, dtype, shape, count, place in self._places:
            column = rows[:, place : place + count * dtype.itemsize].clone(memory_format=torch.contiguous_format)
            columns[name] = column.view(-1).view(dtype).view(len(rows), *shape).unbind(0)
        states = zip(*columns.values(), strict=True)
        return {owner: dict(zip(columns, state, strict=True)) for owner, state in zip(fitting, states, strict=True)}

    def _body(self, owner: str, blob: bytes) -> memoryview | None:
        """The values; None for bytes of another form or owner."""
        begin = self._begin(owner)
        fits = len(blob) == len(begin) + self._length and blob.startswith(begin)
        return memoryview(blob)[len(begin) :] if fits else None

    def _begin(self, owner: str) -> bytes:
        header = self._head + owner.encode() + self._tail
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header


class StateBytes:
    """Converts states to bytes and back, with forms cached."""

    def __init__(self) -> None:
        self._forms: dict[_Layout, Form | None] = {}
        self._last: Form | None = None

    def encode(self, owner: str, state: Mapping[str, Tensor]) -> bytes:
        """Encode a state, see `packed`."""
        layout = tuple([(name, tensor.dtype, tensor.shape) for name, tensor in state.items()])
        form = self._form(layout)
        if form is None or not _is_plain(owner):
            return packed(owner, state)
        self._last = form
        return form.encode(owner, state)

    def decode(self, owner: str, blob: bytes) -> State:
        """Decode a state, see `unpacked`; the owner's form speeds it up."""
        if _is_plain(owner):
            for form in (self._last, *self._forms.values()):
                if form is not None and (state := form.decode(owner, blob)) is not None:
                    self._last = form
                    return state
        state = unpacked(blob)
        self._form(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in state.items()]))
        return state

    def decode_all(self, blobs: Mapping[str, bytes]) -> dict[str, State]:
        """Decode the states of the last used form, by owner; skip the others."""
        return {} if self._last is None else self._last.decode_all(blobs)

    def _form(self, layout: _Layout) -> Form | None:
        if sum(shape.numel() * dtype.itemsize for _, dtype, shape in layout) > _MOST_BYTES:
            return None
        if layout not in self._forms:
            if len(self._forms) == _MOST_FORMS:
                self._forms.clear()
            try:
                self._forms[layout] = Form(layout)
            except (ValueError, CheckpointError):
                self._forms[layout] = None
        return self._forms[layout]


def packed(owner: str, state: Mapping[str, Tensor]) -> bytes:
    """Encode contiguous tensors as a safetensors file that names their owner.

    Raises:
        CheckpointError: If safetensors lacks a dtype.
    """
    about = {"state": json.dumps({"client": owner, "names": list(state)})}  # one entry, as their order is not fixed
    try:
        return bytes(safetensors.torch.save({name: tensor.clone() for name, tensor in state.items()}, about))
    except KeyError as error:  # such as complex128
        words = " ".join(str(error).split())
        raise CheckpointError(f"the state of client {owner} does not fit into safetensors: {words}") from error


def unpacked(blob: bytes) -> State:
    """Decode the bytes of `packed`."""
    state = safetensors.torch.load(blob)
    return {name: state[name] for name in about(blob)["names"]}


def about(blob: bytes) -> dict[str, Any]:
    """The owner of a state file and the order of its names, from the JSON header."""
    found: dict[str, Any] = json.loads(json.loads(_header(blob))["__metadata__"]["state"])
    return found


def extent(head: bytes, left: int) -> int:
    """The number of bytes of values that a header announces.

    Args:
        head: The header, without its length.
        left: Bytes available after it.

    Raises:
        ValueError: If it announces more than available, or invalid offsets.
    """
    found = 0
    for name, entry in json.loads(head).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= left:
                raise ValueError(f"{name!r} lies at {begin!r} to {end!r} of {left} bytes")
            found = max(found, end)
    return found


def is_not(owner: str, blob: bytes) -> str:
    """The reason why bytes are not an owner's state."""
    try:
        found = str(about(blob)["client"])
    except Exception:  # damaged bytes make the reader fail in a dozen ways
        found = owner
    return f"it is client {found}'s" if found != owner else "it differs from what the run wrote"


def _header(blob: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", blob)
    return blob[8 : 8 + length]


def _is_plain(owner: str) -> bool:
    """Whether JSON needs no escape for it."""
    return owner.isascii() and owner.replace("-", "").isalnum()
