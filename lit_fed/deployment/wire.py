"""Messages between a server and its nodes, as bytes.

A message is one blob: eight bytes of magic and length, a header in JSON, and its tensors in the format of safetensors.
Nothing in it is code, and nothing of it is used before all of it has been looked at.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import safetensors.torch
import torch
from torch import Tensor

from lit_fed.engine.payload import Layout, Payload, is_finite
from lit_fed.engine.totals import Total
from lit_fed.errors import WireError

T = TypeVar("T")
Word = Literal["hello", "held", "train", "ask", "keep", "answer", "failure"]

PROTOCOL = 2
"""The version of what is said; both ends must speak the same."""

MOST_BYTES = 2**31
"""The size of the largest message that is taken, unless a limit is set."""

_MAGIC = b"LFW1"
_START = struct.Struct("<4sI")
_MOST_METRICS = 1000
_MOST_PARTS = 64  # of an exact sum of float64, whose exponents span 2,098 bits: 2098/53 = 39.6
_METRIC = re.compile(r"[\w./@+=()-]{1,200}")


@dataclass(frozen=True, slots=True)
class Message:
    """What one end says to the other.

    Args:
        word: What it is about.
        fields: Primitives, and lists and dicts of them.
        tensors: Named tensors in groups, such as ``payload`` and ``frozen``, in their order.
    """

    word: Word
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Payload] = field(default_factory=dict)

    def get(self, name: str, kind: type[T]) -> T:
        """A field.

        Args:
            name: Which.
            kind: The type that it must have; an integer passes for a float.

        Raises:
            WireError: If it is missing, or of another type.
        """
        value = self.fields.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            what = "is missing" if name not in self.fields else f"is of type {type(value).__name__}"
            raise WireError(
                f"the field {name!r} of a message {self.word!r} {what}; both ends must run the same lit_fed"
            )
        return value


def encode(message: Message) -> bytes:
    """A message as bytes; every tensor is exact."""
    names = [(group, name) for group, payload in message.tensors.items() for name in payload]
    header = {"word": message.word, "groups": list(message.tensors), "names": names, "fields": dict(message.fields)}
    text = json.dumps(header, separators=(",", ":")).encode()
    tensors = (tensor for payload in message.tensors.values() for tensor in payload.values())
    # a copy, because safetensors refuses tensors that share memory
    body = {str(place): tensor.detach().to("cpu", copy=True).contiguous() for place, tensor in enumerate(tensors)}
    return _START.pack(_MAGIC, len(text)) + text + safetensors.torch.save(body)


def decode(blob: bytes, limit: int = MOST_BYTES) -> Message:
    """The message that bytes hold.

    Args:
        blob: The bytes, from anybody.
        limit: The most that are taken.

    Raises:
        WireError: If they are no message, or too many.
    """
    if len(blob) > limit:
        raise WireError(
            f"a message of {len(blob):,} bytes is over the limit of {limit:,} where it came; raise --most_bytes there"
        )
    if len(blob) < _START.size:
        raise WireError(f"{len(blob)} bytes are no message; both ends must run the same lit_fed")
    magic, length = _START.unpack_from(blob)
    if magic != _MAGIC or len(blob) < _START.size + length:
        raise WireError(f"{len(blob)} bytes are no message, or part of one; both ends must run the same lit_fed")
    try:
        header = json.loads(blob[_START.size : _START.size + length])
        body = safetensors.torch.load(bytes(blob[_START.size + length :]))
        word, groups, names, fields = (header[key] for key in ("word", "groups", "names", "fields"))
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in groups}
        for place, (group, name) in enumerate(names):
            if type(name) is not str or name in tensors[group]:
                raise ValueError(f"{name!r} is there twice")
            tensors[group][name] = body.pop(str(place))
        if body or word not in get_args(Word) or type(fields) is not dict:
            raise ValueError(f"{word!r} is not understood")
    except Exception as error:  # bytes that nobody wrote make the readers fail in a dozen ways
        raise WireError(f"a message cannot be read: {' '.join(str(error).split())[:200]}") from error
    return Message(word, fields, tensors)


def join(blobs: Sequence[bytes]) -> bytes:
    """Several messages as one blob."""
    lengths = struct.pack(f"<I{len(blobs)}Q", len(blobs), *map(len, blobs))
    return b"".join([lengths, *blobs])


def split(blob: bytes, most: int) -> list[bytes]:
    """The messages of a blob.

    Args:
        blob: The blob, from anybody.
        most: How many there may be.

    Raises:
        WireError: If it is none, or there are more.
    """
    count = struct.unpack_from("<I", blob)[0] if len(blob) >= 4 else 0
    if not 0 < count <= most or len(blob) < 4 + 8 * count:
        raise WireError(f"{len(blob)} bytes are no messages; both ends must run the same lit_fed")
    lengths = struct.unpack_from(f"<{count}Q", blob, 4)
    begin, found = 4 + 8 * count, []
    if sum(lengths) != len(blob) - begin:
        raise WireError(f"{len(blob)} bytes are part of some messages; both ends must run the same lit_fed")
    for length in lengths:
        found.append(blob[begin : begin + length])
        begin += length
    return found


# ---------------------------------------------------------------------- what an answer must look like


def check_payload(payload: Payload, layout: Layout, who: str, varying: Collection[str] = ()) -> None:
    """Refuse tensors that are not what was asked for.

    Args:
        payload: What came.
        layout: What it must look like.
        who: Whose it is, for the message.
        varying: Those whose first dimension may be smaller, by the same in all of them.

    Raises:
        WireError: For a name, a type, a shape or a value that cannot be.
    """
    if odd := sorted(payload.keys() ^ layout.keys()):
        how = "holds" if odd[0] in payload else "lacks"
        raise WireError(f"what {who} sent {how} {odd[0][:200]!r}; its node runs another model or method")
    rows = min((payload[name].shape[:1] for name in varying if name in layout), default=torch.Size())
    for name, (dtype, most) in layout.items():
        tensor = payload[name]
        shape = rows + most[1:] if name in varying and rows <= most[:1] else most
        if tensor.dtype != dtype or tensor.shape != shape:
            raise WireError(
                f"{name!r} in what {who} sent is {_name(tensor.dtype)} of shape {tuple(tensor.shape)}, where "
                f"{_name(dtype)} of shape {tuple(shape)} is due; its node runs another model or method"
            )
    if not is_finite(payload):
        raise WireError(f"what {who} sent is not finite; it is left out")


def check_metrics(metrics: Mapping[str, Any], who: str, finite: bool) -> dict[str, float]:
    """Named scalars, as they may be written into tables.

    Args:
        metrics: What came.
        who: Whose it is, for the message.
        finite: Whether NaN and infinity are refused.

    Raises:
        WireError: For too many of them, a name or a value that cannot be.
    """
    _check_names(metrics, who)
    for name, value in metrics.items():
        if type(value) not in (int, float) or (finite and not math.isfinite(value)):
            raise WireError(f"{who} sent {str(value)[:50]} as {name}, which is no finite number")
    return dict(metrics)


def check_sums(sums: Mapping[str, Any], who: str, most: int) -> dict[str, Total]:
    """Metrics of several clients in sums.

    Args:
        sums: What came.
        who: Whose they are, for the message.
        most: The largest weight that they can have.

    Raises:
        WireError: For too many of them, a name, a number or a weight that cannot be.
    """
    _check_names(sums, who)
    for name, total in sums.items():
        parts, weight = total if type(total) is list and len(total) == 2 else (None, None)
        if (
            type(parts) is not list
            or len(parts) > _MOST_PARTS
            or not all(type(part) is float for part in parts)
            or type(weight) is not int
            or not 0 <= weight <= most
        ):
            raise WireError(f"{who} sent {str(total)[:50]} as the sum of {name}, which is none")
    return {name: Total(tuple(total[0]), total[1]) for name, total in sums.items()}


def _check_names(metrics: Mapping[str, Any], who: str) -> None:
    if len(metrics) > _MOST_METRICS:
        raise WireError(f"{who} sent {len(metrics):,} metrics, which are more than {_MOST_METRICS:,}")
    for name in metrics:
        if not _METRIC.fullmatch(name):
            raise WireError(
                f"{who} sent a metric of the name {name[:50]!r}; names are of letters, digits and ./_@+=()-"
            )


def check_weight(weight: Any, who: str) -> float:
    """A client's weight in a mean, an integer where it came as one.

    Raises:
        WireError: If it is no number, negative or not finite.
    """
    if type(weight) not in (int, float) or not 0 <= weight < 2**53:
        raise WireError(f"{who} sent the weight {str(weight)[:50]}; it must be a number from 0")
    number: float = weight
    return number


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
