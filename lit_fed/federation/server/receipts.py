"""A server's half of signatures: what nodes sign goes into the run's record, and each gets a receipt of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from lit_fed.callbacks import Callback
from lit_fed.data.partitions.cut import named
from lit_fed.engine.loop.run import RoundRecord, Run
from lit_fed.engine.wire.payload import ClientUpdate, Payload
from lit_fed.errors import WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.keys.statements import Certificates, SigningKey
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import Message, encode
from lit_fed.federation.server.answers import answer_of
from lit_fed.federation.server.requests import Envelope, NoAnswer, Requests
from lit_fed.federation.server.roster import KnownNode, Roster
from lit_fed.tensors import hash_of_named

_MOST_S = 120.0  # time-out of a node that keeps receipts


class Receipting(Callback):
    """Verifies what nodes sign, and sends each node the server's receipts, again until the node has kept them.

    A receipt leaves once a checkpoint has it, so that a resume gives no other one for the same statement. It stands
    behind the record among a run's callbacks, and before what writes checkpoints.

    Args:
        roster: The nodes.
        key: The server's.
        withholds: The run tells nobody who takes part: signatures are verified, and neither kept nor answered.
    """

    tells_of_clients = True

    def __init__(self, roster: Roster, key: SigningKey, withholds: bool = False) -> None:
        self.roster, self.key, self.withholds = roster, key, withholds
        self._line: dict[str, Any] = {}  # further fields of the record's next line
        self._arrived = set[str]()
        self._known = set[str]()  # keys whose certificates the record has
        self._new = list[dict[str, Any]]()  # receipts that no checkpoint has
        self._due = dict[str, list[dict[str, Any]]]()  # receipts that no node has kept, by the node's key
        self._requests = Requests[tuple[str, list[dict[str, Any]]]](roster.grid, roster.limit)

    def verify(self, home: KnownNode, name: str, due: dict[str, Any], signature: str, sent: Payload) -> None:
        """Verify a node's statement, and enter it into the record's next line.

        Args:
            home: The node.
            name: The client or, in a secure sum, the node's key.
            due: The statement without what was sent.
            signature: The node's.
            sent: What was sent.

        Raises:
            WireError: If the node has signed anything else, or with another key than its connection's.
        """
        certificates, texts = Certificates(), [home.certificate.decode()]
        certificates.add(texts)
        statement = {**due, "sent": hash_of_named(sent), "key": home.key, "signature": signature}
        if certificates.objection("update", statement):
            who = named(due["clients"])
            raise WireError(f"the node of {who} has not signed what it received and sent; its answer is dropped")
        if self.withholds:
            return
        self._line.setdefault("signed", {})[name] = statement
        if home.key not in self._known:
            self._known.add(home.key)
            self._line.setdefault("certificates", {})[home.key] = texts

    def close_sum(self, digest: str, nodes: Collection[str]) -> None:
        """Enter the hash of a secure sum into the record's next line, and drop the statements of nodes outside it."""
        if not self.withholds:
            self._line["sum"] = digest
            self._line["signed"] = {name: one for name, one in self._line["signed"].items() if name in nodes}

    @override
    def on_fit_start(self, run: Run) -> None:
        if self.withholds:
            self.roster.say("trainer.record: what nodes sign is not kept, as trainer.privacy withholds who takes part")
            return
        run.statements, channel = self._line, run.federation.channel
        packed = ["broadcast"] * (run.federation.algorithm.addresses or channel.downlink.codec is not None)
        packed += ["updates"] * (channel.uplink.codec is not None)
        self._line["signing"] = {"run": self.roster.identity.run_id, "packed": packed}

    @override
    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Any]) -> None:
        self._take(self._requests.arrived())
        self._send()

    @override
    def on_arrival(self, run: Run, update: ClientUpdate) -> None:
        self._arrived.add(str(update.client_id))

    @override
    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write a receipt for every statement of the round."""
        fates = {str(one.client_id): one.fate.value for one in record.plan}
        counted = self._line["signed"].keys() if "sum" in self._line else self._arrived
        for name, statement in self._line.get("signed", {}).items():
            fate = fates.get(name, "on_time")
            fate = fate if fate != "on_time" or name in counted else "dropped"
            content = {"statement": statement, "fate": fate, "round": record.round_idx, "line": run.line}
            self._new.append(self.key.signed("receipt", content))
        self._line.clear()
        self._arrived.clear()
        if not run.keeps_checkpoints:
            self.state_dict()

    @override
    def on_fit_end(self, run: Run) -> None:
        """Send what is left, and print whose node it did not reach."""
        self._take(self._requests.outcomes())
        self.roster.refresh()
        self._send()
        self._take(self._requests.outcomes())
        if left := [
            client_id for due in self._due.values() for one in due for client_id in one["statement"]["clients"]
        ]:
            why = "did not keep their last receipts; resume with --ckpt_path last once they are connected"
            self.roster.say(Alert(f"the nodes of {named(set(left))} {why}"))

    def _take(self, outcomes: Iterable[tuple[tuple[str, list[dict[str, Any]]], Any]]) -> None:
        for (key, sent), outcome in outcomes:
            if not isinstance(outcome, WireError):
                self._due[key] = [one for one in self._due[key] if one not in sent]
            elif not isinstance(outcome, NoAnswer):
                self.roster.say(Alert(f"a node did not keep {len(sent)} receipts: {outcome}"))

    def _send(self) -> None:
        """Send receipts to nodes that are connected and have none under way."""
        end, under_way = time.monotonic() + _MOST_S, {key for key, _ in self._requests.pending()}
        for node, home in self.roster.homes.items():
            due = [] if home.key in under_way else self._due.get(home.key, [])
            for start in range(0, len(due), schema.MOST_RECEIPTS):
                some = due[start : start + schema.MOST_RECEIPTS]
                content = schema.Receipts(self.roster.identity.run_id, self.key.certificates, some)
                read = partial(answer_of, kind=schema.NodeAnswer)
                self._requests.send(Envelope((home.key, some), node, encode(Message.pack(content)), read, end))

    @override
    def state_dict(self) -> dict[str, Any]:
        """The receipts that no node has kept, which may leave once this is saved."""
        for receipt in self._new:
            self._due.setdefault(receipt["statement"]["key"], []).append(receipt)
        self._new.clear()
        return {"due": {key: list(due) for key, due in self._due.items() if due}, "known": sorted(self._known)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._due, self._known = {key: list(due) for key, due in state["due"].items()}, set(state["known"])
