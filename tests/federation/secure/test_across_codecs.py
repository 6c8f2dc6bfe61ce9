"""A codec whose entries all clients of a round draw alike under `trainer.secure_sum`: nodes mask these alone."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_fed.codecs import QSGD, RandomK
from lit_fed.errors import ConfigError
from lit_fed.federation.messages.wire import Message
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import FullParticipation, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.protocols import GlobalTest
from tests.federation.secure.nodes import HOMES, Killed, Watched, run
from tests.federation.secure.test_across_noise import HOMES as HOMES_BY_REST
from tests.federation.secure.test_across_noise import seeded
from tests.federation.support import Make, deploy, nodes_of, simulate, small
from tests.privacy.support import uniform
from tests.support import LeastSquares, Points, assert_same, fit, kept, trainer, weights

W, ERROR = "network.weight", "codec/error/network.weight"


class Deep(LeastSquares):
    """Two layers of 32 and 16 weights, of which a quarter is 8 and 4."""

    def __init__(self) -> None:
        super().__init__(lr=0.125)
        self.network = nn.Sequential(nn.Linear(2, 16, bias=False), nn.Linear(16, 1, bias=False))
        for weight in self.parameters():
            weight.data = (torch.arange(weight.numel()).reshape(weight.shape) % 5 + 1) / 8


def begun() -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in Deep().parameters()])


def flat(made: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in weights(made).values()])


def common(**kwargs: Any) -> RandomK:
    return RandomK(**{"share": 0.25, "common_seed": True, **kwargs})


def make(algorithm: Any = FedAvg, nodes: int | None = None, codec: Any = common, **kwargs: Any) -> Make:
    settings = {"max_rounds": 3, "secure_sum": SecureSum(3, 0.5, nodes), "uplink_codec": codec and codec(), **kwargs}
    return small(Deep, lambda: Points(num_clients=5, sizes=(2, 3)), algorithm, **settings)


# ---------------------------------------------------------------------- the sum


@pytest.mark.parametrize("seed", range(4))
def test_a_round_by_hand(tmp_path: Path, seed: int) -> None:
    """Client 0 moves (1, 0) and client 1 (0, 2), weights 1 and 3; one place of two is sent, the same for both.

    Place 0: w = ((1 · 1 + 3 · 0) / 4, 0), and client 1 keeps (0, 2). Place 1: w = (0, 3 · 2 / 4), and client 0 keeps
    (1, 0). Without the secure sum the bits are the same: nothing is clipped, and all numbers are exact. Clipped to 1,
    client 1 moves by half of it.
    """
    given: dict[str, Any] = {"seed": seed, "max_rounds": 1, "uplink_codec": common(share=0.5)}
    plain = fit(tmp_path / "plain", **given)
    summed = fit(tmp_path / "summed", secure_sum=SecureSum(3, 4.0), **given)
    clipped = fit(tmp_path / "clipped", secure_sum=SecureSum(3, 1.0), **given)
    due: list[Any] = [
        ([[0.25, 0.0]], [[0.25, 0.0]], [[[0.0, 0.0]], [[0.0, 2.0]]]),
        ([[0.0, 1.5]], [[0.0, 0.75]], [[[1.0, 0.0]], [[0.0, 0.0]]]),
    ]
    whole, half, errors = due[int(weights(plain)[W][0, 1] != 0)]
    assert weights(plain)[W].tolist() == weights(summed)[W].tolist() == whole
    assert weights(clipped)[W].tolist() == half
    for made in (plain, summed, clipped):
        assert [kept(made, client_id)[ERROR].tolist() for client_id in (0, 1)] == errors
        assert made.metrics["comm/uplink_bytes"] == 2 * 4


def test_a_round_has_places_of_its_own(tmp_path: Path) -> None:
    """What a round leaves as it is, no client has moved, to the bit; each of seven rounds moves other weights."""
    states = [begun()] + [
        flat(simulate(make(max_rounds=rounds, secure_sum=None), tmp_path / str(rounds))) for rounds in range(1, 8)
    ]
    moved = [tuple((after != before).nonzero().flatten().tolist()) for before, after in itertools.pairwise(states)]
    for places in moved:
        assert 0 < sum(place < 32 for place in places) <= 8
        assert 0 < sum(place >= 32 for place in places) <= 4
    assert len(set(moved)) == 7


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (FedAvg, {}),
        (Scaffold, {}),
        (FedAvg, {"codec": lambda: common(feedback=False)}),
        (FedAvg, {"participation": UniformParticipation(count=3)}),
    ],
    ids=["fedavg", "scaffold", "scaled", "three clients a round"],
)
def test_plain_masked_and_over_nodes_the_bits_are_the_same(tmp_path: Path, method: Any, more: dict[str, Any]) -> None:
    """Scaffold's control variates have no reference in the broadcast, and are summed whole."""
    plain = simulate(make(method, **more), tmp_path / "plain")
    other = deploy(make(method, **more), tmp_path / "other", HOMES, own={"smallest_sum": 2})
    assert_same(weights(plain), weights(other))
    if "participation" not in more:  # of which a simulation skips rounds
        assert_same(weights(plain), weights(simulate(make(method, 4, **more), tmp_path / "masked")))


@pytest.mark.parametrize(("codec", "values"), [(None, 48), (common, 12)], ids=["none", "a quarter"])
def test_what_a_node_masks(tmp_path: Path, codec: Any, values: int) -> None:
    """32 + 16 values, or 8 + 4 of them, with three counts and the digits of the task's metrics: 8 bytes each."""
    grids = list[Watched]()
    run(make(codec=codec), tmp_path, nodes=nodes_of(make(codec=codec), tmp_path, HOMES), grids=grids)
    names: dict[int, list[str] | None] = {}
    seen = 0
    for node, message, answer in grids[0].crossed:
        if message.fields.get("stage") == "keys":
            names[node] = message.fields["names"] if message.fields["work"] == "train" else None
        of_training = names.get(node) if message.fields.get("stage") == "vectors" else None
        if of_training is not None:
            seen += 1
            assert answer.tensors["secure"]["words"].nbytes == 8 * (values + 3 + (66 + 2) * len(of_training))
        if message.word == "train":
            assert answer.tensors["payload"] == {}
    assert seen == 3 * 4


def test_killed_and_resumed_errors_are_as_if_nothing_had_been(tmp_path: Path) -> None:
    def kill(node: int, message: Message) -> Message:
        now[0] = message.fields["round"] if message.word == "train" else now[0]
        if now[0] == 1 and node == 3 and message.fields.get("stage") == "total":
            raise Killed
        return message

    now = [0]
    whole = run(make(), tmp_path / "whole", nodes=nodes_of(make(), tmp_path / "whole", HOMES))
    with pytest.raises(Killed):
        run(make(), tmp_path, kill, nodes_of(make(), tmp_path, HOMES))
    on = run(make(), tmp_path, nodes=nodes_of(make(), tmp_path, HOMES), ckpt_path="last")
    assert_same(weights(whole), weights(on))


# ---------------------------------------------------------------------- with privacy


def private(privacy: ClientLevel, secure_sum: SecureSum | None, **kwargs: Any) -> Make:
    given = {"on_client_failure": "skip", "participation": FullParticipation(), "protocols": [GlobalTest()], **kwargs}
    return make(uniform, privacy=privacy, secure_sum=secure_sum, **given)


def test_noise_is_on_the_sent_places_alone(tmp_path: Path) -> None:
    """A round changes 8 + 4 of 48 weights; noise of 1000 · 0.5 / 5 hides by how much clients moved them.

    The deviation of 10 · 12 draws is within five standard errors of σ / √(2n).
    """
    pytest.importorskip("dp_accounting")
    found = []
    for seed in range(10):
        privacy = ClientLevel(0.5, 1000.0, delta=0.01)
        made = simulate(private(privacy, None, seed=seed, max_rounds=1), tmp_path / str(seed))
        moved = flat(made) - begun()
        assert int((moved[:32] != 0).sum()) == 8
        assert int((moved[32:] != 0).sum()) == 4
        found.append(moved[moved != 0])
    drawn = torch.cat(found)
    assert abs(float(drawn.square().mean().sqrt()) - 100) < 5 * 100 / math.sqrt(2 * len(drawn))


def test_a_private_run_has_the_bits_of_one_without_the_secure_sum(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    summed = private(ClientLevel(0.5, 2.0, delta=0.01), SecureSum(3, 0.5))
    plain = private(ClientLevel(0.5, 2.0, delta=0.01), None)
    assert_same(weights(deploy(summed, tmp_path / "one", HOMES)), weights(simulate(plain, tmp_path / "other")))


def shared(nodes: int | None = None) -> Make:
    def parts(folder: Path) -> Any:
        file = str(folder / "key") if "node_" in folder.name else None
        folder.mkdir(parents=True, exist_ok=True)
        privacy = ClientLevel(0.5, 2.0, delta=0.01, honest_nodes=3, key_file=file)
        return private(privacy, SecureSum(3, 0.5, nodes))(folder)

    return parts


def test_with_noise_of_nodes_the_bits_are_the_simulations(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    one = simulate(shared(4), tmp_path / "one")
    other = run(shared(), tmp_path / "other", nodes=seeded(nodes_of(shared(), tmp_path, HOMES_BY_REST)))
    assert_same(weights(one), weights(other))
    assert int((flat(one) != begun()).sum()) <= 3 * 12


def test_a_client_that_fails_keeps_a_state_as_any_other(tmp_path: Path) -> None:
    """It begins with an error of zeros, so that neither its answer nor its state's version tells of its failure."""
    pytest.importorskip("dp_accounting")
    said, grids = list[Any](), list[Watched]()
    nodes = seeded(nodes_of(shared(), tmp_path, HOMES_BY_REST, say=said.append))
    failing = nodes[1].federation.session
    train = failing.train

    def fail(client: Any) -> Any:
        if client.round_idx == 0:
            raise RuntimeError("no")
        return train(client)

    failing.train = fail  # type: ignore[method-assign]  # as a client's own code would
    run(shared(), tmp_path / "run", nodes=nodes, grids=grids)
    answers = [answer for _, message, answer in grids[0].crossed if message.word == "train"]
    assert len(answers) == 3 * 5
    assert all(answer.fields["version"] is not None for answer in answers)
    assert len({answer.word for answer in answers}) == 1
    assert sum("the server gets an update by zeros" in str(line) for line in said) == 1


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("codec", [RandomK(), [common(), QSGD()]], ids=["places of each client", "quantised"])
def test_other_codecs_are_refused(codec: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.uplink_codec needs single updates, which trainer\.secure_sum"):
        trainer(Path(), uplink_codec=codec, secure_sum=SecureSum(3, 1.0))


def test_common_places_need_differences() -> None:
    with pytest.raises(ConfigError, match=r"uplink_codec has common_seed, and difference is false; set it to true"):
        trainer(Path(), uplink_codec=common(difference=False))
