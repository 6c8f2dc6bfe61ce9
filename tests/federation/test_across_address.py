"""What a method addresses to single clients, over nodes: each client's message holds its own, and no other's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed.algorithm import Update
from lit_fed.codecs import CastCodec
from lit_fed.engine.storage.store import read_table
from lit_fed.errors import ClientFailure
from lit_fed.federation.messages.wire import decode
from lit_fed.federation.node.home import Home
from lit_fed.protocols import ClientTest
from tests.federation.support import Parts, assert_same_states, deploy, simulate
from tests.support import Neighbours, Points, Wanderer, assert_same, rows, saved_weights, trainer

HOMES = [[0, 1, 2], [3, 4], [5]]


class Guests(Neighbours):
    """Clients are tested with the model of their neighbour."""

    def start(self, client: Any) -> dict[str, Tensor]:
        if client.stage == "train":
            return super().start(client)
        return {name.removeprefix("next."): tensor for name, tensor in client.addressed.items()}

    def finish(self, client: Any) -> Update:
        """The tensors of the names that it was addressed."""
        return Update(client.model.tensors([name.removeprefix("next.") for name in client.addressed]))


def make(folder: Path, **kwargs: Any) -> Parts:
    torch.manual_seed(0)
    made = trainer(folder, protocols=[ClientTest()], downlink_codec=CastCodec("float16"), max_rounds=3, **kwargs)
    return Parts(made, Wanderer(), Points(6, sizes=(2, 3)), Guests())


def test_over_nodes_is_in_one_process_and_no_message_holds_anothers(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str, dict[str, Tensor]]] = []

    def overheard(handle: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def listening(blob: bytes) -> bytes:
            message = decode(blob)
            if message.word in ("train", "ask"):
                fields = message.fields
                seen.append((fields["client"], fields["round"], message.word, dict(message.tensors["addressed"])))
            return handle(blob)

        return listening

    one = simulate(make, tmp_path / "one")
    other = deploy(
        make, tmp_path / "other", HOMES,
        handlers=lambda nodes: {place + 1: overheard(node.handle) for place, node in enumerate(nodes)},
    )  # fmt: skip
    assert_same(saved_weights(one.log_dir), saved_weights(other.log_dir))
    checkpoint = torch.load(one.log_dir / "checkpoints" / "last.ckpt", weights_only=True)
    assert_same_states(other, tmp_path / "other", read_table(checkpoint["clients"]))
    last = one.run.federation.server["last"]
    for name, stack in last.items():
        assert torch.equal(stack, other.run.federation.server["last"][name]), name
    tables = [rows(made.log_dir / "clients.csv") for made in (one, other)]
    bytes_down, tested = (
        [[row for row in table if row[key] == value] for table in tables]
        for key, value in (("metric", "downlink_bytes"), ("stage", "test"))
    )
    assert bytes_down[0] == bytes_down[1]
    assert tested[0] == tested[1]
    # Three rounds, each with a training and a test of six clients; the last test got the neighbours' last models.
    assert Counter(seen_one[:3] for seen_one in seen) == Counter(
        (client_id, round_idx, word) for client_id in range(6) for round_idx in range(3) for word in ("train", "ask")
    )
    for client_id, round_idx, word, tensors in seen:
        assert tensors.keys() == {f"next.{name}|{str(last[name].dtype)[6:]}" for name in last}
        if (round_idx, word) == (2, "ask"):
            for name, stack in last.items():
                neighbours = stack[(client_id + 1) % 6]
                sent = neighbours.half() if neighbours.is_floating_point() else neighbours
                assert torch.equal(tensors[f"next.{name}|{str(stack.dtype)[6:]}"], sent)


def test_a_node_keeps_what_was_addressed_to_its_clients_at_the_end(tmp_path: Path) -> None:
    made = deploy(make, tmp_path, HOMES)
    home = Home(*make(tmp_path / "home"), None, tmp_path / "node_1" / "states", "test")
    assert sorted(home.end.addressed) == [3, 4]
    at_home = {(one, name): value for one, row in home.evaluate("test").items() for name, value in row.items()}
    told = {
        (int(row["client_id"]), f"clients/{row['metric']}"): float(row["value"])
        for row in rows(made.log_dir / "clients.csv")
        if row["stage"] == "test" and row["round"] == "2" and row["client_id"] in "34"
    }
    assert at_home == told


def test_a_node_refuses_tensors_of_another_shape(tmp_path: Path) -> None:
    class Odd(Guests):
        """Its server addresses other shapes than the nodes know."""

        def address(self, server: Any, client_id: int, round_idx: int, kind: str, stage: Any = "train") -> Any:
            sent = super().address(server, client_id, round_idx, kind, stage)
            return sent if self.at_home else {name: torch.zeros(7) for name in sent}

        at_home = True

    def odd(folder: Path) -> Parts:
        parts = make(folder)._replace(algorithm=Odd())
        parts.algorithm.at_home = "node" in folder.name
        return parts

    with pytest.raises(
        ClientFailure, match=r"'next\.network\.0\.weight' in the payload of the server is float32 of shape"
    ):
        deploy(odd, tmp_path / "run", HOMES)
