"""The wire: what crosses, how many bytes it takes, and what a codec does to it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.codecs import CastCodec, Context
from lit_fed.engine.wire.payload import ClientUpdate, Flat, FlatPayload, is_finite, num_bytes, stacked
from lit_fed.errors import ConfigError
from lit_fed.tensors import is_aligned
from tests.support import assert_same

CONTEXT = Context()
PAYLOAD = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "n": torch.tensor(7),
    "h": torch.ones(5, dtype=torch.float16),
    "mask": torch.tensor([True, False, True]),
    "d": torch.ones(2, dtype=torch.float64),
    "none": torch.zeros(0),
}


def test_bytes_by_hand() -> None:
    # 6 float32 of 4 bytes, one int64 of 8, 5 float16 of 2, 3 bools of 1, 2 float64 of 8, nothing.
    assert num_bytes(PAYLOAD) == 6 * 4 + 8 + 5 * 2 + 3 + 2 * 8
    assert num_bytes({}) == 0
    # A view counts what it shows, not the memory behind it.
    assert num_bytes({"view": torch.zeros(10, 10)[:, 0], "same": torch.zeros(1).expand(8)}) == 40 + 32


def test_parts_of_a_vector_lie_in_memory_as_tensors_of_their_own() -> None:
    """Where a product's operands begin decides its last digits, and a part that travelled has memory of its own."""
    made = Flat.copy_of({"bias": torch.randn(3), "w": torch.randn(4, 13), "v": torch.randn(5)}, {})
    assert made is not None
    parts = FlatPayload(made)
    assert all(map(is_aligned, parts.values()))
    assert_same(dict(parts), made.split(made.values))


def test_codec_leaves_integers_and_exact_values_alone() -> None:
    for dtype in ("float16", "bfloat16"):
        codec = CastCodec(dtype)
        wire = codec.encode(PAYLOAD, CONTEXT)
        assert wire["n|int64"] is PAYLOAD["n"]
        assert wire["mask|bool"] is PAYLOAD["mask"]
        assert wire["w|float32"].dtype == getattr(torch, dtype)
        assert_same(dict(codec.decode(wire, CONTEXT)), PAYLOAD)  # small integers are exact in either type


def test_the_other_end_of_the_wire_knows_only_the_payload() -> None:
    # Encoded twice before it is decoded, and decoded by another object: nothing is kept in between.
    sender = CastCodec("float16")
    first, second = (
        sender.encode(PAYLOAD, CONTEXT),
        sender.encode({"w": torch.ones(1, dtype=torch.float64), "a|b": torch.ones(2)}, CONTEXT),
    )
    received = CastCodec("float16").decode(first, CONTEXT)
    assert_same(dict(received), PAYLOAD)
    assert {name: tensor.dtype for name, tensor in received.items()} == {n: t.dtype for n, t in PAYLOAD.items()}
    assert {name: tensor.dtype for name, tensor in CastCodec("float16").decode(second, CONTEXT).items()} == {
        "w": torch.float64,
        "a|b": torch.float32,
    }


# A type with p explicit mantissa bits rounds to the nearest of neighbours 2⁻ᵖ apart (relative to the power of two
# below): by at most 2⁻⁽ᵖ⁺¹⁾ relative. bfloat16 has p = 7 where it keeps float32's exponents from 2⁻¹²⁶; float16 has
# p = 10 from 2⁻¹⁴ to its largest value 65,504.
@pytest.mark.parametrize(
    ("dtype", "smallest", "largest", "bound"),
    [("bfloat16", 2.0**-126, 2.0**127, 2.0**-8), ("float16", 2.0**-14, 65504.0, 2.0**-11)],
)
def test_round_trip_error_is_bounded(dtype: str, smallest: float, largest: float, bound: float) -> None:
    @given(st.lists(st.floats(smallest, largest, width=32) | st.floats(-largest, -smallest, width=32), min_size=1))
    def check(values: list[float]) -> None:
        sent = torch.tensor(values)
        codec = CastCodec(dtype)
        arrived = codec.decode(codec.encode({"x": sent}, CONTEXT), CONTEXT)["x"]
        error = (arrived.double() - sent.double()).abs() / sent.double().abs()
        assert error.max().item() <= bound

    check()


def test_round_trip_error_bound_is_sharp() -> None:
    # Half-way between neighbours, just above 1: 1 + 2⁻⁸ rounds to 1 in bfloat16, 1 + 2⁻¹¹ to 1 in float16.
    for dtype, half in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        codec = CastCodec(dtype)
        wire = codec.encode({"x": torch.tensor([1 + half])}, CONTEXT)
        assert codec.decode(wire, CONTEXT)["x"].item() == 1.0


def test_codec_type_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"CastCodec\.dtype is 'int8'; it must be 'float16' or 'bfloat16'"):
        CastCodec("int8")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_not_finite(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 3, dtype=dtype)
    assert is_finite({"good": torch.ones(2), "x": tensor})
    tensor[2, 1] = bad
    assert not is_finite({"good": torch.ones(2), "x": tensor})


def test_infinities_that_cancel_are_not_finite() -> None:
    assert not is_finite({"x": torch.tensor([math.inf, -math.inf])})


def test_finite_without_floats() -> None:
    assert is_finite({})
    assert is_finite({"n": torch.tensor(3), "empty": torch.zeros(0)})


def test_many_finite_halves_are_finite() -> None:
    # 1000 · 100 = 100,000 is beyond float16's largest value 65,504, though each of them is finite.
    assert is_finite({"x": torch.full((1000,), 100.0, dtype=torch.float16)})


def test_detached_update_survives_the_next_client() -> None:
    memory = torch.ones(2, requires_grad=True)
    update = ClientUpdate(3, {"x": memory}, 5, {"train/loss": 1.0})
    copy = update.detached()
    with torch.no_grad():
        memory.fill_(9.0)
    copy.metrics["train/loss"] = 2.0
    kept: Tensor = copy.payload["x"]
    assert (copy.client_id, copy.weight, kept.tolist(), kept.requires_grad) == (3, 5, [1.0, 1.0], False)
    assert update.metrics == {"train/loss": 1.0}


shapes = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)
floats = st.sampled_from([torch.float16, torch.float32, torch.float64])


@settings(deadline=None)
@given(shapes, floats)
def test_a_vector_splits_into_the_tensors_that_it_is_of(sizes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype) for size in sizes]
    payload = {f"t{position}": tensor for position, tensor in enumerate(tensors)}
    flat = Flat.copy_of(payload, {})
    assert flat is not None
    assert_same(flat.split(flat.values), payload)
    again = Flat.copy_of(dict(reversed(payload.items())), flat.layout)  # of the same names: in the order of the first
    assert again is not None
    assert again.layout is flat.layout
    assert again.values.equal(flat.values)
    lazy = FlatPayload(flat)
    assert_same(dict(lazy), payload)
    assert list(lazy) == list(payload)
    assert len(lazy) == len(payload)
    assert "another" not in lazy


def test_a_vector_is_a_copy_of_its_own() -> None:
    payload = {"w": torch.ones(2)}
    flat = Flat.copy_of(payload, {})
    assert flat is not None
    payload["w"].zero_()
    assert flat.values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "other", [torch.ones(2, dtype=torch.float64), torch.tensor(1), torch.ones(2, device="meta")], ids=str
)
def test_tensors_of_several_types_or_places_are_no_vector(other: Tensor) -> None:
    assert Flat.copy_of({"w": torch.ones(2), "x": other}, {}) is None
    assert Flat.copy_of({"x": torch.tensor([1, 2])}, {}) is None
    assert Flat.copy_of({}, {}) is None


def test_a_large_payload_is_not_copied_into_one_vector() -> None:
    assert Flat.copy_of({"w": torch.empty(2**22)}, {}) is not None
    assert Flat.copy_of({"w": torch.empty(2**22), "x": torch.empty(1)}, {}) is None


def test_consecutive_rows_of_a_matrix_are_stacked_without_a_copy() -> None:
    matrix = torch.arange(12.0).view(4, 3)
    rows = matrix.unbind(0)
    for found in (stacked(rows), stacked(rows[1:3]), stacked(rows[2:3])):
        assert found.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
    assert stacked(rows[1:3]).equal(matrix[1:3])
    for first, length in ((0, 2), (1, 2), (2, 1)):
        parts = [row.narrow(0, first, length) for row in rows]
        for some in (parts, parts[1:], parts[2:3], parts[::2], parts[1::2]):
            found = stacked(some)
            assert found.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
            assert found.equal(torch.stack(some))


@pytest.mark.parametrize("order", [[1, 0], [0, 1, 3], [0, 0], [3, 1, 2]], ids=str)
def test_other_vectors_are_copied(order: list[int]) -> None:
    matrix = torch.arange(12.0).view(4, 3)
    rows = matrix.unbind(0)
    assert stacked([rows[idx] for idx in order]).equal(matrix[order])
    alone = [torch.ones(3), torch.zeros(3)]
    assert stacked(alone).equal(torch.tensor([[1.0, 1, 1], [0, 0, 0]]))
    columns = matrix.unbind(1)
    assert stacked(columns).equal(matrix.mT)
    halves = [matrix.view(-1)[3 * idx : 3 * idx + 3] for idx in (1, 2)]
    assert stacked(halves).equal(matrix[1:3])
