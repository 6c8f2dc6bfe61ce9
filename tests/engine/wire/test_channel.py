"""The wire has one home: payloads are packed, and their bytes counted, by `Channel` alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import lit_fed
from lit_fed.codecs import QSGD, CastCodec, Codec, RandomK, TopK
from lit_fed.engine.wire.channel import Channel, Context, Direction
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate, Flat
from lit_fed.engine.wire.updates import Updates
from lit_fed.federation.server.executor import ServerEnd
from lit_fed.tensors import is_aligned
from tests.support import assert_same

PAYLOAD = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "n": torch.tensor(7),
    "h": torch.ones(5, dtype=torch.float16),
    "d": torch.ones(2, dtype=torch.float64),
}
# float32 of 4 bytes, int64 of 8, float16 of 2, float64 of 8; floats are cast to 2.
CONTEXT, BROADCAST = Context(), Broadcast(0, {"model": {}})
UNCAST, CAST = 6 * 4 + 8 + 5 * 2 + 2 * 8, 6 * 2 + 8 + 5 * 2 + 2 * 2


def test_bytes_are_counted_after_the_codec_each_way() -> None:
    channel = Channel(uplink=CastCodec("bfloat16"))
    arrived = channel.uplink.cross(PAYLOAD, CONTEXT)
    assert arrived.num_bytes == CAST
    assert_same(dict(arrived.payload), PAYLOAD)
    assert {name: tensor.dtype for name, tensor in arrived.payload.items()} == {n: t.dtype for n, t in PAYLOAD.items()}
    assert channel.downlink.cross(PAYLOAD, CONTEXT)[:3] == (PAYLOAD, PAYLOAD, UNCAST)
    assert Channel(downlink=CastCodec("float16")).downlink.cross(PAYLOAD, CONTEXT).num_bytes == CAST


def test_two_machines_come_to_what_one_process_does() -> None:
    link = Direction(CastCodec("float16"))
    arrived, here = (
        Direction(CastCodec("float16")).arrive(link.pack(PAYLOAD, CONTEXT), CONTEXT),
        link.cross(PAYLOAD, CONTEXT),
    )
    assert_same(dict(arrived.payload), dict(here.payload))
    assert arrived.num_bytes == here.num_bytes == CAST


@pytest.mark.parametrize("codec", [None, CastCodec("float16")])
def test_views_arrive_as_from_another_machine(codec: Codec | None) -> None:
    """Contiguous, and where a tensor of its own would begin: last digits of products depend on it."""
    several = torch.arange(40.0)
    views = {"odd": several[3:15].view(3, 4), "turned": several[16:28].view(4, 3).T, "whole": several}
    arrived = Direction(codec).cross(views, CONTEXT).payload
    assert all(map(is_aligned, arrived.values()))
    assert_same(dict(arrived), views)


def test_an_update_crosses_once() -> None:
    update = Channel(uplink=CastCodec("float16")).receive_one(ClientUpdate(0, PAYLOAD), BROADCAST)
    assert update.uplink_bytes == CAST
    assert ServerEnd(uplink=CastCodec("float16")).receive_one(update, BROADCAST) is update


def test_a_received_update_goes_to_other_processes() -> None:
    received = Channel().receive_one(ClientUpdate(3, PAYLOAD), BROADCAST)
    there = pickle.loads(pickle.dumps(received))  # noqa: S301  # as `Workers.gather` does
    assert (there.client_id, there.uplink_bytes) == (3, received.uplink_bytes)
    assert_same(there.payload, PAYLOAD)


def test_a_vector_crosses_without_being_taken_apart() -> None:
    flat = Flat.copy_of({"w": torch.ones(3)}, {})
    assert flat is not None
    (received,) = Channel().receive(Updates.of([ClientUpdate(0, {"w": torch.ones(3)}, flat=flat)]), BROADCAST)
    assert received.flat is flat
    assert received.uplink_bytes == 3 * 4


@pytest.mark.parametrize("codec", [TopK(0.25), RandomK(0.25), QSGD(levels=3)], ids=lambda one: type(one).__name__)
def test_what_the_broadcast_has_not_travels_whole(codec: Codec) -> None:
    """Such as prototypes and sums, of which a sparse codec would leave most entries at 0."""
    wire, memory = Direction(codec), dict[str, torch.Tensor]()
    sent = {"weight": torch.arange(8.0), "sums": torch.arange(1.0, 9.0), "counts": torch.ones(3, 2)}
    known = {"weight": torch.ones(8), "counts": torch.ones(2, 3)}  # of another shape is another tensor
    context = Context(reference=known, memory=memory)
    arrived = wire.arrive(wire.pack(sent, context), Context(reference=known)).payload
    assert_same({name: arrived[name] for name in ("sums", "counts")}, {"sums": sent["sums"], "counts": sent["counts"]})
    assert not torch.equal(arrived["weight"], sent["weight"])
    assert set(memory) <= {"error/weight"}


def test_nobody_else_packs_or_counts() -> None:
    package = Path(lit_fed.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    packs = {name for name, text in texts.items() if "codec.encode(" in text or "codec.decode(" in text}
    heatmaps = {"poses/keypoint_estimator.py", "poses/metrics.py"}  # have codecs of their own
    assert packs - heatmaps == {"engine/wire/channel.py"}


@pytest.mark.parametrize("word", ["Tensor", "load", "quint8", ""])
def test_a_peers_word_is_looked_up_among_dtypes_alone(word: str) -> None:
    with pytest.raises(KeyError):
        CastCodec("float16").decode({f"w|{word}": torch.zeros(1)}, CONTEXT)
