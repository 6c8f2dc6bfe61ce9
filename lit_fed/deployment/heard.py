"""All that a server reads of what nodes say.

A node may say anything. What is read here is looked at as a whole before any of it is used, and whatever goes wrong
meanwhile is one error, which the caller makes the failure of that node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from lit_fed.data.population.client_report import ClientReport
from lit_fed.data.population.scale import SCALES
from lit_fed.deployment.wire import (
    Message,
    Ranges,
    check_metrics,
    check_payload,
    check_sums,
    check_weight,
    decode,
    shown,
)
from lit_fed.engine.storage.files import Version
from lit_fed.engine.wire.channel import Direction
from lit_fed.engine.wire.payload import Layout, Payload
from lit_fed.engine.wire.totals import Totals
from lit_fed.errors import WireError

T = TypeVar("T")

_SPARE_BYTES = 2**22  # of an answer beside its tensors
_HELD = 2**16  # versions of clients' states that a node may say it holds
_ID = re.compile("0|[1-9][0-9]{0,17}")
_BOOT = re.compile("[0-9a-f]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")


LONGEST_GREETING = 2**22
"""Of an answer without tensors."""


def hear(blob: bytes, limit: int, most: int, read: Callable[[Message], T]) -> T:
    """What a node has said.

    Args:
        blob: Its message, as it came.
        limit: The most bytes that are taken.
        most: The most bytes that it can have, if it is what was asked for.
        read: Makes of the message what is asked for.

    Raises:
        WireError: If it cannot be read, whatever the reason.
    """
    if most < len(blob) <= limit:
        raise WireError(f"an answer of {len(blob):,} bytes is more than the {most:,} that it can have; it is left out")
    try:
        return read(decode(blob, limit))
    except WireError:
        raise
    except Exception as error:  # nobody knows what a node may say, and a run does not end by it
        raise WireError(f"what a node said cannot be read ({type(error).__name__})") from error


class Greeting(NamedTuple):
    """Who a node says that it is.

    Args:
        boot: The name of its process.
        clients: Who lives there.
        sums: Whether it tells of its clients' metrics in sums only.
    """

    boot: str
    clients: Mapping[int, ClientReport]
    sums: bool


def greeting(message: Message, num_clients: int, num_classes: int | None) -> Greeting:
    """What a node answers to a hello.

    Args:
        message: The answer.
        num_clients: Clients of the population.
        num_classes: The length of a histogram; None where there are none.

    Raises:
        WireError: If it will not take part, or what it says cannot be.
    """
    if message.word == "failure":
        raise WireError(shown(message.get("cause", str)))
    _expect(message, "answer")
    clients = {}
    for name, content in message.get("clients", dict).items():
        if not _ID.fullmatch(name) or int(name) >= num_clients or type(content) is not dict:
            raise WireError(f"a node claims {shown(name, 20)!r}; clients are 0 to {num_clients - 1}")
        clients[int(name)] = _report(content, f"client {name}", num_classes)
    if not clients:
        raise WireError("a node claims no client; start it with --client")
    if not _BOOT.fullmatch(boot := message.get("boot", str)):
        raise WireError(f"{shown(boot, 40)!r} is no name of a process; both ends must run the same lit_fed")
    return Greeting(boot, clients, message.get("sums", bool))


def _report(content: Mapping[str, Any], who: str, num_classes: int | None) -> ClientReport:
    samples, histogram, fingerprint, scale = (
        content.get(key) for key in ("samples", "histogram", "fingerprint", "scale")
    )
    counts = [] if histogram is None else histogram
    if (
        type(counts) is not list
        or not all(type(count) is int and 0 <= count < 2**53 for count in (samples, *counts))
        or type(fingerprint) is not str
        or not _SHA256.fullmatch(fingerprint)
        or scale not in (None, *SCALES)
    ):
        raise WireError(f"what {who} reports of its data cannot be; both ends must run the same lit_fed")
    if histogram is not None and (len(counts) != num_classes or sum(counts) != samples):
        raise WireError(
            f"{who} reports {sum(counts):,} samples of {len(counts):,} classes, and has {samples:,} of "
            f"{num_classes or 0:,}; start both with the same data settings"
        )
    assert type(samples) is int
    return ClientReport(samples, None if histogram is None else tuple(counts), fingerprint, scale)


def held(message: Message, clients: Collection[int]) -> list[tuple[str, int]]:
    """The versions of clients' states that a node holds, each once.

    Args:
        message: The answer.
        clients: Who lives there.

    Raises:
        WireError: If they cannot be.
    """
    _expect(message, "answer")
    entries, own = message.get("held", list), {str(one) for one in clients}
    if len(entries) > _HELD:
        raise WireError(f"it holds {len(entries):,} versions of its clients' states, more than {_HELD:,}")
    for entry in entries:
        if type(entry) is not list or [type(part) for part in entry] != [str, int] or not 0 <= entry[1] < 2**32:
            raise WireError("what it says that it holds cannot be; both ends must run the same lit_fed")
    return list(dict.fromkeys((name, at) for name, at in entries if name in own))


def kept(message: Message) -> bool:
    """That a node has kept the end of a run.

    Raises:
        WireError: If it has not.
    """
    if message.word == "failure":
        raise WireError(shown(message.get("cause", str)))
    _expect(message, "answer")
    return True


# ---------------------------------------------------------------------- a client's work


@dataclass(frozen=True, slots=True)
class Due:
    """What an answer may hold.

    Args:
        client_id: Whose it is.
        round_idx: Of which round.
        trained: Of local work; else of a test.
        layout: What its tensors must look like, once they are decoded.
        uplink: Unpacks them.
        weights: The weights that it can have.
        heaviest: The largest, where the method has weights of its own.
        varying: See `lit_fed.engine.method.algorithm.Algorithm.varying`.
        nonnegative: See `lit_fed.engine.method.algorithm.Algorithm.nonnegative`.
        ranges: What is known of metrics.
        sums: The largest weight of sums over the node's clients; None where it may tell none.
    """

    client_id: int
    round_idx: int
    trained: bool
    layout: Layout
    uplink: Direction
    weights: Collection[float]
    heaviest: float | None
    varying: Collection[str]
    nonnegative: Collection[str]
    ranges: Ranges
    sums: int | None

    @property
    def most_bytes(self) -> int:
        """The largest answer that can be one, twice that of a client which has not trained."""
        tensors = sum(dtype.itemsize * shape.numel() for dtype, shape in self.layout.values())
        return 2 * tensors + _SPARE_BYTES


class Heard(NamedTuple):
    """An answer in which nothing can do harm.

    Args:
        cause: Why there is no update; empty where there is one, or nothing to say.
        moved: The client is not there any more.
        payload: Its tensors; None where there is no update.
        weight: Its weight in a mean.
        metrics: What it measured.
        version: Of the state that it has written.
        wire_bytes: Of the tensors as they came.
        sums: What the node's clients measured together.
    """

    cause: str = ""
    moved: bool = False
    payload: Payload | None = None
    weight: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})
    version: Version | None = None
    wire_bytes: int = 0
    sums: Totals = MappingProxyType({})


def answer(message: Message, due: Due) -> Heard:
    """An answer to work that a client was given.

    Raises:
        WireError: If it is none, is to another message, or something in it could do harm.
    """
    who = f"client {due.client_id}"
    if (message.get("client", int), message.get("round", int)) != (due.client_id, due.round_idx):
        raise WireError(f"the answer of {who} is to another message; it is left out")
    sums = message.get("sums", dict)
    if sums and due.sums is None:
        raise WireError(f"the node of {who} sent sums, which are not due from it; it is left out")
    totals = check_sums(sums, f"the node of {who}", due.sums or 0, due.trained, due.ranges)
    if message.word == "failure":
        return Heard(shown(message.get("cause", str)) or "it says no cause", message.get("moved", bool), sums=totals)
    _expect(message, "answer")
    if message.get("silent", bool):
        if due.trained:
            raise WireError(f"{who} has nothing to say of its training; it is left out")
        return Heard(sums=totals)
    if odd := message.tensors.keys() - {"payload"}:
        raise WireError(f"what {who} sent holds {shown(min(odd), 40)!r}; both ends must run the same lit_fed")
    weight = check_weight(message.fields.get("weight"), who, due.weights, due.heaviest)
    metrics = check_metrics(message.get("metrics", dict), who, due.trained, due.ranges)
    arrived = due.uplink.arrive(message.tensors.get("payload", {}))
    check_payload(arrived.payload, due.layout, who, due.varying, due.nonnegative)
    version = _version(message.fields.get("version"), due.round_idx, who) if due.trained else None
    ordered = {name: arrived.payload[name] for name in due.layout}
    return Heard("", False, ordered, weight, metrics, version, arrived.num_bytes, totals)


def _version(version: Any, round_idx: int, who: str) -> Version | None:
    if version is None:
        return None
    if type(version) is not list or [type(part) for part in version] != [int, int]:
        raise WireError(f"the version of the state of {who} is none; both ends must run the same lit_fed")
    if version[0] != round_idx or not 0 <= version[1] < 2**32:
        raise WireError(f"the state of {who} is of round {version[0]}, in round {round_idx}; it is left out")
    return version[0], version[1]


def _expect(message: Message, word: str) -> None:
    if message.word != word:
        raise WireError(f"a node answered with {message.word!r}; both ends must run the same lit_fed")
