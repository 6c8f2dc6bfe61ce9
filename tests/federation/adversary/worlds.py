"""The worlds: data with a neighbour and without, and honest nodes that hold them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lit_fed.data import Arrays
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.node.node import Node
from lit_fed.federation.statistics.noise import Noise
from lit_fed.federation.statistics.over_nodes import StatisticsNode
from lit_fed.methods import Scaffold
from lit_fed.participation import FullParticipation
from lit_fed.privacy import ClientLevel, SampleLevel, SecureSum
from lit_fed.protocols import ClientTest, GlobalTest
from lit_fed.tasks import Classifier
from lit_fed.tensors import hash_of
from tests.federation.adversary.server import ROUNDS, Server
from tests.federation.adversary.sums import THRESHOLD
from tests.federation.adversary.support import Make, World, signers
from tests.federation.support import Parts
from tests.privacy.support import uniform
from tests.support import LeastSquares, Points, trainer

SAMPLES, INPUTS, CLIP = 10, 5, 0.5
HUGE = 1e4
"""An input of the neighbour's, with which large models overflow."""


class Samples(Points):
    """Two clients of ten samples and three classes; the first sample alone has a last input, and may be another.

    Args:
        neighbour: Take the other sample.
    """

    num_classes = 3
    input_shape = (INPUTS,)

    def __init__(self, neighbour: bool) -> None:
        super().__init__(2)
        self.neighbour = neighbour
        self.batch_size = 5

    def load_arrays(self) -> Arrays:
        drawn = np.random.default_rng(0)
        x = drawn.standard_normal((2 * SAMPLES, INPUTS)).astype(np.float32)
        y = drawn.integers(3, size=2 * SAMPLES)
        x[:, -1] = 0
        if self.neighbour:
            x[0], y[0] = [0.3, -2.0, 0.1, 1.0, HUGE], (y[0] + 1) % 3
        clients = np.repeat([0, 1], SAMPLES)
        return Arrays(x, y, x[-4:], y[-4:], clients, clients[-4:], "samples")


def network() -> Classifier:
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(INPUTS, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)]
    return Classifier(torch.nn.Sequential(*layers), num_classes=3)


def scaffold() -> Scaffold:
    """A method whose clients keep a state."""
    return Scaffold(weighting="uniform")


class Fragile(LeastSquares):
    """A module that raises an error of its own where a model is large and looks at an input."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if (loss := super().training_step(batch, batch_idx)) > 1e30:
            raise ValueError("the loss is too large")
        return loss


def quiet(line: str) -> None:
    """Print nothing."""


def samples(
    module: Callable[[], Any] = network, algorithm: Callable[[], Any] = uniform, noise: float = 1.0, **kwargs: Any
) -> Make:
    """One node whose samples `SampleLevel` protects."""

    def make(folder: Path, neighbour: bool, stack: ExitStack) -> World:
        privacy = SampleLevel(CLIP, noise, delta=0.01, key_file=str(folder / "key"))
        settings: dict[str, Any] = {
            "privacy": privacy, "participation": FullParticipation(), "protocols": [GlobalTest()],
            "on_client_failure": "skip", "max_rounds": ROUNDS, **kwargs,
        }  # fmt: skip
        parts = Parts(trainer(folder, **settings), module(), Samples(neighbour), algorithm())
        worlds = list[World]()
        if algorithm is uniform:  # without a state, in which a client's noisy steps go on
            stack.enter_context(steps_seen(worlds))
        node = Node(*parts, clients=[0, 1], folder=folder / "states", say=quiet)
        stack.enter_context(node.at_work())

        def protected(answer: Message, group: str, name: str) -> bool:
            return answer.word == "answer" and group == "payload"

        model = sent_by(node)
        hot = [(name, at) for name, tensor in model.items() if tensor.shape[1:] == (INPUTS,) for at in (4, 9, 14)]
        world = World([node.handle], [node.boot], [node.clients], protected, model, node.settings, hot)
        worlds.append(world)
        return world

    return make


@contextmanager
def steps_seen(worlds: Sequence[World]) -> Iterator[None]:
    """Note the sums of clipped gradients before noise, from which nobody may see the neighbour where it is not drawn.

    From the first step of a client's round in which the neighbour is drawn, sums differ: then their number is noted,
    and the first of them is kept.
    """
    drawn: dict[int, bool] = {}  # by number of the batch in a client's round; batches are drawn ahead of steps
    loader, noise_of = SampleLevel.loader, SampleLevel._noise_of

    def loaded(self: Any, *args: Any) -> Any:
        made = loader(self, *args)
        draw = made._draw

        def seen() -> Any:
            mask = draw()
            drawn[self._drawn] = bool(mask[0]) and args[1].id == 0
            return mask

        made._draw = seen
        return made

    def noised(self: Any, client: Any, total: Tensor) -> Any:
        step = self._stepped + 1
        for world in worlds:
            if any(drawn[before] for before in range(1, step)):
                world.note("step", client.id, step)
            elif drawn[step]:
                world.note("step", client.id, step, "drawn")
                world.sums.append(total.clone())
            else:
                world.note("step", client.id, step, hash_of(total))
        return noise_of(self, client, total)

    with patch.object(SampleLevel, "loader", loaded), patch.object(SampleLevel, "_noise_of", noised):
        yield


def sent_by(node: Node) -> dict[str, Tensor]:
    """The tensors of an honest server's first broadcast."""
    federation = node.federation
    payload = federation.algorithm.broadcast(federation.server, 0, federation.kinds[0], "train")
    return {name: tensor.clone() for name, tensor in payload.items()}


class Clients(Points):
    """Five clients of two samples each.

    Args:
        exchanged: Exchange the data of clients 0 and 1.
        other: Take other data for client 0; None for data of it without a second input.
    """

    def __init__(self, exchanged: bool = False, other: bool | None = False) -> None:
        super().__init__(5, sizes=(2, 2))
        self.exchanged, self.other = exchanged, other

    def load_arrays(self) -> Arrays:
        drawn = np.random.default_rng(0)
        x = drawn.standard_normal((10, 2)).astype(np.float32)
        y = drawn.integers(1, 5, size=10)
        if self.exchanged:
            x[:4], y[:4] = x[[2, 3, 0, 1]], y[[2, 3, 0, 1]]
        if self.other is not False:
            x[:2], y[:2] = [[3.0, HUGE if self.other else 0.0], [-1.0, 2.0 if self.other else 0.0]], [0, 4]
        clients = np.repeat(range(5), 2)
        return Arrays(x, y, x, y, clients, clients, "clients")


HOMES = [[0], [1], [2, 3], [4]]


def sums(noisy: bool, algorithm: Callable[[], Any] = scaffold, **kwargs: Any) -> Make:
    """Four nodes with five clients in secure sums, to which nodes add noise or not.

    Neighbours are other data of client 0 where there is noise, and else an exchange of clients 0 and 1, under which the
    sum over all is the same.
    """

    def make(folder: Path, neighbour: bool, stack: ExitStack) -> World:
        nodes = list[Node]()
        for place, (clients, signer) in enumerate(zip(HOMES, signers(len(HOMES)), strict=True)):
            at = folder / str(place)
            at.mkdir(parents=True)
            protocols = [GlobalTest()] if noisy else [ClientTest()]
            settings: dict[str, Any] = {
                "participation": FullParticipation(), "on_client_failure": "skip", "max_rounds": ROUNDS,
                "protocols": protocols, "secure_sum": SecureSum(THRESHOLD, 0.5), **kwargs,
            }  # fmt: skip
            if noisy:
                settings["privacy"] = ClientLevel(0.5, 2.0, delta=0.01, honest_nodes=3, key_file=str(at / "key"))
            data = Clients(other=neighbour or None) if noisy else Clients(exchanged=neighbour)
            parts = Parts(trainer(at, **settings), Fragile() if noisy else LeastSquares(), data, algorithm())
            node = Node(*parts, clients=clients, folder=at / "states", say=quiet, signer=signer, histogram=False)
            nodes.append(node)
            stack.enter_context(node.at_work())

        def protected(answer: Message, group: str, name: str) -> bool:
            return group == "secure"

        noise = nodes[0].federation.wrappers.stack[0] if noisy else None
        handles, boots = [node.handle for node in nodes], [node.boot for node in nodes]
        hot = [(name, 1) for name in sent_by(nodes[0])]
        return World(handles, boots, HOMES, protected, sent_by(nodes[0]), nodes[0].settings, hot, noise)

    return make


_NOISED = ("classes", "count", "missing", "cells", "total", "squares", "samples")


def statistics(folder: Path, neighbour: bool, stack: ExitStack) -> World:
    """A node for noisy statistics alone."""
    data = Samples(neighbour)
    node = StatisticsNode(data, [0, 1], "data: {class_path: x}", 1, Noise(1.0, 0.01), together=True, say=quiet)

    def protected(answer: Message, group: str, name: str) -> bool:
        return name in _NOISED

    return World([node.handle], [node.boot], [node.clients], protected, {"w": torch.zeros(1)}, node.settings, [])


def hostile(kind: str, length: int = 8) -> Callable[[World, random.Random], None]:
    """A sequence of messages to the nodes of `samples`."""

    def sequence(world: World, drawn: random.Random) -> None:
        server = Server(world, drawn)
        for _ in range(length):
            server.anything(kind)

    return sequence
