"""A node's part in secure sums: it keeps what its clients answer, and gives their sum under masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Payload
from lit_fed.errors import BudgetSpent
from lit_fed.privacy.bounded_sum import grid_of
from lit_fed.secure.masks import Words
from lit_fed.secure.messages import AllKeys, Consents, Invitation, Refusal, Relayed, Survivors, ToServer
from lit_fed.secure.packed import Plain, about, pack, unpack
from lit_fed.secure.party import Party
from lit_fed.secure.signer import Signer
from lit_fed.secure.summed import Logged, SummedSecurely
from lit_fed.tensors import hash_of_groups

_STAGES = {"shares": AllKeys, "vectors": Relayed, "consents": Survivors, "total": Consents}
_TOLD = "lr"  # a setting among a client's metrics
_MOST_NAMES = 1000


class SummedWork(NamedTuple):
    """A request to clients, whose updates or metrics make one secure sum."""

    run: str
    work: str
    protocol: str
    subset: str
    round_idx: int

    @property
    def name(self) -> str:
        """The sum's name in a call."""
        return "/".join(self[:-1])


def work_of(fields: Mapping[str, Any]) -> SummedWork:
    """Read it from a message's fields, which are untrusted."""
    texts, round_idx = [fields.get(name, "") for name in SummedWork._fields[:-1]], fields.get("round")
    if any(type(text) is not str or "/" in text for text in texts) or type(round_idx) is not int:
        raise Refusal("the work that a secure sum is of is malformed")
    run, work, protocol, subset = texts
    return SummedWork(run, work, protocol, subset, round_idx)


class OwnWork:
    """Keeps the updates and metrics of this node's clients until another work is asked for.

    Args:
        summed: The setting; set up with the node's run.
        signer: The node's key.
        limit: Maximum size of a message, bytes.
    """

    def __init__(self, summed: SummedSecurely, signer: Signer, limit: int) -> None:
        self.summed, self.signer, self.limit = summed, signer, limit
        self.party = Party(signer.name, signer.key, {}, summed.settings.threshold)
        self._work: SummedWork | None = None
        self._model = ""
        self._broadcast: Broadcast | None = None
        self._updates: dict[int, ClientUpdate] = {}
        self._logged: Logged = {}

    def keep(
        self, fields: Mapping[str, Any], tensors: Mapping[str, Payload], broadcast: Broadcast, update: ClientUpdate
    ) -> ClientUpdate:
        """Keep a client's answer, and return what leaves the node: that there is one.

        Args:
            fields: Of the message that asked for it.
            tensors: The same message's.
            broadcast: What the client worked with.
            update: The answer.
        """
        work = work_of(fields)
        model = hash_of_groups({group: tensors.get(group, {}) for group in ("payload", "frozen")})
        if (work, model) != (self._work, self._model):
            self._work, self._model, self._broadcast = work, model, broadcast
            self._updates, self._logged = {}, {}
        client_id = update.client_id
        self._updates[client_id] = update.detached()
        if work.work == "train":
            self._logged[client_id] = self.summed.logged.pop(client_id)
        else:
            known = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
            self._logged[client_id] = (known, 1)
        told = {name: value for name, value in update.metrics.items() if name == _TOLD and work.work == "train"}
        return replace(update, payload={}, weight=0, metrics=told, flat=None)

    def answer(self, fields: Mapping[str, Any], tensors: Payload) -> Plain:
        """Answer a message of the protocol.

        Args:
            fields: ``stage``, and what the stage needs; untrusted.
            tensors: The message's; untrusted.

        Raises:
            Refusal: If the server broke the protocol; the attempt ends.
        """
        stage = fields.get("stage")
        try:
            if stage == "offer":
                names = {name for client_id in self._clients(fields) for name in self._logged[client_id][0]}
                return {"names": sorted(names), "key": self.signer.public.hex()}, {}
            if stage == "keys":
                return pack(self._begin(fields))
            if type(stage) is not str or stage not in _STAGES:
                raise Refusal("the stage of a secure sum is malformed")
            return pack(self.party.answer(unpack(_STAGES[stage], fields.get("message", {}), tensors)))
        except Refusal:
            self.party.forget()
            raise

    def _clients(self, fields: Mapping[str, Any]) -> list[int]:
        """The clients whose answers are to be summed."""
        work, clients = work_of(fields), fields.get("clients")
        if (
            type(clients) is not list
            or any(type(one) is not int for one in clients)
            or len(set(clients)) < len(clients)
        ):
            raise Refusal("the list of clients of a secure sum is malformed")
        known = self._updates.keys() if work == self._work else ()
        if odd := sorted(set(clients) - set(known)):
            raise Refusal(f"this node has no work of client {odd[0]} in round {work.round_idx}, which is to be summed")
        return sorted(clients)

    def _begin(self, fields: Mapping[str, Any]) -> ToServer:
        work, clients, names = work_of(fields), self._clients(fields), fields.get("names")
        call = unpack(Invitation, fields.get("call", {}), {})
        call.check()
        if (call.run, call.round_idx) != (work.name, work.round_idx):
            raise Refusal("the call of the secure sum is for another work")
        if call.threshold != (due := self.summed.settings.threshold):
            raise Refusal(f"the threshold is {call.threshold}, and trainer.secure_sum.threshold is {due} on this node")
        if call.dishonest != self.summed.settings.dishonest:
            raise Refusal("the call bears another number of nodes than trainer.secure_sum.dishonest on this node")
        if 8 * call.length > self.limit:
            raise Refusal(f"the call has vectors of {call.length} words, beyond --most_bytes of this node")
        if type(names) is not list or len(names) > _MOST_NAMES or any(type(name) is not str for name in names):
            raise Refusal("the names of metrics of a secure sum are malformed")
        self.party.identities = self.signer.known(fields.get("nodes"))
        noise, trained = self.summed.noise, work.work == "train"
        if noise is not None and trained:
            if names:
                raise Refusal("metrics of training are not summed where trainer.privacy.honest_nodes is set")
            if (fields.get("grid"), fields.get("deviation")) != (noise.grid, noise.deviation):
                raise Refusal(
                    "the server accounts for other noise than this node adds; set trainer.max_rounds alike on both, or "
                    "noise_multiplier"
                )
        words = self._vector(call, clients, tuple(names), fields.get("grid"))
        if trained:
            try:
                words = self.summed.noised(words, call.round_idx, call.run)
            except BudgetSpent as error:
                raise Refusal(str(error)) from None
        own: Words = words[0].cpu().numpy().view(np.uint64)
        return self.party.begin(call, own)

    def _vector(self, call: Invitation, clients: list[int], names: tuple[str, ...], grid: Any) -> Tensor:
        """The sum of this node's clients, (1, words); zeros without any."""
        if not clients:
            return torch.zeros(1, call.length, dtype=torch.int64)
        if type(grid) is not float or math.frexp(grid)[0] != 0.5 or grid < grid_of(self.summed.settings.clip):
            raise Refusal("the grid of the secure sum is malformed")
        logged = {client_id: self._logged[client_id] for client_id in clients}
        trained = self._work is not None and self._work.work == "train"
        sums = self.summed.sums(self._broadcast if trained else None, logged, grid)
        if absent := sorted(sums.names() - set(names)):
            raise Refusal(f"the secure sum leaves out the metric {absent[0][:100]}")
        if about(self._model, len(sums.origin), grid, names) != call.about:
            raise Refusal("the secure sum is about another model than this node's clients worked with")
        for client_id in clients if trained else ():
            sums.add(self._updates[client_id])
        return sums.words(names)
