"""Secure sums over nodes: the server's end, which relays the protocol's messages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.clients.executor import Question
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.engine.wire.totals import Totals
from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import MOST_METRICS, Message, Ranges, check_metrics, check_sums
from lit_fed.federation.secure import messages as protocol
from lit_fed.federation.secure.coordinator import Coordinator
from lit_fed.federation.secure.messages import Invitation, Refusal, TooFew, TooSmall
from lit_fed.federation.secure.packed import SumCall, about, unpack
from lit_fed.federation.secure.signer import public_key
from lit_fed.federation.secure.summed import NodeSums, Summed, SummedSecurely, length_of
from lit_fed.federation.server.answers import LONGEST_GREETING, answer_of
from lit_fed.privacy.bounded_sum import grid_of
from lit_fed.tensors import hash_of, hash_of_groups, hash_of_named

if TYPE_CHECKING:
    from lit_fed.federation.server.receipts import Receipting
    from lit_fed.federation.server.roster import Roster

_MOST_ATTEMPTS = 3
_ANSWERS = {
    "keys": protocol.SignedKeys,
    "shares": protocol.Sealed,
    "vectors": protocol.Masked,
    "consents": protocol.Consent,
    "total": protocol.Unmasking,
}


class _Offer(NamedTuple):
    """A node's answer to the first message: its name, its public key, and the names of its clients' metrics."""

    name: str
    key: Any
    public: str
    metrics: frozenset[str]


class _Found(NamedTuple):
    """A sum over nodes, in int64, the metrics' names, and whose answers are in it."""

    total: Tensor
    names: tuple[str, ...]
    clients: frozenset[int]
    nodes: int


class Summing:
    """The server's end of secure sums.

    Args:
        roster: The nodes.
        summed: The setting, which asks this object for sums from now on.
        seconds: Time-out of a message.
        receipts: Verifies what nodes sign; None where they do not.
    """

    def __init__(
        self, roster: Roster, summed: SummedSecurely, seconds: float, receipts: Receipting | None = None
    ) -> None:
        self.roster, self.summed, self.seconds, self.receipts = roster, summed, seconds, receipts
        self._received = ""  # hash of the broadcast, where nodes sign
        summed.settings.check_nodes(len(roster.homes), f", and {len(roster.homes)} nodes are connected")
        summed.over_nodes = self

    def train(self, broadcast: Broadcast, clients: Sequence[int], sums: NodeSums) -> Summed:
        """Sum the updates of clients that have trained."""
        begun, before = time.perf_counter(), self.roster.grid.num_bytes
        work = {"work": "train", "protocol": "", "subset": ""}
        found, attempts = self._total(work, broadcast, clients, len(sums.origin), sums.grid, "is skipped")
        if found is None:
            return replace(sums.read(sums.words([])[0], []), clients=frozenset())
        summed = sums.read(found.total.to(sums.origin.device), found.names)
        if summed.count != len(found.clients):
            raise ConfigError(
                f"the secure sum counts {summed.count} updates of {len(found.clients)} clients; a node sent a wrong "
                "vector"
            )
        costs = {
            "secure_sum/nodes": found.nodes, "secure_sum/attempts": attempts,
            "secure_sum/bytes": self.roster.grid.num_bytes - before, "time/secure_sum_s": time.perf_counter() - begun,
        }  # fmt: skip
        return replace(summed, clients=found.clients, costs=costs)

    def ask(self, question: Question, broadcast: Broadcast, clients: Sequence[int], ranges: Ranges) -> Totals:
        """Sum the metrics of clients that have answered a question."""
        work = {"work": "ask", "protocol": question.protocol, "subset": question.subset}
        grid, lacks = grid_of(self.summed.settings.clip), f"has no {question.protocol} metrics"
        found, _ = self._total(work, broadcast, clients, 0, grid, lacks)
        if found is None:
            return {}
        metrics = self.summed.sums(None, {}).read(found.total, found.names).metrics
        told = {name: ((total,), count) for name, (total, count) in metrics.items() if count and math.isfinite(total)}
        return check_sums(told, "the secure sum", len(clients), False, ranges)

    def reach(self, clients: Sequence[int]) -> tuple[int, int]:
        """See `SumOverNodes`; clients whose nodes are not connected may be on one node each."""
        homes = [self.roster.home(client_id) for client_id in clients]
        nodes = {home.node for home in homes if home is not None}
        return len(nodes) + homes.count(None), self._smallest()

    def _smallest(self) -> int:
        """The least number of nodes with clients in a sum to which as many nodes as the threshold consent."""
        asked = sorted(home.smallest for home in self.roster.homes.values())
        return max(asked[: self.summed.settings.threshold], default=0)

    def _total(
        self, work: Mapping[str, str], broadcast: Broadcast, clients: Sequence[int], size: int, grid: float, lacks: str
    ) -> tuple[_Found | None, int]:
        """The sum, and the number of attempts, each with fresh keys; None, and a line, if too few nodes have clients.

        Args:
            work: What the sum is of, in a request's words.
            broadcast: What the clients worked with.
            clients: The clients.
            size: Number of the model's coordinates.
            grid: The grid of the sum.
            lacks: What a round without the sum lacks, for the line.
        """
        (kind,) = broadcast.wire
        if self.receipts is not None:
            frozen = {name: hash_of(tensor) for name, tensor in broadcast.frozen.get(kind, {}).items()}
            self._received = hash_of_named(broadcast.wire[kind], frozen)
        model = hash_of_groups({"payload": broadcast.wire[kind], "frozen": broadcast.frozen.get(kind, {})})
        asked = {**work, "run": self.roster.identity.run_id, "round": broadcast.round_idx}
        for attempt in range(_MOST_ATTEMPTS):
            try:
                return self._attempt(asked, model, clients, size, grid), attempt + 1
            except TooFew as error:
                last = error
                if not isinstance(error, TooSmall):
                    self.roster.say(Alert(f"round {broadcast.round_idx}: the secure sum failed: {error}"))
        if isinstance(last, TooSmall):
            self.roster.say(Alert(f"round {broadcast.round_idx} {lacks}: {last}"))
            return None, _MOST_ATTEMPTS
        raise TooFew(f"round {broadcast.round_idx} has no secure sum after {_MOST_ATTEMPTS} attempts: {last}")

    def _attempt(self, asked: Mapping[str, Any], model: str, clients: Sequence[int], size: int, grid: float) -> _Found:
        self.roster.refresh()
        wanted = set(clients)
        homes = {node: home for node, home in self.roster.homes.items() if home.boot not in self.roster.late}
        mine = {node: sorted(wanted & home.clients.keys()) for node, home in homes.items()}
        trained = asked["work"] == "train"
        smallest = 0 if trained and self.summed.noise else self._smallest()
        having = sum(any(not trained or self.summed.contributes(one) for one in own) for own in mine.values())
        if having < smallest:
            raise TooSmall(f"{having} of {len(mine)} nodes have clients in it, and {smallest} must")
        questions = {node: schema.SumOffer(stage="offer", clients=own, **asked) for node, own in mine.items()}
        offers = self._offers(questions, trained)
        if len(offers) < (least := self.summed.settings.threshold):
            raise TooFew(f"{len(offers)} of {len(mine)} nodes are left for keys, and {least} are needed")
        at = {offer.name: node for node, offer in offers.items()}
        work = next(iter(questions.values())).request(())
        names = tuple(sorted({name for offer in offers.values() for name in offer.metrics}))
        length = length_of(size, names)
        call = Invitation(
            work.name, work.round_idx, time.time_ns(), tuple(sorted(at)), least, length,
            about(model, size, grid, names), self.summed.settings.dishonest,
        )  # fmt: skip
        server = Coordinator(call, {offer.name: offer.key for offer in offers.values()}, smallest)
        public = {offer.name: offer.public for offer in offers.values()}
        noise = self.summed.noise
        deviation = 0 if noise is None else noise.deviation
        receipts = self.receipts if trained else None

        def read(stage: schema.Stage, node: int, message: Message) -> Any:
            signs = stage == "vectors" and receipts is not None
            said = answer_of(message, schema.SignedSumAnswer if signs else schema.SumAnswer)
            sent, own, home = message.tensors.get("secure", {}), mine[node], homes[node]
            if receipts is not None and isinstance(said, schema.SignedSumAnswer):
                due = {"run": asked["run"], "round": asked["round"], "clients": own, "weight": None}
                due["received"] = self._received if own else None
                receipts.verify(home, home.key, due, said.signature, sent)
            try:
                return unpack(_ANSWERS[stage], said.message, sent)
            except Refusal as error:
                raise WireError(str(error)) from None

        common: dict[str, Any] = {"names": list(names), "grid": grid, "deviation": deviation, "nodes": public}

        def ask(stage: schema.Stage, messages: Mapping[str, Any]) -> dict[str, Any]:
            """Send a stage's messages by the nodes' names; return the answers."""
            sent: dict[int, Message] = {}
            for name, message in messages.items():
                if stage == "keys":
                    content: schema.Content = SumCall(
                        stage=stage, call=message, clients=mine[at[name]], **asked, **common
                    )
                else:
                    content = schema.SumStep(stage, message)
                sent[at[name]] = Message.pack(content)
            most = LONGEST_GREETING + (8 * length if stage == "vectors" else 0)
            answers = self.roster.ask(sent, self.seconds, partial(read, stage), most, strict=True)
            return {name: answers[node] for name, node in at.items() if node in answers}

        total = torch.from_numpy(server.run(ask).view(np.int64))
        if receipts is not None:
            receipts.close_sum(hash_of(total), server.survivors)
        summed = frozenset(client_id for name in server.survivors for client_id in mine[at[name]])
        return _Found(total, names, summed, len(server.survivors))

    def _offers(self, asked: Mapping[int, schema.SumOffer], trained: bool) -> dict[int, _Offer]:
        """Ask nodes for their keys and the names of metrics."""
        messages = {node: Message.pack(offer) for node, offer in asked.items()}
        known: dict[str, int] = {}

        def read(node: int, message: Message) -> _Offer:
            offered = unpack(schema.Offered, answer_of(message, schema.SumAnswer).message, {})
            name, key = public_key(offered.key)
            if (own := self.roster.homes[node].key) and own != name:
                raise WireError("it signs with another key than its certificate's")
            if known.setdefault(name, node) != node:
                raise WireError(f"it signs with the key of node {known[name]}")
            check_metrics(dict.fromkeys(offered.names, 0.0), "it", trained)
            return _Offer(name, key, offered.key, frozenset(offered.names))

        offers, names = self.roster.ask(messages, self.seconds, read, strict=True), set[str]()
        for node, offer in sorted(offers.items(), key=lambda entry: len(entry[1].metrics)):
            if len(names | offer.metrics) > MOST_METRICS:
                self.roster.say(
                    Alert(f"node {node} is left out: all nodes' metrics have at most {MOST_METRICS:,} names")
                )
                del offers[node]
            else:
                names |= offer.metrics
        return offers
