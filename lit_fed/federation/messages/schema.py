"""The fields of every message between a server and its nodes: a class for each word, with bounds in its annotations.

Every field is required, and a field that the class lacks is refused. What depends on a run, such as layouts, ranges,
weights and rosters, is checked by a message's reader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from typing_extensions import override

from lit_fed.data.population.census import ClientReport, Scale
from lit_fed.engine.wire.request import Request
from lit_fed.errors import WireError

Stage = Literal["offer", "keys", "shares", "vectors", "consents", "total"]
Word = Literal["hello", "held", "train", "ask", "secure", "receipts", "keep", "statistics", "answer", "failure"]

MOST_DROPPED = 1000
"""Maximum number of a client's states that one message may delete."""
Number = Annotated[int, Meta(ge=0, lt=2**32)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[str, Meta(pattern=r"\A[^/]{0,100}\Z")]
RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Boot = Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
"""Id of a node's process."""
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
StateVersion = tuple[Number, Number] | None
"""A `lit_fed.engine.storage.packs.Version`; None without a state."""
Sum = tuple[Annotated[tuple[int | float, ...], Meta(max_length=64)], Count]
"""Parts of an exact sum, and its weight; float64's exponents span 2,098 bits, and 2098/53 = 39.6 parts are enough."""
MOST_RECEIPTS = 32
"""Maximum number of receipts in a message."""
Signature = Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){8,256}\Z")]
Key = Annotated[str, Meta(max_length=1024)]
"""A public key in DER, as hexadecimal digits."""


class Content(Struct, forbid_unknown_fields=True):
    """The fields of a message."""

    word: ClassVar[Word]


# ---------------------------------------------------------------------- from the server


class Hello(Content, forbid_unknown_fields=False):  # another version's may hold more, and is refused by its version
    """The question who a node is, with the settings that must match.

    ``config`` is the SHA-256 of the run's configuration file, for nodes that stand; empty if it is not one file.
    """

    word = "hello"
    protocol: int
    version: str
    settings: Mapping[str, str]
    config: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]


class ListStates(Content):
    """The question which versions of states a node holds."""

    word = "held"
    run: RunId


class RoundRequest(Content):
    """A request about a round: of which run and round clients' work, or the sum of it, is."""

    run: RunId
    round: int

    @property
    def question(self) -> tuple[str, str, str]:
        """The work, the protocol that asks, and the data in question; a training has no second name."""
        return "train", "", ""

    def request(self, clients: Collection[int], model: str = "") -> Request:
        """Return the request for some clients; raise `WireError` if a client is listed twice."""
        if len(set(clients)) < len(clients):
            raise WireError("the list of clients of a request is malformed; run the same lit_fed on both ends")
        return Request(self.run, *self.question, self.round, model, tuple(sorted(clients)))


class ClientWork(RoundRequest):
    """The work of a client; ``together`` are all clients of the node that get the same request."""

    client: int
    boot: str
    version: StateVersion
    drop: Annotated[list[Number], Meta(max_length=MOST_DROPPED)]
    together: list[int]
    frozen: Mapping[str, Sha256]


class Train(ClientWork):
    """The training of a client."""

    word = "train"


class Ask(ClientWork):
    """The question of a protocol to a client."""

    word = "ask"
    protocol: Name
    subset: Name

    @property
    @override
    def question(self) -> tuple[str, str, str]:
        return "ask", self.protocol, self.subset


class SumOffer(RoundRequest):
    """The question which metrics a node has for a secure sum, or the beginning of an attempt."""

    word = "secure"
    stage: Stage
    work: Literal["train", "ask"]
    protocol: Name
    subset: Name
    clients: list[int]

    @property
    @override
    def question(self) -> tuple[str, str, str]:
        return ("ask", self.protocol, self.subset) if self.work == "ask" else ("train", "", "")


class SumStep(Content):
    """A later message of an attempt."""

    word = "secure"
    stage: Stage
    message: Any


class Receipts(Content):
    """Receipts for what a node sent, and the server's certificate with those of intermediate authorities.

    A receipt is read where it is verified, see docs/record.md.
    """

    word = "receipts"
    run: RunId
    certificates: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(min_length=1, max_length=8)]
    receipts: Annotated[list[dict[str, Any]], Meta(max_length=MOST_RECEIPTS)]


class Keep(Content):
    """The end of a run."""

    word = "keep"
    run: RunId
    round: int
    versions: Mapping[str, StateVersion]
    frozen: Mapping[str, Mapping[str, Sha256]]


class AskStatistics(Content):
    """The question for statistics of a client, or of all clients of a node (−1)."""

    word = "statistics"
    client: int
    boot: str
    bins: Annotated[int, Meta(ge=1)]
    least: Annotated[int, Meta(ge=1, lt=2**53)]


# ---------------------------------------------------------------------- from nodes


class Failure(Content, forbid_unknown_fields=False):  # whatever failed, its cause is told
    """The reason why a node does not answer."""

    word = "failure"
    cause: str


class WorkFailure(Failure, forbid_unknown_fields=True):
    """The reason why a client has no answer; with ``moved`` it has left this process."""

    client: int
    round: int
    moved: bool
    sums: Mapping[str, Sum]


class NodeAnswer(Content):
    """The answer that something is done."""

    word = "answer"


@dataclass(frozen=True)
class DataReport(ClientReport):
    """A client's report, with bounds."""

    samples: Count
    histogram: tuple[Count, ...] | None
    fingerprint: Sha256
    scale: Scale | None = field()  # required


class Greeted(NodeAnswer):
    """The answer to `Hello`; ``smallest_sum`` is 0 without secure sums, ``most_bytes`` the largest message it reads."""

    boot: Boot
    clients: Mapping[str, DataReport]
    sums: bool
    smallest_sum: Annotated[int, Meta(ge=0)]
    most_bytes: Annotated[int, Meta(ge=1)]
    frozen: dict[str, dict[str, Sha256]]


class States(NodeAnswer):
    """The answer to `ListStates`: names and rounds."""

    held: Annotated[list[tuple[str, Number]], Meta(max_length=2**16)]


class WorkAnswer(NodeAnswer):
    """The answer of a client; ``silent`` without tensors. Its metrics and its weight are refused by their names."""

    client: int
    round: int
    silent: bool
    sums: Mapping[str, Sum]
    weight: Any
    metrics: Mapping[str, Any]
    version: StateVersion


class SignedAnswer(WorkAnswer):
    """The answer of a client where nodes sign."""

    signature: Signature


class SiteAnswer(NodeAnswer):
    """The answer to `AskStatistics`: the number of clients."""

    clients: int


class SumAnswer(NodeAnswer):
    """The answer to a message of a secure sum."""

    message: Any


class SignedSumAnswer(SumAnswer):
    """A vector under masks where nodes sign."""

    signature: Signature


class Offered(Struct, forbid_unknown_fields=True):
    """The message that answers an `SumOffer`: names of metrics, and the node's public key."""

    names: list[str]
    key: Key
