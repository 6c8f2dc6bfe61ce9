"""Messages between a server and its nodes, as bytes.

A message is one blob: eight bytes of magic and length, a header in JSON, and its tensors in the format of safetensors.
Nothing in it is code, and nothing of it is used before all of it has been looked at. Its length, and what its header
holds, are bounded before it is parsed, for a parser makes a gigabyte of sixty megabytes.
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

from lit_fed.engine.wire.payload import Layout, Payload
from lit_fed.engine.wire.totals import Total, exact_sum
from lit_fed.errors import WireError

T = TypeVar("T")
Word = Literal["hello", "held", "train", "ask", "keep", "answer", "failure"]

PROTOCOL = 2
"""The version of what is said; both ends must speak the same."""

MOST_BYTES = 2**31
"""The size of the largest message that is taken, unless a limit is set."""

_MAGIC = b"LFW1"
_START = struct.Struct("<4sI")
_BODY = struct.Struct("<Q")  # the length of safetensors' header
_MOST_HEADER = 2**20  # bytes of a header, and of the header that safetensors has
_MOST_ELEMENTS = 2**18  # of lists and mappings in a header
_MOST_TEXT = 4096  # bytes of a string in a header
_MOST_DIGITS = 40  # in a row; a number has 20
_DEEPEST = 8  # lists and mappings in each other
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d}" % (_MOST_DIGITS + 1))
_NO_BRACKETS = re.compile(rb"[^][{}]+")
MOST_METRICS = 1000
"""The number of metrics that a client may have, over a run."""
LARGEST = float(torch.finfo(torch.float32).max)
"""The largest metric that is taken, so that whoever draws or sums them has numbers."""
_LARGEST_VALUE = 1e18  # of a tensor: its square is a number in float32, too
_LARGEST_COUNT = 2.0**40  # many of them can be added up in 64 bits
_OF_WORK = frozenset({"lr", "time_s"})  # metrics of local work beside those that a task logs
_MOST_PARTS = 64  # of an exact sum of float64, whose exponents span 2,098 bits: 2098/53 = 39.6
_METRIC = re.compile(r"\w[\w./@+=()-]{0,199}", re.ASCII)  # begins as no formula of a spreadsheet does


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


def shown(text: object, most: int = 300) -> str:
    """Words of another machine, as they may be printed and written into a log: a line of printable ASCII.

    Args:
        text: What it said.
        most: Characters that are shown.
    """
    line = " ".join(str(text)[: 4 * most].split())
    plain = (one if " " <= one <= "~" else one.encode("unicode_escape").decode("ascii") for one in line)
    return "".join(plain)[:most]


def encode(message: Message) -> bytes:
    """A message as bytes; every tensor is exact.

    Raises:
        WireError: If its header is more than anybody takes.
    """
    names = [(group, name) for group, payload in message.tensors.items() for name in payload]
    header = {"word": message.word, "groups": list(message.tensors), "names": names, "fields": dict(message.fields)}
    text = json.dumps(header, separators=(",", ":")).encode()
    if why := _too_much(text):
        raise WireError(
            f"the message {message.word!r} cannot be sent: its header {why}; let more nodes share the clients"
        )
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
    if magic != _MAGIC or len(blob) < _START.size + length + _BODY.size:
        raise WireError(f"{len(blob)} bytes are no message, or part of one; both ends must run the same lit_fed")
    text = blob[_START.size : _START.size + min(length, _MOST_HEADER + 1)]
    why = _too_much(text)
    if not why and _BODY.unpack_from(blob, _START.size + length)[0] > _MOST_HEADER:
        why = f"lists more than {_MOST_HEADER:,} bytes of tensors"
    if why:
        raise WireError(f"a message cannot be read: its header {why}")
    try:
        header = json.loads(text)
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
        raise WireError(f"a message cannot be read: {shown(error, 200)}") from error
    return Message(word, fields, tensors)


def _too_much(text: bytes) -> str:
    """What of a header is over a limit, looked at without parsing it; empty where nothing is."""
    if len(text) > _MOST_HEADER:
        return f"has more than {_MOST_HEADER:,} bytes"
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_ELEMENTS:
        return f"has more than {_MOST_ELEMENTS:,} elements"
    if any(one.end() - one.start() > _MOST_TEXT + 2 for one in _STRING.finditer(text)):
        return f"has a string of more than {_MOST_TEXT:,} bytes"
    rest = _STRING.sub(b"", text)
    if _DIGITS.search(rest):
        return f"has a number of more than {_MOST_DIGITS} digits"
    brackets = _NO_BRACKETS.sub(b"", rest)
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return f"is deeper than {_DEEPEST}, or in parts" if brackets else ""


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


def check_payload(
    payload: Payload, layout: Layout, who: str, varying: Collection[str] = (), nonnegative: Collection[str] = ()
) -> None:
    """Refuse tensors that are not what was asked for.

    Args:
        payload: What came.
        layout: What it must look like.
        who: Whose it is, for the message.
        varying: Those whose first dimension may be smaller, by the same in all of them.
        nonnegative: Those that cannot hold a negative number.

    Raises:
        WireError: For a name, a type, a shape or a value that cannot be.
    """
    if odd := sorted(payload.keys() ^ layout.keys()):
        how = "holds" if odd[0] in payload else "lacks"
        raise WireError(f"what {who} sent {how} {shown(odd[0], 200)!r}; its node runs another model or method")
    rows = min((payload[name].shape[:1] for name in varying if name in layout), default=torch.Size())
    for name, (dtype, most) in layout.items():
        tensor = payload[name]
        shape = rows + most[1:] if name in varying and rows <= most[:1] else most
        if tensor.dtype != dtype or tensor.shape != shape:
            raise WireError(
                f"{name!r} in what {who} sent is {_name(tensor.dtype)} of shape {tuple(tensor.shape)}, where "
                f"{_name(dtype)} of shape {tuple(shape)} is due; its node runs another model or method"
            )
    for name, tensor in payload.items():
        low, high = _extremes(tensor)
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        if not is_whole and not -_LARGEST_VALUE <= low <= high <= _LARGEST_VALUE:
            why = "is not finite" if math.isnan(low) or math.inf in (-low, high) else f"is beyond {_LARGEST_VALUE:g}"
            raise WireError(f"{name[:200]!r} in what {who} sent {why}; it is left out")
        if name in nonnegative and not 0 <= low <= high <= _LARGEST_COUNT:
            raise WireError(f"{name[:200]!r} in what {who} sent is not from 0 to {_LARGEST_COUNT:g}; it is left out")


def _extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest value; NaN where one is."""
    if not tensor.numel():
        return 0.0, 0.0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # no arithmetic in 8 bits
        tensor = tensor.float()
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)


Ranges = Mapping[str, tuple[float, float]]
"""The least and the largest value that a metric of a test can have, by its name: what a task says as ``ranges``."""


def check_metrics(
    metrics: Mapping[str, Any], who: str, trained: bool, ranges: Ranges | None = None
) -> dict[str, float]:
    """Named scalars, as they may be written into tables.

    Args:
        metrics: What came.
        who: Whose it is, for the message.
        trained: They are of local work, whose names begin with ``train/`` and whose values are finite; else of a test.
        ranges: What is known of them.

    Raises:
        WireError: For too many of them, a name or a value that cannot be.
    """
    _check_names(metrics, who, trained)
    for name, value in metrics.items():
        known = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if not known or (trained and not math.isfinite(value)):
            raise WireError(f"{who} sent {_brief(value)} as {name}, which is no finite number")
        if LARGEST < abs(value) < math.inf:
            raise WireError(f"{who} sent {value:.3g} as {name}, which is beyond {LARGEST:.3g}")
        if not trained:
            _check_range(name, value, who, ranges or {})
    return dict(metrics)


def check_sums(
    sums: Mapping[str, Any], who: str, most: int, trained: bool, ranges: Ranges | None = None
) -> dict[str, Total]:
    """Metrics of several clients in sums.

    Args:
        sums: What came.
        who: Whose they are, for the message.
        most: The largest weight that they can have.
        trained: They are of local work; else of a test.
        ranges: What is known of the metrics.

    Raises:
        WireError: For too many of them, a name, a number or a weight that cannot be.
    """
    _check_names(sums, who, trained)
    found = {}
    for name, total in sums.items():
        parts, weight = total if type(total) is list and len(total) == 2 else (None, None)
        if (
            type(parts) is not list
            or len(parts) > _MOST_PARTS
            or not all(type(part) is float for part in parts)
            or type(weight) is not int
            or not 0 <= weight <= most
            or (weight == 0 and parts)
        ):
            raise WireError(f"{who} sent {_brief(total)} as the sum of {name}, which is none")
        value = exact_sum(parts)
        if (trained and not math.isfinite(value)) or LARGEST * max(weight, 1) < abs(value) < math.inf:
            raise WireError(f"{who} sent {value:.3g} as the sum of {name}, which cannot be")
        if not trained:
            _check_range(name, value / max(weight, 1), who, ranges or {})
        found[name] = Total(tuple(parts), weight)
    return found


def _check_range(name: str, value: float, who: str, ranges: Ranges) -> None:
    """Refuse a metric outside of its range, but for rounding; NaN is a metric that could not be measured."""
    low, high = ranges.get(name, (-math.inf, math.inf))
    if value < low - 1e-6 or value > high + 1e-6:
        raise WireError(f"{who} sent {value:.6g} as {name}, which is from {low:g} to {high:g}")


def _check_names(metrics: Mapping[str, Any], who: str, trained: bool) -> None:
    if len(metrics) > MOST_METRICS:
        raise WireError(f"{who} sent {len(metrics):,} metrics, which are more than {MOST_METRICS:,}")
    for name in metrics:
        if not _METRIC.fullmatch(name):
            raise WireError(
                f"{who} sent a metric of the name {shown(name, 50)!r}; names are of letters, digits and ./_@+=()-"
            )
        if trained and not (name.startswith("train/") or name in _OF_WORK):
            raise WireError(f"{who} sent {name} as a metric of its training, which is not one of those")


def check_weight(weight: Any, who: str, due: Collection[float], heaviest: float | None = None) -> float:
    """A client's weight in a mean, an integer where it came as one.

    Args:
        weight: What came.
        who: Whose it is, for the message.
        due: The weights that it can have.
        heaviest: The largest, where the method has weights of its own.

    Raises:
        WireError: If it is no number, or another.
    """
    if type(weight) not in (int, float) or not 0 <= weight < 2**53:  # compared as it is: a float has no 400 digits
        raise WireError(f"{who} sent the weight {_brief(weight)}; it must be a number from 0")
    if heaviest is not None and weight > heaviest:
        raise WireError(f"{who} sent the weight {weight:g}, and the largest of this method is {heaviest:g}")
    if heaviest is None and weight not in due:
        raise WireError(
            f"{who} sent the weight {weight:g}, and has registered {max(due):g} samples; a method with weights of its "
            "own says the largest as `heaviest`"
        )
    number: float = weight
    return number


def _brief(value: Any) -> str:
    """A value that is not what it should be: a number or a text; a list may hold anything, and an integer digits."""
    return shown(value, 50) if type(value) in (float, str) else type(value).__name__


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
