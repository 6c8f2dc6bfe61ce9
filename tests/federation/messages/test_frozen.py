"""Frozen tensors travel once to each node, or never: both ends know them by their hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lit_fed.errors import CheckpointError
from lit_fed.federation.messages.frozen import NAME, FrozenTensors, KnownHashes, UnknownTensor
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.home import Home
from lit_fed.federation.node.kept import NAME as NAME_OF_THE_END
from lit_fed.federation.node.node import Node
from lit_fed.methods import FedAvg, FedExLoRA, FLoRA
from lit_fed.networks import LoRALinear
from lit_fed.tensors import hash_of
from tests.engine.loop.test_across_base import BASE, TRAINED, Pretrained, layers
from tests.federation.support import Make, deploy, simulate, small
from tests.federation.test_across_faults import Killed
from tests.support import LeastSquares, assert_same, saved_weights, weights

WIDE = 200


class Wide(LeastSquares):
    """Three layers 2 → 200 → 200 → 1, of which the middle one, 160 kB, stays beside an adapter of rank 1.

    Args:
        seed: Of the weights; None draws others for every instance.
    """

    made = 0

    def __init__(self, seed: int | None = 0) -> None:
        super().__init__(lr=0.01)
        Wide.made += 1
        torch.manual_seed(Wide.made if seed is None else seed)
        middle = LoRALinear(nn.Linear(WIDE, WIDE), 1, 1.0)
        middle.weight.requires_grad_(False)
        self.network = nn.Sequential(nn.Linear(2, WIDE), nn.Tanh(), middle, nn.Tanh(), nn.Linear(WIDE, 1))


def deployed(
    make: Make, folder: Path, ckpt_path: str | None = None, lost: Callable[[Node], None] | None = None
) -> tuple[Any, list[Message]]:
    """A federation over two nodes, and the messages to them."""
    heard: list[Message] = []

    def handlers(nodes: list[Node]) -> Mapping[int, Callable[[bytes], bytes]]:
        def of(node: Node) -> Callable[[bytes], bytes]:
            def handle(blob: bytes) -> bytes:
                message = decode(blob)
                if lost is not None and message.word == "train":
                    lost(node)
                if message.word in ("train", "ask", "keep"):
                    heard.append(message)
                    payload = sum(
                        t.nbytes for group, part in message.tensors.items() if "payload" in group for t in part.values()
                    )
                    count = sum(len(part) for part in message.tensors.values()) + len(message.fields["frozen"])
                    if not any(part for group, part in message.tensors.items() if "frozen" in group):
                        assert len(blob) <= payload + 4096 + 200 * count
                return node.handle(blob)

            return handle

        return {place + 1: of(node) for place, node in enumerate(nodes)}

    return deploy(make, folder, [[0], [1]], ckpt_path, handlers), heard


def frozen_in(messages: list[Message]) -> list[int]:
    """Bytes of frozen tensors in each message."""
    return [
        sum(t.nbytes for group, part in one.tensors.items() if "frozen" in group for t in part.values())
        for one in messages
    ]


@pytest.mark.parametrize("method", [FedAvg, FedExLoRA, FLoRA])
def test_a_base_that_both_ends_draw_by_the_seed_never_travels(method: Any, tmp_path: Path) -> None:
    make = small(Wide, algorithm=method, max_rounds=3)
    made, messages = deployed(make, tmp_path / "nodes")
    assert [one.word for one in messages].count("train") == 6
    assert sum(frozen_in(messages)) == 0
    assert_same(weights(made), weights(simulate(make, tmp_path / "here")))


def test_another_base_travels_once_to_each_node_and_not_after_a_restart(tmp_path: Path) -> None:
    def make(rounds: int) -> Make:
        def parts(folder: Path) -> Any:  # the server's model is made last, and has the seed 0
            at_server = not folder.name.startswith("node_")
            return small(lambda: Wide(0 if at_server else None), max_rounds=rounds)(folder)

        return parts

    made, messages = deployed(make(2), tmp_path / "nodes")
    sent = frozen_in(messages)
    assert sorted(size for size in sent if size) == [4 * WIDE * WIDE] * 2
    assert [one.word for one, size in zip(messages, sent, strict=True) if size] == ["train", "train"]
    whole = simulate(small(Wide, max_rounds=4), tmp_path / "here")
    resumed, messages = deployed(make(4), tmp_path / "nodes", "last")  # other processes, which read frozen.pt
    assert sum(frozen_in(messages)) == 0
    assert_same(saved_weights(resumed.log_dir), saved_weights(whole.log_dir))
    assert made.run.next_round == 2


def test_a_node_that_has_lost_a_tensor_is_greeted_again(tmp_path: Path) -> None:
    lost: set[int] = set()

    def lose(node: Node) -> None:
        if id(node) not in lost:
            lost.add(id(node))
            node.frozen.hashes["model"].clear()

    made, messages = deployed(small(Wide, max_rounds=2), tmp_path / "nodes", lost=lose)
    assert sum(frozen_in(messages)) == 2 * 4 * WIDE * WIDE
    assert_same(weights(made), weights(simulate(small(Wide, max_rounds=2), tmp_path / "here")))


def test_a_hash_is_of_dtype_shape_and_bytes() -> None:
    zeros = torch.zeros(4)
    others = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([0.0, 0, 0, 1]), torch.zeros(0)]
    assert len({hash_of(tensor) for tensor in [zeros, *others]}) == 5
    assert hash_of(torch.arange(6.0).view(2, 3).T) == hash_of(torch.arange(6.0).view(2, 3).T.contiguous())
    assert hash_of(torch.zeros(2, dtype=torch.bfloat16)) != hash_of(torch.zeros(2, dtype=torch.float16))


def test_a_tensor_that_changes_in_place_gets_another_hash() -> None:
    known, tensors, there = KnownHashes(), {"w": torch.zeros(3)}, dict[str, str]()
    assert known.divide("model", tensors, there) == (tensors, {})
    assert known.divide("model", tensors, there) == ({}, {"w": hash_of(torch.zeros(3))})
    tensors["w"].add_(1)
    assert known.divide("model", tensors, there) == (tensors, {})


def test_what_is_on_disk_counts_only_as_its_content(tmp_path: Path) -> None:
    own, said = {"model": {"w": torch.zeros(3)}}, list[str]()
    first = FrozenTensors(own, tmp_path, said.append)
    sent = {"w": torch.ones(3)}
    assert first.complete("model", sent, {}) == sent
    again = FrozenTensors(own, tmp_path, said.append)
    assert again.hashes == {"model": {"w": hash_of(torch.ones(3))}}
    assert torch.equal(again.complete("model", {}, again.hashes["model"])["w"], torch.ones(3))
    with pytest.raises(UnknownTensor, match="the frozen tensor 'w' that the server names is not on this node"):
        again.complete("model", {}, {"w": hash_of(torch.zeros(3))})
    (tmp_path / NAME).write_bytes(b"no file of torch")
    assert FrozenTensors(own, tmp_path, said.append).hashes == {"model": {"w": hash_of(torch.zeros(3))}}
    assert len(said) == 1
    assert "frozen.pt cannot be read" in said[0]


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    node = Node(*small(Wide)(tmp_path), clients=[0], folder=folder, say=lambda line: None)
    fields = {"client": 0, "round": 0, "run": "0" * 16, "boot": node.boot, "version": None, "drop": [], "together": [0]}
    payload = node.federation.broadcast(0).payloads["model"]
    with node.at_work():
        for name, tensor in (("network.2.weight", torch.zeros(2, 2)), ("network.9", torch.zeros(2))):
            message = Message("train", fields | {"frozen": {}}, {"payload": payload, "frozen": {name: tensor}})
            answer = decode(node.handle(encode(message)))
            assert answer.word == "failure"
            assert name in answer.fields["cause"]
    assert not (folder / NAME).exists()


def test_a_base_of_a_file_is_read_again_by_both_ends(tmp_path: Path) -> None:
    """It is in no message, no checkpoint and no node's file; a killed server goes on to the simulation's bits."""
    file = tmp_path / "weights.safetensors"
    save_file(layers(7).state_dict(), file)
    make = small(lambda: Pretrained(file), max_rounds=3)
    _, heard = deployed(make, tmp_path / "whole")
    assert not any(frozen_in(heard))
    simulated = simulate(make, tmp_path / "simulated")
    with pytest.raises(Killed):
        deployed(make, tmp_path / "parts", lost=kill_at(4))
    resumed, heard = deployed(make, tmp_path / "parts", ckpt_path="last")
    assert not any(frozen_in(heard))
    assert resumed.run.start_round == 1
    assert_same(weights(resumed), weights(simulated))
    kept = tmp_path / "parts" / "node_0" / "states" / NAME_OF_THE_END
    for path in (kept, resumed.log_dir / "checkpoints" / "last.ckpt"):
        assert path.stat().st_size <= TRAINED + 64_000 < BASE / 5
    home = Home(*make(tmp_path / "home"), None, kept.parent, "test")
    base = load_file(file)
    assert torch.equal(home.broadcast.frozen["model"]["network.2.weight"], base["2.weight"])
    assert home.evaluate("test").keys() == {0}
    base["2.weight"][0, 0] += 1
    save_file(base, file)
    with pytest.raises(CheckpointError, match=r"does not hold the pretrained weights of .*, and 'network\.2\.weight'"):
        Home(*make(tmp_path / "home"), None, kept.parent, "test")


def kill_at(message: int) -> Callable[[Node], None]:
    """Ends the server at a request to train."""
    heard: list[Node] = []

    def lost(node: Node) -> None:
        heard.append(node)
        if len(heard) == message:
            raise Killed

    return lost
