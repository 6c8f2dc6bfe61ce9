"""What a hostile server draws: greetings, requests, models and ends of runs, well formed or not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lit_fed import __version__
from lit_fed.engine.method.kinds import ONLY
from lit_fed.federation.messages.wire import PROTOCOL, Message
from tests.federation.adversary.support import World

RUNS = ("0" * 16, "1" * 16, "2" * 16)
ROUNDS = 12
"""Of a run on the nodes."""
QUESTIONS = ("clients", "global", "personal")
KINDS = ("train", "ask", "secure", "statistics", "keep", "greetings")
Tensors = Mapping[str, Tensor]


class Server:
    """A server of a world, which draws its messages.

    Args:
        world: The nodes.
        drawn: Its generator.
    """

    def __init__(self, world: World, drawn: random.Random) -> None:
        self.world, self.drawn, self.model, self.hot = world, drawn, dict(world.model), world.hot
        self.models = [self.model, self.nudged(self.model), self.nudged(self.model)]
        self.versions: dict[Any, list[Any]] = {}
        """Of clients' states, as nodes have told them."""
        self.runs = [f"{drawn.getrandbits(64):016x}" for _ in range(2)]

    # ------------------------------------------------------------------ models

    def nudged(self, model: Tensors) -> dict[str, Tensor]:
        """A model that differs in one weight, often in one at which the neighbour alone looks."""
        name, place = (
            self.drawn.choice(self.hot)
            if self.hot and self.drawn.random() < 0.7
            else (name := self.drawn.choice(sorted(model)), self.drawn.randrange(model[name].numel()))
        )
        changed = model[name].clone()
        changed.view(-1)[place] += self.drawn.choice((1e-6, 0.1, 1.0, -3.0))
        return {**model, name: changed}

    def tensors(self) -> dict[str, Tensor]:
        """A model that the server has drawn before, or one that no honest server sends."""
        draw, model = self.drawn, self.drawn.choice(self.models)
        odd = draw.random()
        name = draw.choice(sorted(model))
        if odd < 0.7:
            return model
        if odd < 0.78:
            self.models.append(self.nudged(model))
            return self.models[-1]
        if odd < 0.88:
            scale = draw.choice((0.0, -1.0, 1e3, 1e17, 1e18))
            return {key: tensor * scale if tensor.is_floating_point() else tensor for key, tensor in model.items()}
        if odd < 0.94 and self.hot:  # huge where the neighbour looks
            name, place = draw.choice(self.hot)
            changed = model[name].clone()
            changed.view(-1)[place] = draw.choice((1e18, -1e18, 1e12, float("nan")))
            return {**model, name: changed}
        if odd < 0.96:
            return {key: tensor for key, tensor in model.items() if key != name}
        if odd < 0.98:
            return {**model, name: torch.zeros(draw.randrange(4), 2)}
        return {**model, "more": torch.zeros(2)}

    def others(self, client: Any) -> list[Any]:
        """Versions that are none of a client's."""
        return [
            [0, 1],
            [-1, 0],
            "x",
            *(one for other, found in self.versions.items() if other != client for one in found),
        ]

    # ------------------------------------------------------------------ messages

    def mostly(self, good: Sequence[Any], *odd: Any) -> Any:
        """Draw what an honest server may send, and now and then what it may not."""
        return self.drawn.choice(good if self.drawn.random() < 0.95 else odd)

    def work(self, word: str, place: int, client: int | None = None, **fixed: Any) -> Message:
        """Ask for a client's work, and note the version of its state that comes back."""
        draw = self.drawn
        own = self.world.clients[place]
        client = self.mostly(own, 99, -1) if client is None else client
        fields: dict[str, Any] = {
            "client": client,
            "round": self.mostly([0, 1, draw.randrange(ROUNDS)], ROUNDS, -1, 2**40),
            "run": self.mostly(self.runs, "../x", 7),
            "boot": self.mostly([self.world.boots[place]], "0" * 16),
            "version": self.mostly([None, *self.versions.get(client, [])], *self.others(client)),
            "drop": self.mostly([[], [], [0], [0, 1, 2]], [-1], "x"),
            "together": self.mostly([[client], sorted(own)], [client, 99], []),
            "frozen": {},
        }
        if word == "ask":
            fields |= {"protocol": draw.choice(QUESTIONS), "subset": self.mostly(["test", "test", "val"], "train")}
        fields |= fixed
        payload = fields.pop("payload", None) or self.tensors()
        said = self.world.send(place, Message(cast("Any", word), fields, {"payload": payload}))
        if type(version := said.fields.get("version")) is list and version not in self.versions.get(client, []):
            self.versions.setdefault(client, []).append(version)
        return said

    def greet(self, place: int) -> Message:
        """Greet a node, or ask for the states that it holds."""
        draw = self.drawn
        if draw.random() < 0.4:
            return self.world.send(place, Message("held", {"run": self.mostly(self.runs, "", None, "f" * 16)}))
        settings = dict(self.world.settings)
        odd = draw.choice(sorted(settings))
        if draw.random() < 0.5:
            settings[odd] = draw.choice(['"other"', "0", ""])
        if draw.random() < 0.2:
            del settings[odd]
        fields = {"protocol": self.mostly([PROTOCOL], 1), "version": __version__, "settings": settings, "config": ""}
        return self.world.send(place, Message("hello", fields))

    def keep(self, place: int) -> Message:
        """Send the end of a run."""
        draw = self.drawn
        clients = [*self.world.clients[place]] + ([99] if draw.random() < 0.1 else [])
        fields = {
            "run": self.mostly(self.runs, "x"), "round": self.mostly(range(ROUNDS), ROUNDS, -1),
            "versions": {str(one): self.mostly([None, *self.versions.get(one, [])], "x", [0, 1]) for one in clients},
            "frozen": {},
        }  # fmt: skip
        return self.world.send(place, Message("keep", fields, {f"payload/{ONLY}": self.tensors()}))

    def inquire(self, place: int) -> Message:
        """Ask for statistics."""
        draw, columns = self.drawn, self.mostly([5], 1, 2)
        low = draw.choice([-1.0, 0.0, float("nan"), float("inf")])
        fields = {
            "client": draw.choice([*self.world.clients[place], -1, -1]), "boot": self.world.boots[place],
            "bins": self.mostly([1, 4, 4], 0, 10**6), "least": self.mostly([1, 5], 0, -1),
        }  # fmt: skip
        ranges = torch.tensor([[low, draw.choice([1.0, 1e5])]] * columns, dtype=torch.float64)
        return self.world.send(place, Message("statistics", fields, {"ranges": {"ranges": ranges}}))

    def out_of_turn(self, place: int) -> None:
        """Bytes that are no message, or a message of the protocol of secure sums out of turn."""
        draw = self.drawn
        if draw.random() < 0.3:
            self.world.send_bytes(place, draw.randbytes(draw.randrange(64)))
            return
        stage = draw.choice(["offer", "keys", "shares", "vectors", "consents", "total", "none", None])
        fields = {
            "work": draw.choice(["train", "ask", "/"]), "run": draw.choice(self.runs), "protocol": "",
            "subset": "", "round": draw.choice([0, 1, "0"]), "clients": draw.choice([[], [0], [0, 0], "x", [99]]),
        }  # fmt: skip
        more = {"call": {}, "names": [], "grid": 1.0, "deviation": 0, "nodes": {}}
        step = {"message": draw.choice([{}, {"keys": []}, {"names": []}, {"signatures": {}}])}
        fields = {"offer": fields, "keys": fields | more}.get(stage, step)
        self.world.send(place, Message("secure", fields | {"stage": stage}))

    def anything(self, kind: str) -> None:
        """Send a message, of a kind more often than not."""
        draw, place = self.drawn, self.drawn.randrange(len(self.world.handles))
        kind = kind if draw.random() < 0.6 else draw.choice(KINDS)
        if kind in ("train", "ask"):
            self.work(kind, place)
        elif kind == "secure":
            self.out_of_turn(place)
        elif kind == "statistics":
            self.inquire(place)
        elif kind == "keep":
            self.keep(place)
        else:
            self.greet(place)
