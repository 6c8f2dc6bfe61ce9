"""A node's part in secure sums: it keeps what its clients answer, and gives their sum under masks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.request import Request
from lit_fed.errors import LitFedError
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.secure.messages import AllKeys, Consents, Invitation, Refusal, Relayed, Survivors, ToServer
from lit_fed.federation.secure.packed import SumCall, about, pack, unpack
from lit_fed.federation.secure.party import Party
from lit_fed.federation.secure.signer import Signer
from lit_fed.federation.secure.sum_log import SumLog
from lit_fed.federation.secure.summed import Logged, SummedSecurely
from lit_fed.privacy.bounded_sum import grid_of

_STAGES = {"shares": AllKeys, "vectors": Relayed, "consents": Survivors, "total": Consents}
_TOLD = "lr"  # a setting among a client's metrics


class OwnWork:
    """Keeps the updates and metrics of this node's clients until another work is asked for.

    Args:
        summed: The setting; set up with the node's run.
        signer: The node's key.
        limit: Maximum size of a message, bytes.
        smallest: Least number of nodes with clients in a sum without noise; None for the threshold.
        folder: Keeps what the node gave to sums, beside its states.
    """

    def __init__(
        self, summed: SummedSecurely, signer: Signer, limit: int, smallest: int | None, folder: Path | None
    ) -> None:
        self.summed, self.signer, self.limit = summed, signer, limit
        self.smallest = smallest or summed.settings.threshold
        self.given = SumLog(folder)
        self.party = Party(signer.name, signer.key, {}, given=self.given)
        self.summing: Request | None = None
        """The work of which the sum under way is."""
        self._asked: Request | None = None
        self._broadcast: Broadcast | None = None
        self._updates: dict[int, ClientUpdate] = {}
        self._logged: Logged = {}
        self._named: dict[int, frozenset[str]] = {}  # metrics, those without a value too

    def keep(self, request: Request, broadcast: Broadcast, update: ClientUpdate) -> ClientUpdate:
        """Keep a client's answer, and return what leaves the node: that there is one.

        Args:
            request: What the server asks of the client.
            broadcast: What the client worked with.
            update: The answer.
        """
        asked, client_id, trained = replace(request, clients=()), update.client_id, request.work == "train"
        if asked != self._asked:
            self._asked, self._broadcast = asked, broadcast
            self._updates, self._logged, self._named = {}, {}, {}
        if (packed := update.arrival) is not None:
            update = update.with_payload(packed.payload)
        self._updates[client_id] = update.detached()
        if trained:
            self._logged[client_id] = self.summed.logged.pop(client_id)
        else:
            known = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
            self._logged[client_id] = (known, 1)
        self._named[client_id] = frozenset(self._logged[client_id][0] if trained else update.metrics)
        told = {name: value for name, value in update.metrics.items() if name == _TOLD and trained}
        return replace(update, payload={}, weight=0, metrics=told, flat=None, arrival=None)

    def unmoved(self, client_id: int, broadcast: Broadcast) -> ClientUpdate:
        """An update by zeros in the place of a client's failure, which would tell of its data; only beside noise."""
        sums = self.summed.sums(broadcast, {})
        update = ClientUpdate(client_id, sums.frame.payload(sums.origin)[0], kind=next(iter(broadcast.payloads)))
        self.summed.logged[client_id] = ({}, self.summed.samples(client_id))
        return update

    def answer(self, message: Message) -> Message:
        """Answer an untrusted message of the protocol.

        Raises:
            Refusal: If the server broke the protocol; the attempt ends.
            BudgetSpent: If the node's noise is spent; the attempt ends.
        """
        stage = message.fields.get("stage")
        try:
            if stage == "offer":
                clients = self._known(message.read(schema.SumOffer)).clients
                names = {name for client_id in clients for name in self._named[client_id]}
                fields, tensors = pack(schema.Offered(sorted(names), self.signer.public.hex()))
            elif stage == "keys":
                fields, tensors = pack(self._begin(message.read(SumCall)))
            else:
                step = message.read(schema.SumStep)
                fields, tensors = pack(self.party.answer(unpack(_STAGES[step.stage], step.message, {})))
        except LitFedError:
            self.party.forget()
            raise
        return Message.pack(schema.SumAnswer(fields), {"secure": tensors})

    def _known(self, offer: schema.SumOffer) -> Request:
        """A request for a sum, with the model that its clients worked with; refuse clients that did not answer it."""
        asked, own = offer.request(offer.clients), self._asked
        known = own is not None and replace(own, clients=asked.clients, model="") == asked
        if odd := sorted(set(asked.clients) - (self._updates.keys() if known else set())):
            raise Refusal(f"this node has no work of client {odd[0]} in round {asked.round_idx}, which is to be summed")
        return replace(asked, model=own.model) if own is not None and asked.clients else asked

    def _begin(self, message: SumCall) -> ToServer:
        asked, call, names = self._known(message), message.call, message.names
        self.summing = asked
        call.check()
        if (call.run, call.round_idx) != (asked.name, asked.round_idx):
            raise Refusal("the call of the secure sum is for another work")
        if call.threshold != (due := self.summed.settings.threshold):
            raise Refusal(f"the threshold is {call.threshold}, and trainer.secure_sum.threshold is {due} on this node")
        if call.dishonest != self.summed.settings.dishonest:
            raise Refusal("the call bears another number of nodes than trainer.secure_sum.dishonest on this node")
        if 8 * call.length > self.limit:
            raise Refusal(f"the call has vectors of {call.length} words, beyond --most_bytes of this node")
        self.party.identities = self.signer.peer_keys(message.nodes)
        noise = self.summed.noise if asked.work == "train" else None
        if noise is not None:
            if names:
                raise Refusal("metrics of training are not summed where trainer.privacy.honest_nodes is set")
            if (message.grid, message.deviation) != (noise.grid, noise.deviation):
                raise Refusal(
                    "the server accounts for other noise than this node adds; set trainer.max_rounds alike on both, or "
                    "noise_multiplier"
                )
        request = asked.digest(call.about, call.length)
        own = self.party.earlier_vector(call, request)
        if own is None:
            vector = self._vector(call, asked, tuple(names), message.grid)
            if noise is not None:
                vector = self.summed.noised(vector, call.round_idx, request)
            own = vector[0].cpu().numpy().view(np.uint64)
            if noise is not None:  # which must not be drawn again, before the node consents to a sum of it
                self.given.note(call.run, call.round_idx, request, b"", own)
        if noise is not None:  # after it is kept, so that a kill between costs nothing
            noise.charge(call.round_idx, request)
        self.party.smallest = self.smallest if noise is None else 0
        self.party.clients = sum(self._logged[client_id][1] > 0 for client_id in asked.clients)  # by samples
        return self.party.begin(call, own, request)

    def _vector(self, call: Invitation, asked: Request, names: tuple[str, ...], grid: float) -> Tensor:
        """The sum of this node's clients, (1, words); zeros without any."""
        if not asked.clients:
            return torch.zeros(1, call.length, dtype=torch.int64)
        if type(grid) is not float or math.frexp(grid)[0] != 0.5 or grid < grid_of(self.summed.settings.clip):
            raise Refusal("the grid of the secure sum is malformed")
        logged, trained = {client_id: self._logged[client_id] for client_id in asked.clients}, asked.work == "train"
        sums = self.summed.sums(self._broadcast if trained else None, logged, grid)
        if absent := sorted({name for client_id in logged for name in self._named[client_id]} - set(names)):
            raise Refusal(f"the secure sum leaves out the metric {absent[0][:100]}")
        if about(asked.model, len(sums.origin), grid, names) != call.about:
            raise Refusal("the secure sum is about another model than this node's clients worked with")
        for client_id in asked.clients if trained else ():
            sums.add(self._updates[client_id])
        return sums.words(names)
