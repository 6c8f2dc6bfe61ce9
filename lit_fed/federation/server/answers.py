"""Validation of everything that a server receives from nodes.

Nodes are untrusted. A message is validated as a whole before any part of it is used. Every problem is a `WireError`,
which the caller turns into the failure of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from lit_fed.data.population.census import ClientReport
from lit_fed.engine.storage.packs import Version
from lit_fed.engine.wire.channel import Context, Direction
from lit_fed.engine.wire.payload import Layout, Payload
from lit_fed.engine.wire.totals import Totals
from lit_fed.errors import WireError
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.frozen import Hashes
from lit_fed.federation.messages.wire import (
    TOLD,
    Message,
    Ranges,
    check_metrics,
    check_payload,
    check_sums,
    check_weight,
    decode,
    shown,
)

T = TypeVar("T")
A = TypeVar("A", bound=schema.NodeAnswer)

_SPARE_BYTES = 2**22  # maximum size of an answer without its tensors

LONGEST_GREETING = 2**22
"""Maximum size of an answer without tensors, bytes."""


def hear(blob: bytes | bytearray, limit: int, most: int, read: Callable[[Message], T]) -> T:
    """Decode and validate a node's message.

    Args:
        blob: The received bytes.
        limit: Maximum size of any message, bytes.
        most: Maximum size of the expected answer, bytes.
        read: Validates and converts the decoded message.

    Raises:
        WireError: If any of this fails, for whatever reason.
    """
    if most < len(blob) <= limit:
        raise WireError(f"an answer has {len(blob):,} bytes, and at most {most:,} are expected; it is dropped")
    try:
        return read(decode(blob, limit))
    except WireError:
        raise
    except Exception as error:  # untrusted input must not end the run
        raise WireError(f"a node's message cannot be read ({type(error).__name__})") from error


class Greeting(NamedTuple):
    """A node's answer to a hello: its process's id, its clients, whether it reports sums only, its frozen tensors.

    Last, the least number of nodes with clients in a secure sum, 0 without secure sums, and the size of the largest
    message that it reads, bytes.
    """

    boot: str
    clients: Mapping[int, ClientReport]
    sums: bool
    frozen: Hashes
    smallest: int
    most_bytes: int


def greeting(message: Message, num_clients: int, num_classes: int | None) -> Greeting:
    """Validate a node's answer to a hello.

    Raises:
        WireError: If the node refuses to take part, or its answer is invalid.
    """
    said = answer_of(message, schema.Greeted)
    if not said.clients:
        raise WireError("a node has no clients; start it with --client")
    for name, report in said.clients.items():
        if not name.isdecimal() or str(int(name)) != name or int(name) >= num_clients:
            raise WireError(f"a node claims client {shown(name, 20)!r}; clients are 0 to {num_clients - 1}")
        counts = report.histogram
        if counts is not None and (len(counts) != num_classes or sum(counts) != report.samples):
            raise WireError(
                f"client {name} reports {report.samples:,} samples, and a histogram of {sum(counts):,} samples and "
                f"{len(counts):,} classes where {num_classes or 0:,} are expected; use the same data settings on both "
                "ends"
            )
    clients = {int(name): report for name, report in said.clients.items()}
    return Greeting(said.boot, clients, said.sums, said.frozen, said.smallest_sum, said.most_bytes)


def held(message: Message, clients: Collection[int]) -> list[tuple[str, int]]:
    """Validate the versions of states that a node holds; drop duplicates, and states of other nodes' clients.

    Raises:
        WireError: If they are malformed or too many.
    """
    names = {str(client_id) for client_id in clients}
    return list(dict.fromkeys((name, at) for name, at in answer_of(message, schema.States).held if name in names))


def answer_of(message: Message, kind: type[A]) -> A:
    """Return a node's answer of a kind; refuse any other message, and a refusal with its reason, as a `WireError`."""
    if message.word == "failure":
        raise WireError(shown(message.read(schema.Failure).cause))
    return message.read(kind)


# ---------------------------------------------------------------------- a client's work


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The constraints on an answer.

    Args:
        trained: Whether it answers local training; else an evaluation.
        layout: Types and shapes of the decoded tensors.
        uplink: Decodes and counts the payload.
        context: The context in which the client packed it.
        weights: The admissible weights.
        heaviest: The largest weight, for a method that chooses the weights.
        varying: See `lit_fed.engine.method.algorithm.Algorithm.varying`.
        nonnegative: See `lit_fed.engine.method.algorithm.Algorithm.nonnegative`.
        ranges: The ranges of metrics.
        sums: The largest weight of sums over the node's clients; None forbids sums.
        withheld: Whether the node reports sums only: a client's own metrics beside them would count twice.
        kind: The message's fields.
    """

    client_id: int
    round_idx: int
    trained: bool
    layout: Layout
    uplink: Direction
    context: Context
    weights: Collection[float]
    heaviest: float | None
    varying: Collection[str]
    nonnegative: Collection[str]
    ranges: Ranges
    sums: int | None
    withheld: bool = False
    kind: type[schema.WorkAnswer] = schema.WorkAnswer

    @property
    def most_bytes(self) -> int:
        """Maximum size of an answer, bytes: twice the tensors' size, and `_SPARE_BYTES`."""
        tensors = sum(dtype.itemsize * shape.numel() for dtype, shape in self.layout.values())
        return 2 * tensors + _SPARE_BYTES


class ClientAnswer(NamedTuple):
    """A validated answer.

    Args:
        cause: The reason of a failure; empty without one.
        moved: The client has left this node's process.
        payload: The tensors; None without an update.
        version: The version of the state that the client wrote.
        wire_bytes: Size of the tensors as received.
        sums: Summed metrics of the node's clients.
        decoder: See `lit_fed.engine.wire.payload.Arrival`.
    """

    cause: str = ""
    moved: bool = False
    payload: Payload | None = None
    weight: float = 0.0
    metrics: Mapping[str, float] = MappingProxyType({})
    version: Version | None = None
    wire_bytes: int = 0
    sums: Totals = MappingProxyType({})
    decoder: Payload | None = None


def answer(message: Message, expected: ExpectedAnswer) -> ClientAnswer:
    """Validate a client's answer to training or evaluation.

    Raises:
        WireError: If the answer is malformed, belongs to another message, or violates ``expected``.
    """
    who = f"client {expected.client_id}"
    said = message.read(schema.WorkFailure) if message.word == "failure" else message.read(expected.kind)
    if (said.client, said.round) != (expected.client_id, expected.round_idx):
        raise WireError(f"the answer of {who} belongs to another message; it is dropped")
    if said.sums and expected.sums is None:
        raise WireError(f"the node of {who} sent sums that were not requested; its answer is dropped")
    totals = check_sums(said.sums, f"the node of {who}", expected.sums or 0, expected.trained, expected.ranges)
    if isinstance(said, schema.WorkFailure):
        return ClientAnswer(shown(said.cause) or "it gave no cause", said.moved, sums=totals)
    if said.silent:
        if expected.trained:
            raise WireError(f"{who} sent no update from its training; it is dropped")
        return ClientAnswer(sums=totals)
    if odd := message.tensors.keys() - {"payload"}:
        raise WireError(
            f"the update of {who} has an unknown group {shown(min(odd), 40)!r}; run the same lit_fed on both ends"
        )
    weight = check_weight(said.weight, who, expected.weights, expected.heaviest)
    metrics = check_metrics(said.metrics, who, expected.trained, expected.ranges)
    if expected.withheld and (odd := metrics.keys() - TOLD):
        raise WireError(f"{who} sent {min(odd)}, and its node registered to report sums only; it is dropped")
    arrived = expected.uplink.arrive(message.tensors.get("payload", {}), expected.context)
    check_payload(arrived.payload, expected.layout, who, expected.varying, expected.nonnegative)
    version = said.version if expected.trained else None
    if version is not None and version[0] != expected.round_idx:
        raise WireError(f"the state of {who} is from round {version[0]}, in round {expected.round_idx}; it is dropped")
    ordered = {name: arrived.payload[name] for name in expected.layout}
    return ClientAnswer("", False, ordered, weight, metrics, version, arrived.num_bytes, totals, arrived.decoder)
