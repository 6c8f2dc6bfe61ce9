"""What goes in comes out, to the bit; what nobody wrote is refused in a line."""

from __future__ import annotations

import math
import pickle
import struct
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_fed.engine.wire.payload import layout_of
from lit_fed.errors import WireError
from lit_fed.federation.messages.wire import (
    Message,
    check_metrics,
    check_payload,
    check_sums,
    check_weight,
    decode,
    encode,
    shown,
)
from lit_fed.tasks import Classifier
from tests.federation.support import blob_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64,
]  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any type and shape, with any bits that the type has: NaN, infinity and −0 among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


names = st.text(max_size=20).filter(lambda text: text.isprintable())
payloads = st.dictionaries(names, tensors(), max_size=4)
numbers = st.integers(-(2**53), 2**53) | st.floats() | st.booleans() | st.none() | names


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, payloads, max_size=3), st.dictionaries(names, numbers, max_size=4))
def test_what_goes_in_comes_out_to_the_bit(groups: dict[str, dict[str, Tensor]], fields: dict[str, Any]) -> None:
    there = decode(encode(Message("train", fields, groups)))
    assert repr(there.fields) == repr(fields)  # NaN is not equal to itself
    assert list(there.tensors) == list(groups)
    for group, payload in groups.items():
        assert list(there.tensors[group]) == list(payload)
        for name, tensor in payload.items():
            other = there.tensors[group][name]
            assert (other.dtype, other.shape, bits(other)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_views_and_tensors_that_share_memory_travel() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    there = decode(encode(Message("train", {}, {"payload": {"a": whole.T, "b": whole[1], "c": whole}})))
    assert torch.equal(there.tensors["payload"]["a"], whole.T)
    assert torch.equal(there.tensors["payload"]["b"], whole[1])


GOOD = encode(Message("answer", {"client": 3}, {"payload": {"w": torch.ones(2, 2)}}))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD)), st.binary(max_size=12), st.integers(0, 12))
def test_damaged_bytes_are_refused_or_are_a_message(place: int, written: bytes, cut: int) -> None:
    blob = GOOD[:place] + written + GOOD[place + cut :]
    found: Any = None
    with suppress(WireError):  # any other error fails
        found = decode(blob)
    assert found is None or all(isinstance(one, Tensor) for part in found.tensors.values() for one in part.values())


LENGTH = struct.pack("<Q", 66)


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(pickle.dumps({"client": 3}), id="a pickle"),
        pytest.param(b"LFW1" + struct.pack("<I", 2**32 - 1), id="a header longer than the message"),
        pytest.param(blob_of(b"[" * 100_000), id="a deep header"),
        pytest.param(blob_of({"word": "train"}), id="half a header"),
        pytest.param(blob_of({"word": "exec", "groups": [], "names": [], "fields": {}}), id="an unknown word"),
        pytest.param(blob_of({"word": ["train"], "groups": [], "names": [], "fields": {}}), id="a list as word"),
        pytest.param(blob_of({"word": "train", "groups": [], "names": [], "fields": []}), id="no fields"),
        pytest.param(blob_of({"word": "ask", "groups": ["a"], "names": [["a", "w"]], "fields": {}}), id="no tensor"),
        pytest.param(blob_of({"word": "train", "groups": [[]], "names": [], "fields": {}}), id="a list as group"),
        pytest.param(
            blob_of(
                {"word": "ask", "groups": ["a"], "names": [["a", "w"]], "fields": {}},
                LENGTH + b'{"0":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,8]}}' + b"\0" * 8,
            ),
            id="a shape beyond its bytes",
        ),
    ],
)  # fmt: skip
def test_what_nobody_wrote_is_refused_in_a_line(blob: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(blob)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_message_over_the_limit_is_not_even_read() -> None:
    with pytest.raises(
        WireError, match=f"a message of {len(GOOD)} bytes exceeds the receiver's limit of 100; raise --most"
    ):
        decode(GOOD, limit=100)


WANTED = layout_of({"w": torch.zeros(2, 3), "n": torch.zeros((), dtype=torch.int64)})
RIGHT = {"w": torch.ones(2, 3), "n": torch.tensor(4)}


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"w": torch.ones(2, 3)}, "lacks 'n'"),
        ({**RIGHT, "__class__": torch.ones(1)}, "holds '__class__'"),
        ({**RIGHT, "w": torch.ones(3, 2)}, r"'w' in the payload of client 3 is float32 of shape \(3, 2\); it must be"),
        ({**RIGHT, "w": torch.ones(2, 3, dtype=torch.float64)}, "is float64 of shape"),
        ({**RIGHT, "n": torch.tensor(4.0)}, "is float32 of shape"),
        ({**RIGHT, "w": torch.full((2, 3), float("nan"))}, "is not finite"),
        ({**RIGHT, "w": torch.full((2, 3), float("-inf"))}, "is not finite"),
        ({**RIGHT, "w": torch.full((2, 3), -1e19)}, r"'w' in the payload of client 3 exceeds 1e\+18"),
        ({**RIGHT, "n": torch.tensor(-1)}, r"'n' in the payload of client 3 is not between 0 and 1.09951e\+12"),
    ],
)  # fmt: skip
def test_an_answer_that_was_not_asked_for_is_refused(payload: dict[str, Tensor], words: str) -> None:
    check_payload(RIGHT, WANTED, "client 3", nonnegative={"n"})
    with pytest.raises(WireError, match=words):
        check_payload(payload, WANTED, "client 3", nonnegative={"n"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_type_is_looked_at(dtype: torch.dtype) -> None:
    """Numbers pass in all of them; what is not one, in those that can hold it, does not."""
    payload = {"w": torch.tensor([0, 1]).to(dtype), "none": torch.zeros(0).to(dtype)}
    check_payload(payload, layout_of(payload), "client 3")
    if dtype.is_floating_point or dtype.is_complex:
        odd = {**payload, "w": torch.tensor([0, math.nan]).to(dtype)}
        with pytest.raises(WireError, match="'w' in the payload of client 3 is not finite"):
            check_payload(odd, layout_of(odd), "client 3")


def test_rows_that_vary_vary_alike() -> None:
    """As many rows as the client has classes, of ten; never more, and the same number of means and variances."""
    layout = layout_of({"mean": torch.zeros(10, 3), "variance": torch.zeros(10, 3), "w": torch.zeros(4)})
    both = frozenset({"mean", "variance"})

    def answer(means: int, variances: int, w: int = 4) -> dict[str, Tensor]:
        return {"mean": torch.ones(means, 3), "variance": torch.ones(variances, 3), "w": torch.ones(w)}

    for rows in (0, 2, 10):
        check_payload(answer(rows, rows), layout, "client 3", both)
    for odd in (answer(11, 11), answer(2, 3), answer(2, 2, w=3)):
        with pytest.raises(WireError, match="in the payload of client 3 is float32 of shape"):
            check_payload(odd, layout, "client 3", both)
    with pytest.raises(WireError, match="it must be float32 of shape"):
        check_payload({**answer(0, 0), "mean": torch.ones(())}, layout, "client 3", both)


@pytest.mark.parametrize(
    "metrics",
    [
        {"train/a\nb": 1.0}, {"": 1.0}, {"train/a": "1"}, {"train/a": True}, {"train/a": math.nan}, {"train/a": 1e300},
        {"train/a": 10**400}, {"train/" + "x" * 300: 1}, {"=train/a": 1.0}, {"train/\x1b[31m": 1.0},
        {"train/\u202e": 1.0},
    ],
)  # fmt: skip
def test_metrics_that_would_spoil_a_table_are_refused(metrics: dict[str, Any]) -> None:
    good = {"train/loss": 0.5, "train/n": 3, "lr": 0.1, "time_s": 2.0}
    assert check_metrics(good, "client 3", trained=True) == good
    with pytest.raises(WireError, match="client 3 sent") as caught:
        check_metrics(metrics, "client 3", trained=True)
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()


@pytest.mark.parametrize("name", ["global/acc", "comm/total_bytes", "uplink_bytes", "acc"])
def test_metrics_of_others_cannot_be_sent_as_those_of_training(name: str) -> None:
    with pytest.raises(WireError, match=f"client 3 sent {name} as a metric of its training; it must begin with train/"):
        check_metrics({name: 1.0}, "client 3", trained=True)


@pytest.mark.parametrize(("name", "value"), [("acc", 1.01), ("acc", -0.01), ("loss", -1.0), ("acc", math.inf)])
def test_metrics_of_a_test_outside_of_what_the_task_says_are_refused(name: str, value: float) -> None:
    ranges = Classifier.ranges
    assert check_metrics({"acc": 1.0, "loss": math.inf}, "client 3", False, ranges) == {"acc": 1.0, "loss": math.inf}
    with pytest.raises(WireError, match=f"client 3 sent {value:.6g} as {name}; it must be between 0 and"):
        check_metrics({name: value}, "client 3", False, ranges)
    with pytest.raises(WireError, match=f"as {name}; it must be between 0 and"):
        check_sums({name: [[3 * value], 3]}, "client 3", 3, False, ranges)


def test_too_many_metrics_are_refused() -> None:
    with pytest.raises(WireError, match="client 3 sent 2,000 metrics"):
        check_metrics({f"m{i}": 1.0 for i in range(2000)}, "client 3", trained=False)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "1", None, True, 2**60, 10**400, 8, 0, 7.5])
def test_weights_that_are_not_registered_are_refused(weight: Any) -> None:
    assert type(check_weight(7, "client 3", {7})) is int
    with pytest.raises(WireError, match="client 3 sent the weight"):
        check_weight(weight, "client 3", {7})


def test_weights_of_a_methods_own_are_bounded() -> None:
    assert check_weight(0.25, "client 3", {7}, heaviest=0.5) == 0.25
    with pytest.raises(WireError, match=r"client 3 sent the weight 0.75; it must be at most 0.5"):
        check_weight(0.75, "client 3", {7}, heaviest=0.5)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[]," * (20 * 2**20), "has more than 1,048,576 bytes"),
        (b"[" + b"[]," * 300_000 + b"[]]", "has more than 262,144 elements"),
        (b'{"word":"' + b"9" * 5000 + b'"}', "has a string of more than 4,096 bytes"),
        (b'{"word":' + b"9" * 5000 + b"}", "has a number of more than 40 digits"),
        (b'{"a":' * 9 + b"1" + b"}" * 9, "is nested deeper than 8, or incomplete"),
        (b'"' + b'\\"' * 400_000, "has a string of more than 4,096 bytes"),
        (b"[" * 200_000, "is nested deeper than 8, or incomplete"),
    ],
)
def test_a_header_that_would_cost_much_is_not_parsed(header: bytes, words: str) -> None:
    """Of 60 MiB of ``[],`` the parser made 1.4 GiB in 16 s."""
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(WireError, match=f"the header of a received message {words}"):
        decode(blob_of(header))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 * len(header) + 2**23  # the blob itself, twice, as the test makes it
    assert time.process_time() - begun < 2


def test_the_list_of_tensors_is_bounded_too() -> None:
    text = b'{"word":"answer","groups":[],"names":[],"fields":{}}'
    with pytest.raises(WireError, match="lists more than 1,048,576 bytes of tensors"):
        decode(blob_of(text, struct.pack("<Q", 2**21) + b" " * 2**21))


def test_a_header_that_nobody_would_take_is_not_sent() -> None:
    with pytest.raises(WireError, match="the header of a message 'answer' has more than 262,144 elem"):
        encode(Message("answer", {"held": [0] * 300_000}))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a\x1b[31mred\x07", r"a\x1b[31mred\x07"),
        ("one\ntwo\r\u2028three", "one two three"),
        ("\u202eevil \ud800 müde", r"\u202eevil \ud800 m\xfcde"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_words_of_others_are_a_line_of_printable_ascii(text: str, plain: str) -> None:
    assert shown(text) == plain
