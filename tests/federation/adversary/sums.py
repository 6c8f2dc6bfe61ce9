"""A hostile server of secure sums: it chooses whose answers are summed, loses nodes, and mixes up messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from lit_fed.errors import LitFedError
from lit_fed.federation.messages.schema import SumOffer
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.secure.coordinator import STAGES, Coordinator
from lit_fed.federation.secure.messages import Consent, Invitation, Masked, Sealed, SignedKeys, Survivors, Unmasking
from lit_fed.federation.secure.packed import about, pack, unpack
from lit_fed.federation.secure.signer import public_key
from lit_fed.federation.secure.summed import length_of
from lit_fed.privacy.bounded_sum import grid_of
from lit_fed.tensors import hash_of_groups
from tests.federation.adversary.server import ROUNDS, Server
from tests.federation.adversary.support import World

_KINDS = {"keys": SignedKeys, "shares": Sealed, "vectors": Masked, "consents": Consent, "total": Unmasking}
THRESHOLD = 3


class Asked(NamedTuple):
    """Work whose results are to be summed."""

    word: str
    run: str
    round_idx: int
    model: dict[str, torch.Tensor]

    @property
    def fields(self) -> dict[str, Any]:
        question = ("clients", "test") if self.word == "ask" else ("", "")
        return dict(zip(("work", "protocol", "subset"), (self.word, *question), strict=True))


class SumsServer(Server):
    """A server of nodes in secure sums."""

    attempts = 0

    @property
    def noise(self) -> Any:
        """The noise that nodes add to sums of updates; None without it."""
        return self.world.noise

    def work_of_all(self, asked: Asked, but: int | None = None) -> None:
        """Have all clients work, or all but one."""
        question = {"protocol": "clients", "subset": "test"} if asked.word == "ask" else {}
        for place, own in enumerate(self.world.clients):
            for client in own:
                if client != but:
                    fixed = {
                        "round": asked.round_idx,
                        "run": asked.run,
                        "boot": self.world.boots[place],
                        "drop": [],
                        "frozen": {},
                        "version": self.mostly([None], *self.versions.get(client, [None])),
                    }
                    self.work(asked.word, place, client, payload=asked.model, together=sorted(own), **fixed, **question)

    def sum(
        self, asked: Asked, clients: Mapping[int, list[int]], lose: Mapping[str, int], odd: Callable[..., Any]
    ) -> None:
        """Run an attempt, and note the sum, where nodes unmask it.

        Args:
            asked: The work.
            clients: Whose answers each node is to sum; a node that is left out is not called.
            lose: By stage, the node whose answer the server loses.
            odd: Changes messages: takes a stage, a node, its message and all nodes' messages.
        """
        fields = {**asked.fields, "run": asked.run, "round": asked.round_idx}
        trained = asked.word == "train"
        offers = {}
        for place, own in clients.items():
            said = self.world.send(place, Message("secure", {**fields, "stage": "offer", "clients": own}))
            if said.word == "answer":
                offers[place] = said.fields["message"]
        keys = {place: public_key(offer["key"]) for place, offer in offers.items()}
        at = {name: place for place, (name, _) in keys.items()}
        names = tuple(sorted({name for offer in offers.values() for name in offer["names"]}))
        grid = self.noise.grid if self.noise is not None and trained else grid_of(0.5)
        size = sum(tensor.numel() for tensor in asked.model.values()) if trained else 0
        model = hash_of_groups({"payload": asked.model, "frozen": {}})
        self.attempts += 1
        offer = msgspec.convert({**fields, "stage": "offer", "clients": []}, SumOffer).request(())
        call = Invitation(
            offer.name, asked.round_idx, self.attempts, tuple(sorted(at)), THRESHOLD,
            length_of(size, names), about(model, size, grid, names), None,
        )  # fmt: skip
        public = {name: offers[place]["key"] for name, place in at.items()}
        common = {
            **fields, "names": list(names), "grid": grid, "nodes": public,
            "deviation": 0 if self.noise is None else self.noise.deviation,
        }  # fmt: skip
        try:
            server = Coordinator(call, dict(keys.values()))
            messages: Mapping[str, Any] = dict.fromkeys(at, call)
            for stage, following in pairwise((*STAGES, "")):
                answers = {}
                for name, message in messages.items():
                    content, tensors = pack(odd(stage, name, message, messages))
                    more = {**common, "clients": clients[at[name]]} if stage == "keys" else {}
                    where = "call" if stage == "keys" else "message"
                    sent = Message("secure", {**more, "stage": stage, where: content}, {"secure": tensors})
                    said = self.world.send(at[name], sent)
                    if said.word == "answer" and lose.get(stage) != at[name]:
                        told = said.fields["message"], said.tensors.get("secure", {})
                        answers[name] = unpack(_KINDS[stage], *told)
                messages = getattr(server, stage)(answers) if following else {}
            total = server.total(answers)
        except LitFedError as error:
            self.world.note("no sum", type(error).__name__)
            return
        summed = sorted(one for name in server.survivors for one in clients[at[name]])
        giving = sum(bool(clients[at[name]]) for name in server.survivors)
        self._note(total, size, trained, summed, giving)

    def _note(self, total: np.ndarray[Any, Any], size: int, trained: bool, summed: list[int], giving: int) -> None:
        """Note a sum: values under noise by their pattern; a sum over fewer than t nodes as it is."""
        if self.noise is not None and trained:
            self.world.note("sum", tuple(summed), self.world.patterns.of("sum", total[:size]), total[size:].tolist())
        else:
            self.world.note("sum", tuple(summed), total.tolist() if giving < THRESHOLD else "over enough nodes")

    # ------------------------------------------------------------------ what it draws

    def hostile_sum(self) -> None:
        """Have clients work, and sum some of their answers, in one of many ways."""
        draw, every = self.drawn, self.world.clients
        asked = Asked(
            draw.choice(["train", "train", "ask"]),
            draw.choice(self.runs),
            draw.randrange(ROUNDS),
            draw.choice(self.models),
        )
        if draw.random() < 0.9:
            self.work_of_all(asked, but=draw.choice([None, None, None, 0, 1]))
        for _ in range(draw.choice([1, 2, 2])):
            whole = {place: list(own) for place, own in enumerate(every)}
            style = draw.random()
            if style < 0.35:  # a single client
                alone = draw.choice([0, 0, 1, 2])
                clients = {place: [one for one in own if one == alone] for place, own in whole.items()}
            elif style < 0.5:
                clients = {place: own if draw.random() < 0.5 else [] for place, own in whole.items()}
            elif style < 0.6:
                clients = {place: own for place, own in whole.items() if place != draw.randrange(len(every))}
            else:
                clients = whole
            lose = {draw.choice(STAGES): draw.randrange(len(every))} if draw.random() < 0.3 else {}
            self.sum(asked, clients, lose, self.mixed_up if draw.random() < 0.2 else as_it_is)
            if draw.random() < 0.5:  # another model in the same round
                asked = asked._replace(model=draw.choice(self.models))
                self.work_of_all(asked)

    def mixed_up(self, stage: str, name: str, message: Any, messages: Mapping[str, Any]) -> Any:
        """Another node's message, another list of survivors, or a lowered threshold."""
        if self.drawn.random() < 0.6:
            return message
        if isinstance(message, Survivors):
            return Survivors(
                tuple(one for one in message.names if one != name or self.drawn.random() < 0.5)[:THRESHOLD]
            )
        if isinstance(message, Invitation):
            return replace(
                message, threshold=self.drawn.choice([1, 2, 4]), attempt=self.drawn.choice([0, message.attempt])
            )
        return self.drawn.choice(list(messages.values()))

    def anything(self, kind: str) -> None:
        """Send a message, or run a sum."""
        if self.drawn.random() < (0.5 if kind == "secure" else 0.15):
            self.hostile_sum()
        else:
            super().anything(kind)


def as_it_is(stage: str, name: str, message: Any, messages: Mapping[str, Any]) -> Any:
    return message


def hostile(kind: str, length: int = 6) -> Callable[[World, random.Random], None]:
    """A sequence of messages and sums."""

    def sequence(world: World, drawn: random.Random) -> None:
        server = SumsServer(world, drawn)
        server.attempts = len(world.records)  # later than those of sequences before
        for _ in range(length):
            server.anything(kind)

    return sequence
