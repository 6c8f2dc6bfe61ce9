"""Names and bits on the wire, counted by hand, and what a hostile sender may put there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_fed.codecs import QSGD, CastCodec, Codec, Context, Int8, RandomK, SignSGD, TopK
from lit_fed.codecs.compressor import pack, unpack
from lit_fed.engine.wire.channel import Direction, codec_of
from lit_fed.engine.wire.payload import num_bytes
from lit_fed.errors import WireError
from tests.support import assert_same

# 300 float32 (places of 9 bits), 5 float64, a scalar, and what no codec of this package touches.
PAYLOAD = {
    "w": torch.linspace(-1, 1, 300).reshape(20, 15),
    "d": torch.linspace(0, 1, 5, dtype=torch.float64),
    "h": torch.tensor(0.5, dtype=torch.bfloat16),
    "n": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.zeros(0),
    "running_mean": torch.ones(4),
}
ALONE = 8 + 3 + 0 + 4 * 4  # an int64, three bools, nothing, a buffer of four float32
CONTEXT = Context(seed=3, buffers={"running_mean"})


def chain(codecs: list[Codec]) -> Codec:
    codec = codec_of("trainer.uplink_codec", codecs)
    assert codec is not None
    return codec


@given(st.integers(1, 17), st.lists(st.integers(0, 2**17 - 1), max_size=40))
def test_codes_come_back_and_take_the_fewest_bytes(bits: int, numbers: list[int]) -> None:
    codes = torch.tensor([number % 2**bits for number in numbers], dtype=torch.int64)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == (len(numbers) * bits + 7) // 8
    assert unpack(packed, bits, len(numbers)).tolist() == codes.tolist()


def test_bits_are_where_they_are_said_to_be() -> None:
    # 1, 2, 3 in 2 bits, lowest first: 0b00_11_10_01 = 57. 5, 6 in 3 bits: 0b00_110_101 = 53.
    assert pack(torch.tensor([1, 2, 3]), 2).tolist() == [57]
    assert pack(torch.tensor([5, 6]), 3).tolist() == [53]


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        # 30 of 300 values of 4 bytes and 9 bits, 1 of 5 of 8 bytes and 3 bits, 1 of 1 of 2 bytes and 1 bit.
        (TopK(0.1), 30 * 4 + 34 + 8 + 1 + 2 + 1),
        (RandomK(0.1), 30 * 4 + 8 + 2),
        # a norm of 4 bytes (8 for float64) for each 100 values, and 3 bits for each of 2 · 3 + 1 levels
        (QSGD(levels=3, bucket=100), 3 * 4 + 113 + 8 + 2 + 4 + 1),
        # a scale of 4 bytes for each of 20 channels, and one byte or half a byte for each value
        (Int8(), 20 * 4 + 300 + 8 + 5 + 4 + 1),
        (Int8(bits=4), 20 * 4 + 150 + 8 + 3 + 4 + 1),
        (SignSGD(), 4 + 38 + 8 + 1 + 4 + 1),
        # the 30, 1 and 1 values of TopK in 4 bits, each of the three tensors with one norm
        (chain([TopK(0.1), QSGD()]), 34 + 4 + 15 + 1 + 8 + 1 + 1 + 4 + 1),
        (chain([RandomK(0.1), CastCodec("bfloat16")]), 30 * 2 + 2 + 2),
    ],
    ids=lambda codec: type(codec).__name__ if isinstance(codec, Codec) else "",
)
def test_bytes_are_as_counted_by_hand(codec: Codec, expected: int) -> None:
    wire = codec.encode(PAYLOAD, CONTEXT)
    others = -2 * 4 if expected == 30 * 2 + 2 + 2 else 0  # the buffer is cast, too
    assert num_bytes(wire) == expected + ALONE + others
    found = codec.decode(wire, CONTEXT)
    assert list(found) == list(PAYLOAD)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in PAYLOAD.items()
    }
    assert_same({name: found[name] for name in ("n", "mask", "none", "running_mean")}, {
        name: PAYLOAD[name] for name in ("n", "mask", "none", "running_mean")
    })  # fmt: skip


@pytest.mark.parametrize("codec", [TopK(), RandomK(), QSGD(), Int8(), SignSGD()], ids=lambda one: type(one).__name__)
def test_zeros_stay_zeros(codec: Codec) -> None:
    zeros = {"w": torch.zeros(7, 5), "b": torch.zeros(3)}
    assert_same(dict(codec.decode(codec.encode(zeros, CONTEXT), CONTEXT)), zeros)


def test_both_ends_draw_alike_and_other_clients_and_rounds_differently() -> None:
    x = {"w": torch.arange(1000.0)}
    sent = [dict(RandomK(0.1).encode(x, Context(seed=seed))) for seed in (1, 1, 2)]
    assert_same(sent[0], sent[1])
    assert not torch.equal(*(next(iter(one.values())) for one in sent[1:]))


def tampered(codec: Codec, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    wire = dict(codec.encode({"w": torch.ones(300)}, CONTEXT))
    assert name in wire
    return wire | {name: values}


@pytest.mark.parametrize(
    ("codec", "wire"),
    [
        (TopK(), {"w|float32|1000000000000|values": torch.ones(1), "w|float32|1000000000000|places": torch.ones(1)}),
        (TopK(), {"w|float32|-3,-4|values": torch.ones(1), "w|float32|-3,-4|places": torch.ones(1)}),
        (TopK(), tampered(TopK(), "w|float32|300|values", torch.ones(4))),
        (TopK(), tampered(TopK(), "w|float32|300|values", torch.ones(3, dtype=torch.float64))),
        (TopK(), tampered(TopK(), "w|float32|300|places", torch.full((4,), 255, dtype=torch.uint8))),
        (TopK(), tampered(TopK(), "w|float32|300|places", torch.ones(9, dtype=torch.uint8))),
        (RandomK(), tampered(RandomK(), "w|float32|300|values", torch.ones(4))),
        (QSGD(), tampered(QSGD(), "w|float32|300|codes", torch.ones(9, dtype=torch.uint8))),
        (QSGD(), tampered(QSGD(), "w|float32|300|codes", torch.ones(2, dtype=torch.uint8))),
        (Int8(), tampered(Int8(), "w|float32|300|codes", torch.ones(304))),
    ],
)  # fmt: skip
def test_what_does_not_fit_its_shape_is_refused(codec: Codec, wire: dict[str, torch.Tensor]) -> None:
    with pytest.raises(WireError, match="use the same codec on both ends"):
        Direction(codec).arrive(wire, Context(seed=3, most_values=300))
