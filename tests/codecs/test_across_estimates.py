"""EF21: both ends hold the same estimate of a client's movement, whatever is lost, late, resumed or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.codecs import QSGD, Codec, Context, RandomK, SignSGD, TopK
from lit_fed.engine.wire.channel import Direction
from lit_fed.errors import ConfigError, WireError
from lit_fed.participation import Asynchronous, FullParticipation, Participation, Speeds, Stragglers
from tests.federation.support import assert_same_states, deploy, simulate
from tests.federation.transport.test_serving_grid import HOMES, wanderers
from tests.support import Points, Wanderer, Wandering, assert_same, fit, kept, rows, trainer, weights

ESTIMATE = "estimate/w"


def ef21(share: float = 0.3) -> TopK:
    return TopK(share, feedback="ef21")


def estimates(made: Any) -> dict[int, list[dict[str, Tensor]]]:
    """By client, what it keeps for its codec, and what the server does."""
    store = made.run.federation.store
    found = {}
    for client_id in range(made.run.federation.data.num_clients):
        own = {n.removeprefix("codec/"): t for n, t in (store.get(client_id) or {}).items() if n.startswith("codec/")}
        found[client_id] = [own, dict(store.decoder(client_id) or {})]
    return found


# ---------------------------------------------------------------------- the estimate


def test_three_updates_by_hand() -> None:
    """C sends the largest of two entries.

    Δ = (3, 1), g = (0, 0): c = (3, 0), g = (3, 0). Δ = (2, 4), Δ - g = (-1, 4): c = (0, 4), g = (3, 4).
    Δ = (2, 4), Δ - g = (-1, 0): c = (-1, 0), g = (2, 4). The reference is (8, 8); the server has it plus g.
    """
    memory, decoder, direction = dict[str, Tensor](), dict[str, Tensor](), Direction(ef21(0.5))
    reference = {"w": torch.tensor([8.0, 8.0])}
    for made, (moved, sent, due) in enumerate(
        [([3.0, 1.0], [3.0], [3, 0]), ([2.0, 4.0], [4.0], [3, 4]), ([2.0, 4.0], [-1.0], [2, 4])]
    ):
        context = Context(reference=reference, memory=memory, decoder=decoder)
        arrived = direction.cross({"w": torch.tensor(moved) + 8}, context)
        assert arrived.wire["w|float32|2|values"].tolist() == sent
        assert int(arrived.wire["updates"]) == made
        assert arrived.payload["w"].tolist() == [8 + one for one in due]
        assert memory[ESTIMATE].tolist() == decoder[ESTIMATE].tolist() == due
        assert arrived.num_bytes == 4 + 1 + 8  # a value, a place of one bit in a byte, and a number


@given(st.lists(st.integers(-(2**20), 2**20), min_size=7, max_size=7))
def test_a_movement_that_repeats_is_known_after_d_over_k_updates(numbers: list[int]) -> None:
    """Each update sends two of seven entries of what is left, exactly: ‖Δ - g‖² falls by k/d or more, to 0 in four."""
    moved = torch.tensor(numbers, dtype=torch.float64) / 2**10
    memory, decoder, direction = dict[str, Tensor](), dict[str, Tensor](), Direction(ef21(0.2))
    left = float(moved.square().sum())
    for _ in range(4):
        context = Context(reference={"w": torch.zeros(7, dtype=torch.float64)}, memory=memory, decoder=decoder)
        arrived = direction.cross({"w": moved}, context).payload["w"]
        after = float((moved - arrived).square().sum())
        assert after <= (1 - 2 / 7) * left * (1 + 1e-12)
        left = after
        assert torch.equal(memory[ESTIMATE], decoder[ESTIMATE])
    assert torch.equal(arrived, moved)


def test_tensors_without_a_reference_and_buffers_travel_whole() -> None:
    payload = {"w": torch.ones(4), "moments": torch.ones(4), "running": torch.ones(4)}
    reference = {"w": torch.zeros(4), "running": torch.zeros(4)}
    memory, decoder = dict[str, Tensor](), dict[str, Tensor]()
    context = Context(reference=reference, memory=memory, decoder=decoder, buffers={"running"})
    arrived = Direction(ef21(0.25)).cross(payload, context).payload
    assert {name: int(tensor.sum()) for name, tensor in arrived.items()} == {"w": 1, "moments": 4, "running": 4}
    assert memory.keys() == decoder.keys() == {ESTIMATE, "updates"}


# ---------------------------------------------------------------------- both ends alike

LOSSES: dict[str, Any] = {
    "none": FullParticipation,
    "lost": lambda: FullParticipation(dropout_before=0.2, dropout_after=0.4),
    "late": lambda: FullParticipation(stragglers=Stragglers(0.02, late="next_round"), dropout_after=0.3),
    "asynchronous": lambda: Asynchronous(
        concurrency=4, buffer=2, speeds=Speeds(sigma=1.0), max_staleness=1, dropout_after=0.2
    ),
}


def run(folder: Path, participation: Participation, rounds: int = 6, codec: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fit(
        folder, Wanderer(), Points(num_clients=5, sizes=(2, 3)), Wandering(), max_rounds=rounds,
        participation=participation, uplink_codec=codec or ef21(), **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
def test_both_ends_hold_the_same_whatever_is_lost(tmp_path: Path, executor: str, losses: str) -> None:
    """A client whose update is lost goes on from the state before it, its method's included, as over nodes."""
    made = run(tmp_path, LOSSES[losses](), executor=executor)
    counts = []
    for client_id, (own, there) in estimates(made).items():
        assert_same(own, there)
        counts.append(int(own.get("updates", 0)))
        if own:
            assert float(kept(made, client_id)["state/rounds"]) == counts[-1]
    arrived = sum(int(float(row["participation/count"])) for row in rows(made.log_dir / "metrics.csv"))
    assert losses != "none" or counts == [6] * 5
    assert losses != "lost" or sum(counts) == arrived < 6 * 5


@pytest.mark.parametrize("losses", ["lost", "late", "asynchronous"])
def test_resumed_with_losses_is_uninterrupted(tmp_path: Path, losses: str) -> None:
    whole = run(tmp_path / "whole", LOSSES[losses]())
    run(tmp_path / "parts", LOSSES[losses](), 3)
    parts = run(tmp_path / "parts", LOSSES[losses](), ckpt_path="last")
    assert_same(weights(whole), weights(parts))
    one, other = estimates(whole), estimates(parts)
    for client_id in one:
        for here, there in zip(one[client_id], other[client_id], strict=True):
            assert_same(here, there)


def test_nodes_with_losses_have_the_simulations_bits(tmp_path: Path) -> None:
    make = wanderers(Wandering, uplink_codec=ef21(), max_rounds=6, taking_part={"dropout_after": 0.4})
    one, other = simulate(make, tmp_path / "one"), deploy(make, tmp_path / "other", HOMES)
    assert_same(weights(one), weights(other))
    assert_same_states(other, tmp_path / "other", one.run.federation.store.state_dict())


def test_versions_of_the_servers_end_are_collected_as_clients_states_are(tmp_path: Path) -> None:
    """Of six rounds two checkpoints stay, the last and the best: at most two versions of each end."""
    made = run(tmp_path, FullParticipation())
    versions = list(made.run.federation.store.files.rounds())
    for client_id in range(5):
        for name in (str(client_id), f"decoder-{client_id}"):
            assert 1 <= sum(one == name for one, _ in versions) <= 2


# ---------------------------------------------------------------------- what is refused


def test_ends_that_differ_are_refused() -> None:
    direction, reference = Direction(ef21()), {"w": torch.zeros(3)}
    wire = direction.pack({"w": torch.ones(3)}, Context(reference=reference))
    for updates in (torch.tensor(1), torch.tensor(0.0), torch.tensor([0, 0]), None):
        told = {name: tensor for name, tensor in wire.items() if name != "updates"}
        told |= {} if updates is None else {"updates": updates}
        with pytest.raises(WireError, match="its update does not follow the 0 updates that the server has of it"):
            direction.arrive(told, Context(reference=reference))


@pytest.mark.parametrize(
    ("codec", "line"),
    [
        ([ef21(), SignSGD()], "has feedback true and ef21; set one of them to false"),
        ([SignSGD(), ef21()], "has feedback true and ef21; set one of them to false"),
        (TopK(difference=False, feedback="ef21"), "has feedback ef21, and difference is false; set it to true"),
        (RandomK(common_seed=True, feedback="ef21"), "has feedback ef21 and common_seed; set feedback to true, or"),
    ],
)
def test_what_does_not_fit_is_refused(codec: Codec | list[Codec], line: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.uplink_codec {line}"):
        trainer(Path(), uplink_codec=codec)


def test_a_chain_has_it_if_one_codec_has() -> None:
    made = trainer(Path(), uplink_codec=[ef21(), QSGD(bucket=4)]).channel.uplink.codec
    assert made is not None
    assert made.feedback == "ef21"
