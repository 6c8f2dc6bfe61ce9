"""Wire format of the messages between a server and its nodes.

A message is one blob: eight bytes of magic and length, a JSON header, and tensors in safetensors' format. It holds no
code, and it is validated as a whole before any part of it is used. Its size and the size of its header are bounded
before parsing, because a JSON parser can expand sixty megabytes to a gigabyte.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from lit_fed.engine.wire.payload import CLAIMS, Layout, Payload
from lit_fed.engine.wire.totals import Total, exact_sum
from lit_fed.errors import WireError
from lit_fed.federation.messages.body import LENGTH, Blob, Body, Bytes, pack_tensors, read_tensors
from lit_fed.federation.messages.schema import Content, Sum, Word
from lit_fed.tensors import ALIGNED

T = TypeVar("T", bound=Content)

PROTOCOL = 6
"""Version of the wire protocol, which must match."""

MOST_BYTES = 2**31
"""Default maximum size of a message, bytes."""

_MAGIC = b"LFW1"
_START = struct.Struct("<4sI")
_MOST_HEADER = 2**20  # maximum size of the header and of safetensors' header, bytes
_MOST_ELEMENTS = 2**18  # maximum number of elements of lists and mappings in a header
_MOST_TEXT = 4096  # maximum size of a string in a header, bytes
_MOST_DIGITS = 40  # maximum number of consecutive digits; a 64-bit number has 20
_DEEPEST = 8  # maximum nesting depth of a header
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d}" % (_MOST_DIGITS + 1))
_NO_BRACKETS = re.compile(rb"[^][{}]+")
MOST_METRICS = 1000
"""Maximum number of distinct metrics per client and run."""
LARGEST = float(torch.finfo(torch.float32).max)
"""Maximum absolute value of a finite metric, so that plots and sums do not overflow."""
_LARGEST_VALUE = 1e18  # maximum absolute value in a tensor: its square is finite in float32
_LARGEST_COUNT = 2.0**40  # maximum count: sums of many fit into 64 bits
TOLD = frozenset({"lr", *CLAIMS})
"""Settings among a client's metrics, which the server may know: a node that reports sums sends them as they are."""
OF_WORK = TOLD | {"time_s"}
"""Metrics of local training besides the task's."""
_METRIC = re.compile(r"\w[\w./@+=()-]{0,199}", re.ASCII)  # cannot begin like a spreadsheet formula


@dataclass(frozen=True, slots=True)
class Message:
    """A message.

    Args:
        word: The type.
        fields: Primitives, and lists and dicts of primitives.
        tensors: Named tensors by group, such as ``payload`` and ``frozen``, in order.
    """

    word: Word
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Payload] = field(default_factory=dict)

    @property
    def every_tensor(self) -> list[Tensor]:
        """The tensors of all groups, in order."""
        return [tensor for payload in self.tensors.values() for tensor in payload.values()]

    @classmethod
    def pack(cls, content: Content, tensors: Mapping[str, Payload] | None = None) -> Message:
        """Return a message of some fields."""
        return cls(content.word, msgspec.structs.asdict(content), tensors or {})

    def read(self, kind: type[T]) -> T:
        """Return the fields as of a kind.

        Raises:
            WireError: If the message is of another kind: a field is missing, unknown or out of its bounds.
        """
        if self.word != kind.word:
            raise WireError(f"a message is {self.word!r}, and {kind.word!r} is due; run the same lit_fed on both ends")
        try:
            return msgspec.convert(self.fields, kind)
        except (msgspec.ValidationError, UnicodeError) as error:  # the second for half a letter in a field's name
            what = f"a message {self.word!r} is malformed"
            raise WireError(f"{what}; run the same lit_fed on both ends ({shown(error, 200)})") from None


class _Header(msgspec.Struct):
    word: Word
    groups: list[str]
    names: list[tuple[str, str]]
    fields: dict[str, Any]


def shown(text: object, most: int = 300) -> str:
    """Convert untrusted text to one line of at most ``most`` printable ASCII characters, for output and logs."""
    line = " ".join(str(text)[: 4 * most].split())
    plain = (letter if " " <= letter <= "~" else letter.encode("unicode_escape").decode("ascii") for letter in line)
    return "".join(plain)[:most]


Bodies = WeakValueDictionary[tuple[int, ...], Body]
"""Bodies of messages by the identities of their tensors, as long as a message awaits its answer."""


def encode(message: Message) -> bytearray:
    """Serialise a message, with exact tensors; raise `WireError` if the header exceeds a limit."""
    return pack_tensors(message.every_tensor, _head(message))


def encode_shared(message: Message, bodies: Bodies) -> Blob:
    """Serialise a message; messages with the same tensors, which must not change meanwhile, share their bytes."""
    tensors = message.every_tensor
    key = tuple(map(id, tensors))
    if (body := bodies.get(key)) is None:
        body = bodies[key] = Body(pack_tensors(tensors), tensors)
    return Blob(_head(message), body)


def _head(message: Message) -> bytes:
    names = [(group, name) for group, payload in message.tensors.items() for name in payload]
    header = {"word": message.word, "groups": list(message.tensors), "names": names, "fields": dict(message.fields)}
    text = json.dumps(header, separators=(",", ":"), default=msgspec.to_builtins).encode()
    if why := _too_much(text):
        raise WireError(f"the header of a message {message.word!r} {why}; distribute the clients over more nodes")
    text += b" " * (-(_START.size + len(text)) % ALIGNED)
    return _START.pack(_MAGIC, len(text)) + text


def decode(blob: bytes | bytearray, limit: int = MOST_BYTES) -> Message:
    """Parse a message from untrusted bytes; its aligned tensors are views of a bytearray, and else of a copy.

    Raises:
        WireError: If the message is malformed, or has more than ``limit`` bytes.
    """
    if len(blob) > limit:
        raise WireError(
            f"a message of {len(blob):,} bytes exceeds the receiver's limit of {limit:,}; raise --most_bytes there"
        )
    if len(blob) < _START.size:
        raise WireError(f"{len(blob)} bytes are not a message; run the same lit_fed on both ends")
    magic, length = _START.unpack_from(blob)
    if magic != _MAGIC or len(blob) < _START.size + length + LENGTH.size:
        raise WireError(f"{len(blob)} bytes are not a whole message; run the same lit_fed on both ends")
    text = bytes(blob[_START.size : _START.size + min(length, _MOST_HEADER + 1)])
    why = _too_much(text)
    if not why and LENGTH.unpack_from(blob, _START.size + length)[0] > _MOST_HEADER:
        why = f"lists more than {_MOST_HEADER:,} bytes of tensors"
    if why:
        raise WireError(f"the header of a received message {why}; run the same lit_fed on both ends")
    try:
        header = msgspec.convert(json.loads(text), _Header)
        body = read_tensors(blob if isinstance(blob, bytearray) else bytearray(blob), _START.size + length)
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in header.groups}
        for place, (group, name) in enumerate(header.names):
            if name in tensors[group]:
                raise ValueError(f"{name!r} occurs twice")
            tensors[group][name] = body.pop(str(place))
        if body:
            raise ValueError("a tensor has no name")
    except Exception as error:  # malformed bytes raise many exceptions in the parsers
        raise WireError(f"a message cannot be read ({shown(error, 200)})") from error
    return Message(header.word, header.fields, tensors)


def header_of(blob: Bytes) -> dict[str, Any]:
    """Return the header of a message that this end wrote, or has read without an error: nothing is checked."""
    _, length = _START.unpack_from(blob)
    header: dict[str, Any] = json.loads(blob[_START.size : _START.size + length])
    return header


def _too_much(text: bytes) -> str:
    """Return which limit an unparsed header exceeds; empty if none."""
    if len(text) > _MOST_HEADER:
        return f"has more than {_MOST_HEADER:,} bytes"
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_ELEMENTS:
        return f"has more than {_MOST_ELEMENTS:,} elements"
    if any(match.end() - match.start() > _MOST_TEXT + 2 for match in _STRING.finditer(text)):
        return f"has a string of more than {_MOST_TEXT:,} bytes"
    rest = _STRING.sub(b"", text)
    if _DIGITS.search(rest):
        return f"has a number of more than {_MOST_DIGITS} digits"
    brackets = _NO_BRACKETS.sub(b"", rest)
    for _ in range(_DEEPEST):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return f"is nested deeper than {_DEEPEST}, or incomplete" if brackets else ""


# ---------------------------------------------------------------------- what an answer must look like


def check_payload(
    payload: Payload, layout: Layout, who: str, varying: Collection[str] = (), nonnegative: Collection[str] = ()
) -> None:
    """Refuse tensors that do not match a layout.

    Args:
        payload: The received tensors.
        layout: The expected types and shapes.
        who: The sender, for errors.
        varying: Names of tensors whose first dimension may be smaller, by the same amount in all of them.
        nonnegative: Names of tensors that must not hold negative numbers.

    Raises:
        WireError: For an inadmissible name, type, shape or value.
    """
    if odd := sorted(payload.keys() ^ layout.keys()):
        how = "holds" if odd[0] in payload else "lacks"
        raise WireError(
            f"the payload of {who} {how} {shown(odd[0], 200)!r}; use the same model and method on both ends"
        )
    rows = min((payload[name].shape[:1] for name in varying if name in layout), default=torch.Size())
    for name, (dtype, most) in layout.items():
        tensor = payload[name]
        shape = rows + most[1:] if name in varying and rows <= most[:1] else most
        if tensor.dtype != dtype or tensor.shape != shape:
            raise WireError(
                f"{name!r} in the payload of {who} is {_name(tensor.dtype)} of shape {tuple(tensor.shape)}; it must be "
                f"{_name(dtype)} of shape {tuple(shape)}; use the same model and method on both ends"
            )
    for name, tensor in payload.items():
        low, high = _extremes(tensor)
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        if not is_whole and not -_LARGEST_VALUE <= low <= high <= _LARGEST_VALUE:
            why = "is not finite" if math.isnan(low) or math.inf in (-low, high) else f"exceeds {_LARGEST_VALUE:g}"
            raise WireError(f"{name[:200]!r} in the payload of {who} {why}; it is dropped")
        if name in nonnegative and not 0 <= low <= high <= _LARGEST_COUNT:
            raise WireError(
                f"{name[:200]!r} in the payload of {who} is not between 0 and {_LARGEST_COUNT:g}; it is dropped"
            )


def _extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the largest value; NaN if the tensor holds NaN."""
    if not tensor.numel():
        return 0.0, 0.0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # PyTorch lacks arithmetic on float8
        tensor = tensor.float()
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)


Ranges = Mapping[str, tuple[float, float]]
"""The least and the largest value of evaluation metrics by name, as a task declares them in ``ranges``."""


def check_metrics(
    metrics: Mapping[str, Any], who: str, trained: bool, ranges: Ranges | None = None
) -> dict[str, float]:
    """Validate a client's metrics before they are written into tables.

    Args:
        metrics: The received metrics.
        who: The sender, for errors.
        trained: Metrics of local training, which are finite and named ``train/…``; else of an evaluation.
        ranges: The ranges of metrics.

    Raises:
        WireError: For too many metrics, or an inadmissible name or value.
    """
    _check_names(metrics, who, trained)
    for name, value in metrics.items():
        known = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if not known or (trained and not math.isfinite(value)):
            raise WireError(f"{who} sent {_brief(value)} as {name}; it must be a finite number")
        if LARGEST < abs(value) < math.inf:
            raise WireError(f"{who} sent {value:.3g} as {name}; it must be at most {LARGEST:.3g}")
        if trained and name in CLAIMS and value < 0:
            raise WireError(f"{who} sent {value:.3g} as {name}; it must be at least 0")
        if not trained:
            _check_range(name, value, who, ranges or {})
    return dict(metrics)


def check_sums(
    sums: Mapping[str, Sum], who: str, most: int, trained: bool, ranges: Ranges | None = None
) -> dict[str, Total]:
    """Validate summed metrics of several clients.

    Args:
        sums: The received sums.
        who: The sender, for errors.
        most: The largest admissible weight.
        trained: Metrics of local training; else of an evaluation.
        ranges: The ranges of metrics.

    Raises:
        WireError: For too many metrics, or an inadmissible name, value or weight.
    """
    _check_names(sums, who, trained)
    totals = {}
    for name, (parts, weight) in sums.items():
        if not all(type(part) is float for part in parts) or weight > most or (weight == 0 and parts):
            raise WireError(f"{who} sent an odd weight as the sum of {name}; run the same lit_fed on both ends")
        value = exact_sum(parts)
        if not trained:
            _check_range(name, value / max(weight, 1), who, ranges or {})
        if not abs(value) <= LARGEST * max(weight, 1):  # which NaN is not
            raise WireError(f"{who} sent {value:.3g} as the sum of {name}; it must be finite and within float32")
        totals[name] = Total(parts, weight)
    return totals


def _check_range(name: str, value: float, who: str, ranges: Ranges) -> None:
    """Refuse a metric outside its range, up to rounding; NaN stands for a metric that could not be measured."""
    low, high = ranges.get(name, (-math.inf, math.inf))
    if value < low - 1e-6 or value > high + 1e-6:
        raise WireError(f"{who} sent {value:.6g} as {name}; it must be between {low:g} and {high:g}")


def _check_names(metrics: Mapping[str, Any], who: str, trained: bool) -> None:
    if len(metrics) > MOST_METRICS:
        raise WireError(f"{who} sent {len(metrics):,} metrics; the limit is {MOST_METRICS:,}")
    for name in metrics:
        if not _METRIC.fullmatch(name):
            raise WireError(
                f"{who} sent a metric named {shown(name, 50)!r}; names consist of letters, digits and ./_@+=()-"
            )
        if trained and not (name.startswith("train/") or name in OF_WORK):
            raise WireError(f"{who} sent {name} as a metric of its training; it must begin with train/")


def check_weight(weight: Any, who: str, due: Collection[float], heaviest: float | None = None) -> float:
    """Validate a client's weight in a mean; an integer stays one.

    Args:
        weight: The received weight.
        who: The sender, for errors.
        due: The admissible weights.
        heaviest: The largest weight, for a method that chooses the weights.

    Raises:
        WireError: If the weight is not a number, or inadmissible.
    """
    if type(weight) not in (int, float) or not 0 <= weight < 2**53:  # no conversion, which fails for huge integers
        raise WireError(f"{who} sent the weight {_brief(weight)}; it must be a number of at least 0")
    if heaviest is not None and weight > heaviest:
        raise WireError(f"{who} sent the weight {weight:g}; it must be at most {heaviest:g} with this method")
    if heaviest is None and weight not in due:
        raise WireError(
            f"{who} sent the weight {weight:g}, and registered {max(due):g} samples; a method that chooses the weights "
            "declares the largest as `heaviest`"
        )
    number: float = weight
    return number


def _brief(value: Any) -> str:
    """Show an invalid number or text; of any other value, which may be huge, the type's name."""
    return shown(value, 50) if type(value) in (float, str) else type(value).__name__


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
